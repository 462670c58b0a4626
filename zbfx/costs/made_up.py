"""Values to call phases with before there are real ones: to time phases, and to load their code. In: fake tensors, and
the graph that says what they are used for. Out: real tensors of their sizes, strides and dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from zbfx._torch.compiling import graph_module
from zbfx._torch.operators import aten
from zbfx.graphs import Phase, Stage, copy_graph
from zbfx.rng import seeded

REFUSALS = (RuntimeError, ValueError, IndexError)  # what ops raise for values outside of their domain

# Ops that stop a GPU for good if a value is outside of their domain.
OF_PROBABILITIES = {
    aten.bernoulli,
    aten.bernoulli_,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binomial,
    aten.multinomial,
    aten.poisson,
}
OF_PIVOTS = {aten.linalg_ldl_solve, aten.linalg_lu_solve, aten.lu_unpack}  # row numbers from 1


def made_up(value: Any, device: torch.device, *, positive: bool = False) -> Any:
    """A real tensor of a fake one's size, strides and dtype: small random floats, zeros otherwise (safe as indices);
    `positive`: floats >= 0, ones otherwise."""
    if not isinstance(value, Tensor):
        return value
    spans = [(size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True)]
    memory = torch.zeros(1 + sum(spans) if value.numel() else 0, dtype=value.dtype, device=device)
    if value.is_floating_point():
        memory.normal_(std=0.02)
        if positive:
            memory.abs_()
    elif positive:
        memory.fill_(1)
    return memory.as_strided(value.size(), value.stride())  # entries may share memory, as in an expanded tensor


def positive_inputs(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What must be positive so that probabilities and pivots are, where any of these nodes takes some: the floats (for
    pivots, integers) that they are computed from. Sums and products of positive numbers are positive."""
    found: set[fx.Node] = set()
    for node in nodes:
        # A random node calls the wrapper that sets its generator, and names the operator first.
        op = getattr(node.args[0] if node.target is seeded else node.target, "overloadpacket", None)
        if op in OF_PROBABILITIES or op in OF_PIVOTS:
            wanted = is_float if op in OF_PROBABILITIES else is_integer
            waiting = [source for source in node.all_input_nodes if wanted(source)]
            while waiting:
                source = waiting.pop()
                if source not in found:
                    found.add(source)
                    waiting += filter(wanted, source.all_input_nodes)
    return found


def is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point()


def is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex())


def argument_of(node: fx.Node, device: torch.device, positive: set[fx.Node]) -> Any:
    if "val" not in node.meta:  # a seed
        return 0
    return made_up(node.meta["val"], device, positive=node in positive)


def argument_makers(graph: fx.Graph, device: torch.device) -> list[Callable[[], Any]]:
    """A function for each argument of a phase's graph, which makes it up."""
    positive = positive_inputs(graph.nodes)
    return [partial(argument_of, node, device, positive) for node in graph.find_nodes(op="placeholder")]


def positive_values(phase: Phase) -> set[str]:
    """The names of the values from which a phase computes probabilities or pivots."""
    nodes = phase.module.graph.find_nodes(op="placeholder")[len(phase.ports) :]
    inputs = positive_inputs(phase.module.graph.nodes)
    return {name for name, node in zip(phase.values, nodes, strict=False) if node in inputs}


def made_up_values(
    stage: Stage, names: Iterable[str], positive: Collection[str], device: torch.device
) -> dict[str, Tensor]:
    """Made-up values of a stage, which share storages as real ones do: above 0 in the storage of a `positive` one."""
    storages: dict[str, list[str]] = defaultdict(list)
    for name in names:
        storages[stage.storages[name][0]].append(name)
    made: dict[str, Tensor] = {}
    for members in storages.values():
        size, filled = stage.storages[members[0]][1], any(name in positive for name in members)
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        for name in members:
            value = stage.examples[name]
            entries = memory[: size // value.element_size() * value.element_size()].view(value.dtype)
            if filled:  # all have one dtype then
                entries.fill_(0.02 if value.is_floating_point() else 1)
            made[name] = entries.as_strided(value.size(), value.stride(), value.storage_offset())
    return made


def argument_keys(phase: Phase) -> list[Any]:
    """A key for each argument of a phase. Two phases of a stage that get one tensor have one key for it."""
    gradients = [("gradient", name) for name in phase.gradients]
    return [*phase.ports, *phase.values, *gradients, *(["seed"] if phase.is_random else [])]


def without_checks(phase: Phase) -> Phase:
    """The phase without checks of values, which made-up ones would not pass. A phase that has none is returned itself,
    as a copy would be compiled once more."""
    if not has_checks(phase):
        return phase
    graph = copy_graph(phase.module.graph)
    for node in graph.nodes:
        if is_check(node):
            graph.erase_node(node)
    return replace(phase, module=graph_module(phase.module, graph, phase.name))


def has_checks(phase: Phase) -> bool:
    return any(map(is_check, phase.module.graph.nodes))


def is_check(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.users and node.meta.get("val", node) is None
