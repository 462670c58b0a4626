"""Split -> Stages: the F, B and W of every stage as graphs of their own, with their calling conventions.

Takes   a split joint graph.
Gives   a `Stage` for each stage. A phase computes its own nodes, and once more what is not worth keeping: nodes without
        a stage, and views of values of an earlier phase of the stage. Whatever else it reads is a result of another
        phase.
Raises  nothing: `zbfx.verify` refuses stages that would wait for each other. Source: ours; AOTAutograd of torch cuts
        likewise.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zbfx import _torch
from zbfx._torch import aten
from zbfx.graphs import Phase, Port, Role, Split, Stage
from zbfx.passes.accumulate import accumulate_in_products
from zbfx.passes.nodes import expression, is_random, is_view, storage_owner, value_bytes
from zbfx.plan import Kind
from zbfx.rng import seeded, stream_number

PORT_ORDER = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT, Role.INPUT, Role.LOSS_GRADIENT)
PhaseKey = tuple[int, Kind]  # a stage, and which of its phases


@dataclass(frozen=True)
class Content:
    """The nodes that a phase computes, in graph order, the placeholders and values that it reads, and its outputs."""

    nodes: tuple[fx.Node, ...]
    placeholders: tuple[fx.Node, ...]
    values: tuple[fx.Node, ...]
    outputs: tuple[tuple[fx.Node, Port], ...]


def extract(split: Split) -> tuple[Stage, ...]:
    """The stages of a split joint graph."""
    placed = split.placed
    stage_at = [placed.stage_of[node] for node in placed.line.forward]
    keys = [(stage, kind) for stage in range(placed.stage_count) for kind in (Kind.F, Kind.B, Kind.W)]
    outputs: dict[PhaseKey, list[tuple[fx.Node, Port]]] = defaultdict(list)
    for value, port in zip(placed.joint.output_values, placed.joint.outputs, strict=True):
        outputs[placed.stage_of.get(value, 0), split.phase_of.get(value, Kind.F)].append((value, port))
    contents = {key: content_of(split, key, outputs[key]) for key in keys}
    results: dict[PhaseKey, set[fx.Node]] = defaultdict(set)
    for content in contents.values():
        for value in content.values:
            results[placed.stage_of[value], split.phase_of[value]].add(value)
    stages = []
    for index in range(placed.stage_count):
        own = [key for key in keys if key[0] == index]
        phases = {key[1]: build_phase(split, key, contents[key], results[key]) for key in own}
        crossing = {value for key in own for value in (*contents[key].values, *results[key])}
        stages.append(
            Stage(
                index,
                bisect_left(stage_at, index),
                phases,
                examples={node.name: node.meta["val"] for node in crossing},
                storages={
                    node.name: (owner.name, value_bytes(owner, expression))
                    for node in crossing
                    for owner in [storage_owner(node)]
                },
                origins={node.name: (placed.stage_of[node], split.phase_of[node]) for node in crossing},
            )
        )
    return tuple(stages)


def content_of(split: Split, key: PhaseKey, outputs: list[tuple[fx.Node, Port]]) -> Content:
    """What one phase computes and reads, to make these outputs and the values that other phases read."""
    stage, kind = key
    placed = split.placed
    own = {n for n in split.phase_of if split.phase_of[n] is kind and placed.stage_of[n] == stage}

    def is_recomputed(node: fx.Node) -> bool:
        if node.op == "placeholder" or node in own:
            return False
        return node not in placed.stage_of or (is_view(node) and placed.stage_of[node] == stage)

    inside = set(own)
    pending = [value for value, _ in outputs if is_recomputed(value)]
    pending += [source for node in own for source in node.all_input_nodes if is_recomputed(source)]
    while pending:
        node = pending.pop()
        if node not in inside:
            inside.add(node)
            pending += [source for source in node.all_input_nodes if is_recomputed(source)]
    read = {source for node in inside for source in node.all_input_nodes} - inside
    order = list(placed.joint.graph.nodes)
    roles = placed.joint.input_ports()
    placeholders = [n for n in order if n in read and n.op == "placeholder"]
    return Content(
        nodes=tuple(n for n in order if n in inside),
        placeholders=tuple(sorted(placeholders, key=lambda n: PORT_ORDER.index(roles[n].role))),
        values=tuple(n for n in order if n in read and n.op != "placeholder"),
        outputs=tuple(outputs),
    )


def build_phase(split: Split, key: PhaseKey, content: Content, results: set[fx.Node]) -> Phase:
    """The graph of a phase, which returns `results`, the values that other phases read."""
    stage, kind = key
    joint, line = split.placed.joint, split.placed.line
    roles = joint.input_ports()
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in content.placeholders:
        copies[node] = placeholder(graph, roles[node].name)
        copies[node].meta = dict(node.meta)
    written = [(value, port.name) for value, port in content.outputs if port.role is Role.BUFFER_UPDATE]
    buffers = {roles[node].name: copies[node] for node in content.placeholders if roles[node].role is Role.BUFFER}
    unread = [name for _, name in written if name not in buffers]
    buffers |= {name: placeholder(graph, name) for name in unread}
    for node in content.values:
        copies[node] = placeholder(graph, node.name)
        copies[node].meta = dict(node.meta)
    assert {value for value, _ in content.outputs} <= set(content.nodes), "outputs are computed"
    gradients = [(value, port.name) for value, port in content.outputs if port.role is Role.GRADIENT]
    accumulators: dict[str, fx.Node] = {}
    for value, name in gradients:
        if name not in accumulators:
            accumulators[name] = placeholder(graph, f"grad_{name}")
            summed = joint.grad_dtypes.get(name, value.meta["val"].dtype)
            accumulators[name].meta["val"] = value.meta["val"].to(summed)
    random = any(is_random(node) for node in content.nodes)
    seed = placeholder(graph, "seed") if random else None
    for node in content.nodes:
        if is_random(node):
            args: Any = fx.map_arg(node.args, lambda n: copies[n])
            op: Any = node.target
            stream = stream_number(line.original.get(node, node).name)
            copies[node] = graph.call_function(seeded, (op, stream, seed, *args), dict(node.kwargs))
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        for name in (name for value, name in gradients if value is node):
            graph.call_function(aten.add_.Tensor, (accumulators[name], in_range_of(accumulators[name], copies[node])))
    for value, name in written:
        graph.call_function(aten.copy_.default, (buffers[name], copies[value]))
    loss = [copies[value] for value, port in content.outputs if port.role is Role.LOSS]
    ordered = [node for node in content.nodes if node in results]
    graph.output((*(copies[node] for node in ordered), *loss))
    return Phase(
        stage=stage,
        kind=kind,
        module=fx.GraphModule(torch.nn.Module(), accumulate_in_products(graph), f"{kind}{stage}"),
        ports=(*(roles[node] for node in content.placeholders), *(Port(Role.BUFFER, name) for name in unread)),
        values=tuple(node.name for node in content.values),
        gradients=tuple(accumulators),
        updates=tuple(name for _, name in written),
        results=tuple(node.name for node in ordered),
        has_loss=bool(loss),
        is_random=random,
    )


def in_range_of(accumulator: fx.Node, term: fx.Node) -> fx.Node:
    """The term of a sum; a cast of it where the sum has a dtype that does not hold all its values, as autograd rounds
    each gradient before it adds it."""
    dtype, own = accumulator.meta["val"].dtype, term.meta["val"].dtype
    if torch.promote_types(dtype, own) is dtype:
        return term
    cast = term.graph.call_function(_torch.CAST, (term,), {"dtype": dtype})
    cast.meta = {**term.meta, "val": term.meta["val"].to(dtype)}
    return cast


def identifier(name: str) -> str:
    return re.sub(r"\W|^(?=\d)", "_", name)


def placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """A new placeholder of the graph, with an identifier made from `name` that no other placeholder has."""
    taken = {node.target for node in graph.find_nodes(op="placeholder")}
    base = identifier(name)
    names = (f"{base}_{k}" if k else base for k in itertools.count())
    return graph.placeholder(next(candidate for candidate in names if candidate not in taken))
