"""Split -> Split that holds less between F, B and W, and computes more: the cut as a minimum cut.

Takes   a split joint graph, and for each stage a level: what of its forward may be computed again.
Gives   the split with copies of forward nodes in B and W, each right before its first reader. Of what B and W read of
        F, each value is saved by F or computed again once, as a minimum cut finds. Saving costs `MOVED_PER_HELD_BYTE`
        times the bytes of a storage, computing again the bytes that the op reads and writes. A value that B reads is
        computed again in B, and held from there if W reads it too. A second cut places the values that only W reads.
Raises  nothing. Source: the min-cut partitioner of AOTAutograd, here for three phases, with the cut of networkx;
        segments as in Chen et al. 2016 ("Training Deep Nets with Sublinear Memory Cost").

What prologues keep is there for every phase. Never computed again: reads of buffers that the model writes, and random
ops where no generator can be set.

Level   What may be computed again
none    views, casts of parameters, values of inputs alone: every stage computes these for itself at any level
cheap   also everything but matrix products, convolutions and attention
full    everything. The stage is cut into segments at its narrowest places, and the values there are saved. B computes
        one segment at a time, so that both the saved values and those of one segment stay small
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, sqrt

import networkx
from networkx.algorithms.flow import boykov_kolmogorov
from torch import Tensor, fx

from zbfx.graphs import Placed, Role, Split, copy_graph
from zbfx.passes.nodes import flop_formula, is_random, is_view, storage_owner, value_bytes
from zbfx.plan import Kind

MOVED_PER_HELD_BYTE = 25  # bytes to read or write, at the speed of memory, so as not to hold one byte until B or W


class Level(StrEnum):
    """How much of a stage's forward is computed again, least first."""

    NONE = "none"
    CHEAP = "cheap"
    FULL = "full"


LEVELS = tuple(Level)


def recompute(split: Split, levels: Sequence[Level], *, in_flight: int, random: bool) -> Split:
    """The split with copies of forward nodes in B and W, for each stage as its level says. `in_flight` is the number of
    microbatches that a stage holds at a time, by which `full` chooses the size of its segments. `random` says whether
    random ops may be repeated."""
    if all(level is Level.NONE for level in levels):
        return split
    split = copy_split(split)
    written = written_buffers(split.placed)
    for stage, level in enumerate(levels):
        if level is not Level.NONE:
            nodes = StageNodes.of(split, stage)
            kept = segment_ends(nodes, in_flight) if level is Level.FULL else set()

            def may_repeat(node: fx.Node, level: Level = level, kept: Set[fx.Node] = kept) -> bool:
                if node in kept or any(source in written for source in node.all_input_nodes):
                    return False
                return (random or not is_random(node)) and (level is Level.FULL or flop_formula(node) is None)

            split = repeat_in_backward(split, nodes, may_repeat)
    return split


def copy_split(split: Split) -> Split:
    placed = split.placed
    graph = copy_graph(placed.joint.graph)
    new = dict(zip(placed.joint.graph.nodes, graph.nodes, strict=True))
    stage_of = {new[node]: stage for node, stage in placed.stage_of.items()}
    joint, line = replace(placed.joint, graph=graph), placed.line.moved(new)
    placed = replace(placed, joint=joint, line=line, stage_of=stage_of)
    phase_of = {new[node]: kind for node, kind in split.phase_of.items()}
    return Split(placed, phase_of, frozenset(new[node] for node in split.kept))


def written_buffers(placed: Placed) -> set[fx.Node]:
    names = {port.name for port in placed.joint.outputs if port.role is Role.BUFFER_UPDATE}
    ports = placed.joint.input_ports()
    return {node for node, port in ports.items() if port.role is Role.BUFFER and port.name in names}


@dataclass(frozen=True)
class StageNodes:
    """The nodes of one stage, in graph order: those of F, those of B and W with their kinds, and what F received."""

    stage: int
    forward: tuple[fx.Node, ...]
    backward: Mapping[fx.Node, Kind]
    received: Set[fx.Node]

    @classmethod
    def of(cls, split: Split, stage: int) -> StageNodes:
        placed, phase_of = split.placed, split.phase_of
        own = [node for node in placed.joint.graph.nodes if placed.stage_of.get(node) == stage]
        forward = tuple(node for node in own if phase_of[node] is Kind.F)
        read = {source for node in own for source in node.all_input_nodes if source in phase_of}
        received = {node for node in read if placed.stage_of[node] != stage and phase_of[node] is Kind.F}
        backward = {node: phase_of[node] for node in own if phase_of[node] in (Kind.B, Kind.W)}
        return cls(stage, forward, backward, received)

    def read_by(self, kinds: Set[Kind]) -> set[fx.Node]:
        """The values that phases of these kinds read, of those that F computes or received."""
        known = {*self.forward, *self.received}
        return {s for node, kind in self.backward.items() if kind in kinds for s in node.all_input_nodes if s in known}


def repeat_in_backward(split: Split, nodes: StageNodes, may_repeat: Callable[[fx.Node], bool]) -> Split:
    """Put copies of forward nodes into B and W of one stage, as two minimum cuts choose."""
    for_b, for_w = nodes.read_by({Kind.B}), nodes.read_by({Kind.W})
    chosen = cheapest_repeats(for_b | for_w, lambda n: moved_bytes(n) if may_repeat(n) else inf, nodes)
    in_b = closure(for_b, chosen)
    later = closure(for_w, chosen) - in_b
    # All of `later` is computed again, in B or in W: the second cut weighs only what is held between the two.
    in_w = closure(for_w, cheapest_repeats(for_w, lambda n: 0 if n in later else inf, nodes)) & later
    in_b = closure(in_b | (later - in_w), chosen)
    # What one phase gives another is a tensor, never a tuple.
    in_b |= {node for node in in_w if node.target is operator.getitem and node.args[0] in in_b}
    kind_of = dict.fromkeys(in_w - in_b, Kind.W) | dict.fromkeys(in_b, Kind.B)
    return insert_copies(split, nodes, kind_of)


def moved_bytes(node: fx.Node) -> int:
    """The bytes that an op reads and writes, and one more for the op itself."""
    read = sum(value_bytes(source) for source in node.all_input_nodes if source.meta.get("val") is not None)
    return 1 + value_bytes(node) + read


def is_free(node: fx.Node) -> bool:
    """Whether a node costs nothing, as a view or an entry of a tuple does: it is computed wherever it is needed."""
    return is_view(node) or node.target is operator.getitem


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the network that is cut: before a node is computed again, or where its value is there."""

    node: fx.Node
    is_there: bool


def cheapest_repeats(needed: Set[fx.Node], repeat_cost: Callable[[fx.Node], float], nodes: StageNodes) -> set[fx.Node]:
    """Which forward nodes to compute again for `needed` at the least cost of saving and computing. Every node is an
    edge between its two points. To cut that edge is to save the value. To cut the edge from the source to the first
    point is to compute the node again, which costs `repeat_cost` (infinite: impossible) and needs its inputs."""
    network = networkx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    forward = set(nodes.forward)
    pending, seen = list(needed), set(needed)
    for node in needed:
        network.add_edge(Point(node, True), "sink")
    while pending:
        node = pending.pop()
        own = node in forward
        again, there = Point(node, False), Point(node, True)
        whole = isinstance(node.meta["val"], Tensor) and not (own and is_view(node))
        save_cost = MOVED_PER_HELD_BYTE * value_bytes(storage_owner(node)) if whole else inf
        network.add_edge(again, there, capacity=save_cost)
        network.add_edge("source", again, capacity=(0 if is_free(node) else repeat_cost(node)) if own else inf)
        for source in node.all_input_nodes if own else ():
            if source in forward or source in nodes.received:
                network.add_edge(Point(source, True), again)
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
    _, (_, late) = networkx.minimum_cut(network, "source", "sink", flow_func=boykov_kolmogorov)
    return {point.node for point in late if isinstance(point, Point) and not point.is_there and point.node in forward}


def closure(needed: Set[fx.Node], chosen: Set[fx.Node]) -> set[fx.Node]:
    """The chosen nodes that `needed` depends on through chosen nodes. Views of saved values are left out, as the phase
    that reads such a view makes it."""
    found: set[fx.Node] = set()
    pending = [node for node in needed if node in chosen]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [source for source in node.all_input_nodes if source in chosen]
    real: set[fx.Node] = set()
    for node in sorted(found):
        if not is_free(node) or node.all_input_nodes[0] in real:
            real.add(node)
    return real


def insert_copies(split: Split, nodes: StageNodes, kind_of: Mapping[fx.Node, Kind]) -> Split:
    """Copy each node of `kind_of` into its phase, right before its first reader, and let B and W read the copies. The
    graph of `split` is changed, and so nobody else may hold it."""
    placed = split.placed
    copies: dict[fx.Node, fx.Node] = {}

    def copy_before(reader: fx.Node, node: fx.Node) -> None:
        pending = [node]
        while pending:
            missing = [s for s in pending[-1].all_input_nodes if s in kind_of and s not in copies]
            if missing:
                pending += missing
                continue
            node = pending.pop()
            if node in copies:
                continue
            with placed.joint.graph.inserting_before(reader):
                copies[node] = placed.joint.graph.node_copy(node, lambda source: copies.get(source, source))
            copies[node].meta = {**node.meta, "is_backward": True}

    for reader in nodes.backward:
        for source in reader.all_input_nodes:
            if source in kind_of:
                if source not in copies:
                    copy_before(reader, source)
                reader.replace_input_with(source, copies[source])
    line = placed.line
    original = {**line.original, **{copy: line.original.get(node, node) for node, copy in copies.items()}}
    position = {**line.position, **{copy: line.position[node] for node, copy in copies.items()}}
    stage_of = {**placed.stage_of, **dict.fromkeys(copies.values(), nodes.stage)}
    placed = replace(placed, line=replace(line, original=original, position=position), stage_of=stage_of)
    phase_of = {**split.phase_of, **{copy: kind_of[node] for node, copy in copies.items()}}
    return replace(split, placed=placed, phase_of=phase_of)


def segment_ends(nodes: StageNodes, in_flight: int) -> set[fx.Node]:
    """The values to save at the ends of segments. The more segments, the more they save for `in_flight` microbatches,
    and the less one of them makes. Their number is the one at which the sum of both is least."""
    count = len(nodes.forward)
    place = {node: k for k, node in enumerate(nodes.forward)}
    span: dict[fx.Node, tuple[int, int]] = {}
    for node in (*nodes.received, *nodes.forward):
        uses = [place[user] for user in node.users if user in place]
        owner = storage_owner(node) if node in place and storage_owner(node) in place else node
        low, high = span.get(owner, (place.get(node, -1), -1))
        span[owner] = (low, max([high, *uses]))
    crossing = [0] * (count + 1)
    for owner, (low, high) in span.items():
        for k in range(low + 1, high + 1):
            crossing[k] += value_bytes(owner)
    made = [0] * (count + 1)  # bytes that the backward reads, made before each position
    read = {storage_owner(node) for node in nodes.read_by({Kind.B, Kind.W})}
    for k, node in enumerate(nodes.forward):
        made[k + 1] = made[k] + (value_bytes(node) if node in read else 0)
    inside = [k for k in range(1, count) if 0 < made[k] < made[count] and crossing[k]]
    if not inside:
        return set()
    least = min(crossing[k] for k in inside)
    narrow = [k for k in inside if crossing[k] <= 1.05 * least]
    segments = max(1, round(sqrt(made[count] / (in_flight * least))))
    ends = {min(narrow, key=lambda k: abs(made[k] * segments - j * made[count])) for j in range(1, segments)}
    return {owner for owner, (low, high) in span.items() if any(low < k <= high for k in ends)}
