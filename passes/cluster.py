"""A W phase -> parts of it, each of which makes the gradients of some of its parameters.

Takes   a phase, and in `part_of` the names of the parameters whose gradients a part makes.
Gives   `inseparable`: the parameters in groups whose gradients have no computed value in common, views aside.
        `part_of`: a phase for some groups. Run one after the other for all microbatches, parts give the bits of the
        whole phase.
Raises  nothing. Source: appendix A of the paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from zbfx._torch.compiling import graph_module
from zbfx.graphs import Phase, copy_node
from zbfx.passes.nodes import is_view


def inseparable(phase: Phase) -> list[tuple[str, ...]]:
    """The parameters of a phase in groups, such that gradients of two groups have no computed value in common."""
    if phase.results or phase.updates or phase.last:
        return [phase.gradients] if phase.gradients else []
    groups: list[tuple[set[str], set[fx.Node]]] = []
    for name, cone in cones(phase).items():
        computed = {node for node in cone if node.op == "call_function" and not is_view(node)}
        joined = [group for group in groups if group[1] & computed]
        groups = [group for group in groups if group not in joined]
        groups.append((set().union({name}, *(g[0] for g in joined)), computed.union(*(g[1] for g in joined))))
    ordered = [tuple(name for name in phase.gradients if name in names) for names, _ in groups]
    return sorted(ordered, key=lambda names: phase.gradients.index(names[0]))


def cones(phase: Phase) -> dict[str, set[fx.Node]]:
    """For each parameter, the nodes that its gradient depends on, with the gradient's placeholder and the ops on it."""
    placeholders = phase.module.graph.find_nodes(op="placeholder")
    start = len(phase.ports) + len(phase.values)
    found = {}
    for name, accumulator in zip(phase.gradients, placeholders[start:], strict=False):
        cone: set[fx.Node] = set()
        pending = [accumulator, *accumulator.users]
        while pending:
            node = pending.pop()
            if node not in cone:
                cone.add(node)
                pending += node.all_input_nodes
        found[name] = cone
    return found


def part_of(phase: Phase, names: Iterable[str], index: int) -> Phase:
    """The part of a phase that makes the gradients of `names`, which must be whole groups of `inseparable`."""
    wanted = set(names)
    gradients = tuple(name for name in phase.gradients if name in wanted)
    if gradients == phase.gradients:
        return replace(phase, part=index)
    kept = set().union(*(cone for name, cone in cones(phase).items() if name in wanted))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in phase.module.graph.nodes:
        if node in kept:
            copies[node] = copy_node(graph, node, copies)
    graph.output(())
    graph.lint()
    placeholders = phase.module.graph.find_nodes(op="placeholder")
    inputs = dict(zip((*phase.ports, *phase.values), placeholders, strict=False))
    seed = placeholders[-1] if phase.is_random else None
    return replace(
        phase,
        module=graph_module(torch.nn.Module(), graph, f"{phase.name}p{index}"),
        ports=tuple(port for port in phase.ports if inputs[port] in kept),
        values=tuple(name for name in phase.values if inputs[name] in kept),
        gradients=gradients,
        is_random=seed in kept,
        part=index,
    )
