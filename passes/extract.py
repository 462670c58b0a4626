"""Split -> Stages: prologue, F, B and W of every stage as graphs of their own, with their calling conventions.

Takes   a split joint graph.
Gives   a `Stage` for each stage. A phase computes its own nodes, and once more what is not worth keeping: nodes without
        a stage, and views of values of an earlier phase of the stage. Whatever else it reads is a result of another
        phase. A prologue computes all that the stage's phases read of what is kept.
Raises  nothing: `zbfx.verify` refuses stages that would wait for each other. Source: ours; AOTAutograd of torch cuts
        likewise.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zbfx._torch.compiling import graph_module
from zbfx._torch.operators import CAST, aten
from zbfx.graphs import LAST, Phase, Port, Role, Split, Stage, copy_node
from zbfx.passes.accumulate import accumulate_in_products
from zbfx.passes.nodes import expression, is_random, is_view, storage_owner, value_bytes
from zbfx.plan import Kind
from zbfx.rng import seeded, stream_number

TOGETHER = (Role.LOSS, Role.METRIC)
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
        outputs[phase_of_output(split, value, port)].append((value, port))
    own: dict[PhaseKey, list[fx.Node]] = defaultdict(list)
    for node, kind in split.phase_of.items():
        own[placed.stage_of[node], kind].append(node)
    order = NodeOrder(split)
    contents = {key: content_of(split, key, own[key], outputs[key], order) for key in keys}
    results: dict[PhaseKey, set[fx.Node]] = defaultdict(set)
    for (stage, _), content in contents.items():
        for value in content.values:
            results[origin_of(split, stage, value)].add(value)
    stages = []
    for index in range(placed.stage_count):
        contents[index, Kind.P] = prologue_content(results[index, Kind.P], order)
        mine = [(index, kind) for kind in (Kind.P, Kind.F, Kind.B, Kind.W)]
        phases = {key[1]: build_phase(split, key, contents[key], results[key], order.roles) for key in mine}
        crossing = {value for key in mine for value in (*contents[key].values, *results[key])}
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
                origins={node.name: origin_of(split, index, node) for node in crossing},
            )
        )
    return tuple(stages)


def phase_of_output(split: Split, value: fx.Node, port: Port) -> PhaseKey:
    """The phase that returns or writes an output: the one that computes it. Loss and metrics come together, from the F
    of the last stage that computes any of them."""
    placed = split.placed
    if port.role in TOGETHER:
        ends = zip(placed.joint.output_values, placed.joint.outputs, strict=True)
        return max(placed.stage_of.get(other, 0) for other, found in ends if found.role in TOGETHER), Kind.F
    return placed.stage_of.get(value, 0), split.phase_of.get(value, Kind.F)


def origin_of(split: Split, stage: int, value: fx.Node) -> PhaseKey:
    """The phase that makes a value for a stage: what is kept, each stage makes for itself."""
    return (stage, Kind.P) if value in split.kept else (split.placed.stage_of[value], split.phase_of[value])


class NodeOrder:
    """The nodes of a joint graph, in its order, and the roles of its inputs."""

    def __init__(self, split: Split) -> None:
        joint = split.placed.joint
        self.place = {node: k for k, node in enumerate(joint.graph.nodes)}
        self.roles = joint.input_ports()

    def sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.place.__getitem__)


def content_of(
    split: Split, key: PhaseKey, nodes: Sequence[fx.Node], outputs: list[tuple[fx.Node, Port]], order: NodeOrder
) -> Content:
    """What one phase computes and reads, to make these outputs and the values that other phases read. `nodes` are its
    own."""
    stage, _ = key
    placed, own = split.placed, set(nodes)

    def is_recomputed(node: fx.Node) -> bool:
        if node.op == "placeholder" or node in own or node in split.kept:
            return False
        is_free = split.phase_of.get(node, Kind.P) is Kind.P  # no stage's own
        return is_free or (is_view(node) and placed.stage_of[node] == stage)

    inside = own | with_sources((value for value, _ in outputs if is_recomputed(value)), is_recomputed)
    inside |= with_sources((s for node in own for s in node.all_input_nodes if is_recomputed(s)), is_recomputed)
    wanted = {value for value, port in outputs if port.role in LAST}  # by the user, perhaps of an earlier stage
    read = order.sorted(({source for node in inside for source in node.all_input_nodes} | wanted) - inside)
    placeholders = [node for node in read if node.op == "placeholder"]
    return Content(
        nodes=tuple(order.sorted(inside)),
        placeholders=tuple(sorted(placeholders, key=lambda n: PORT_ORDER.index(order.roles[n].role))),
        values=tuple(node for node in read if node.op != "placeholder"),
        outputs=tuple(outputs),
    )


def prologue_content(kept: set[fx.Node], order: NodeOrder) -> Content:
    """What a prologue computes to make these values, and the inputs that it reads."""
    inside = with_sources(kept, lambda node: node.op == "call_function")
    read = order.sorted({source for node in inside for source in node.all_input_nodes} - inside)
    placeholders = sorted(read, key=lambda n: PORT_ORDER.index(order.roles[n].role))
    return Content(tuple(order.sorted(inside)), tuple(placeholders), values=(), outputs=())


def with_sources(nodes: Iterable[fx.Node], goes_on: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """These nodes, and what they read, as far as it `goes_on`."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += filter(goes_on, node.all_input_nodes)
    return found


def build_phase(
    split: Split, key: PhaseKey, content: Content, results: set[fx.Node], roles: Mapping[fx.Node, Port]
) -> Phase:
    """The graph of a phase, which returns `results`, the values that other phases read, and what is for the user."""
    (stage, kind), joint, line = key, split.placed.joint, split.placed.line
    graph = fx.Graph()
    new = Placeholders(graph)
    copies: dict[fx.Node, fx.Node] = {}
    for node in content.placeholders:
        copies[node] = new.placeholder(roles[node].name)
        copies[node].meta = dict(node.meta)
    written = [(value, port.name) for value, port in content.outputs if port.role is Role.BUFFER_UPDATE]
    buffers = {roles[node].name: copies[node] for node in content.placeholders if roles[node].role is Role.BUFFER}
    unread = [name for _, name in written if name not in buffers]
    buffers |= {name: new.placeholder(name) for name in unread}
    for node in content.values:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    computed = {*content.nodes, *content.values}
    assert {value for value, _ in content.outputs} <= computed, "outputs are computed"
    gradients = [(value, port.name) for value, port in content.outputs if port.role is Role.GRADIENT]
    accumulators: dict[str, fx.Node] = {}
    terms: dict[fx.Node, list[str]] = defaultdict(list)
    for value, name in gradients:
        terms[value].append(name)
        if name not in accumulators:
            accumulators[name] = new.placeholder(f"grad_{name}")
            summed = joint.grad_dtypes.get(name, value.meta["val"].dtype)
            accumulators[name].meta["val"] = value.meta["val"].to(summed)
    random = any(is_random(node) for node in content.nodes)
    seed = new.placeholder("seed") if random else None
    for node in content.nodes:
        if is_random(node):
            args: Any = fx.map_arg(node.args, lambda n: copies[n])
            op: Any = node.target
            stream = stream_number(line.original.get(node, node).name)
            copies[node] = graph.call_function(seeded, (op, stream, seed, *args), dict(node.kwargs))
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = copy_node(graph, node, copies)
        for name in terms.get(node, ()):
            graph.call_function(aten.add_.Tensor, (accumulators[name], in_range_of(accumulators[name], copies[node])))
    for value, name in written:
        graph.call_function(aten.copy_.default, (buffers[name], copies[value]))
    last = [(copies[value], port) for role in LAST for value, port in content.outputs if port.role is role]
    ordered = [node for node in content.nodes if node in results]
    graph.output((*(copies[node] for node in ordered), *(value for value, _ in last)))
    return Phase(
        stage=stage,
        kind=kind,
        module=graph_module(torch.nn.Module(), accumulate_in_products(graph), f"{kind}{stage}"),
        ports=(*(roles[node] for node in content.placeholders), *(Port(Role.BUFFER, name) for name in unread)),
        values=tuple(node.name for node in content.values),
        gradients=tuple(accumulators),
        updates=tuple(name for _, name in written),
        results=tuple(node.name for node in ordered),
        last=tuple(port for _, port in last),
        is_random=random,
    )


def in_range_of(accumulator: fx.Node, term: fx.Node) -> fx.Node:
    """The term of a sum; a cast of it where the sum has a dtype that does not hold all its values, as autograd rounds
    each gradient before it adds it."""
    dtype, own = accumulator.meta["val"].dtype, term.meta["val"].dtype
    if torch.promote_types(dtype, own) is dtype:
        return term
    cast = term.graph.call_function(CAST, (term,), {"dtype": dtype})
    cast.meta = {**term.meta, "val": term.meta["val"].to(dtype)}
    return cast


def identifier(name: str) -> str:
    return re.sub(r"\W|^(?=\d)", "_", name)


class Placeholders:
    """Gives a graph its placeholders."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.taken = graph, set[str]()

    def placeholder(self, name: str) -> fx.Node:
        """A new placeholder, with an identifier made from `name` that no other placeholder has."""
        base = identifier(name)
        names = (f"{base}_{k}" if k else base for k in itertools.count())
        target = next(candidate for candidate in names if candidate not in self.taken)
        self.taken.add(target)
        return self.graph.placeholder(target)
