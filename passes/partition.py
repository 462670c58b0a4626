"""Joint -> Placed: a stage for every node, with cuts where stages are balanced and little crosses.

Takes   a canonical joint graph, the rank of each stage, an estimate of each node's seconds, and the speed of messages.
Gives   the joint graph with a stage for each node. Of all cuts, those whose heaviest stage takes at most `STAGE_SLACK`
        times the least possible remain; of these, those with the fewest bytes crossing; of these, the most even ones. A
        stage weighs what its work takes, or what its messages take where that is more. Where ranks hold several stages,
        cuts then move to relieve the heaviest rank.
Raises  `ZbfxError` for cuts that cannot be made, and for parts that run in another order than in the graph to follow.
Source  contiguous stages, as in PipeDream (Narayanan et al. 2019), by a shortest path through cut positions.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise

import numpy
from torch import fx

from zbfx._torch.operators import aten
from zbfx.errors import ZbfxError, listed
from zbfx.graphs import Joint, Line, Placed, Port, Role, copy_graph
from zbfx.passes.nodes import drop_dead_nodes, is_random, storage_owner, value_bytes
from zbfx.passes.positions import IS_PLACED, line_up

STAGE_SLACK = 1.005  # times the least possible time of the heaviest stage
MAX_CANDIDATES = 600  # positions that the search considers at most


def partition(
    joint: Joint,
    placement: Sequence[int],
    *,
    seconds: Callable[[fx.Node], float],
    bytes_per_s: float,
    cuts: Sequence[str] | None = None,
) -> Placed:
    """Cut a canonical joint graph into as many stages as `placement` has entries, the ranks of the stages. `seconds`
    estimates a node, `bytes_per_s` is the speed at which values cross a cut. `cuts` names the submodules that begin the
    second stage, the third, and so on, and replaces the search."""
    line, stage_count = line_up(joint), len(placement)
    if cuts is None:
        starts = balanced_cuts(joint, line, placement, seconds, bytes_per_s)
    else:
        starts = named_cuts(joint, line, cuts, stage_count)
    return cut_at(joint, line, starts)


def cut_at(joint: Joint, line: Line, starts: Sequence[int]) -> Placed:
    """The joint graph cut before each position in `starts`. No stage recomputes for another one."""
    joint, line = recompute_within_stages(joint, line, stages_from(line, starts))
    return Placed(joint, line, stages_from(line, starts), len(starts) + 1)


def stages_from(line: Line, starts: Sequence[int]) -> dict[fx.Node, int]:
    """The stage of every node that has a position; the second stage begins at position `starts[0]`, and so on."""
    bounds = numpy.array(starts, dtype=int)
    return {node: int(numpy.searchsorted(bounds, k, side="right")) for node, k in line.position.items()}


def recompute_within_stages(joint: Joint, line: Line, stage_of: Mapping[fx.Node, int]) -> tuple[Joint, Line]:
    """Where a cut goes through a checkpointed part, let the later stage recompute from the value that crossed the cut
    in the forward. It holds that value, and the earlier stage recomputes later than it does."""
    graph = copy_graph(joint.graph)
    copies = dict(zip(joint.graph.nodes, graph.nodes, strict=True))
    for node, first in line.original.items():
        for user in node.users:
            if stage_of.get(user, stage_of[node]) > stage_of[node]:
                copies[user].replace_input_with(copies[node], copies[first])
    drop_dead_nodes(graph)
    # Nodes keep their positions: were they matched with the forward again, the second of two equal nodes would be taken
    # for the first where the first is gone.
    left = set(graph.nodes)
    return replace(joint, graph=graph), line.moved({node: copy for node, copy in copies.items() if copy in left})


def place_same(joint: Joint, first: Joint, starts: Sequence[int]) -> Placed | None:
    """Cut a canonical joint graph before each position in `starts`, where another one, `first`, was cut. None if their
    forwards run different operations, or read different parameters and buffers."""
    line = line_up(joint)
    same = operations(joint, line) == operations(first, line_up(first))
    return cut_at(joint, line, starts) if same else None


def operations(joint: Joint, line: Line) -> list[tuple[str, set[str]]]:
    """Of each forward node, in order, the op and the names of the parameters and buffers that it reads."""
    ports = joint.input_ports()
    return [(str(node.target), tensor_names_read(node, line, ports)) for node in line.forward]


def place_like(
    joint: Joint, owners: Mapping[str, frozenset[int]], stage_count: int, loss_stage: int | None = None
) -> Placed:
    """Place a canonical joint graph by the parameters and buffers that it reads; `owners` gives the stages of each.
    Each node goes to the earliest stage that owns all that the node reads, and is no earlier than the stage of the node
    before it; the loss goes to `loss_stage` or later. A buffer that the graph only reads may be read in a later stage
    than its owners: an owner then makes a copy of it to pass on. In evaluation, models only read what training writes.
    What the model computes ahead of its layers, of inputs and buffers alone, is computed where it is first read. Raises
    `ZbfxError` if no such stage is left for a node."""
    return placed_by_reads(lowered(joint), owners, stage_count, loss_stage)


def placed_by_reads(
    joint: Joint, owners: Mapping[str, frozenset[int]], stage_count: int, loss_stage: int | None
) -> Placed:
    line = line_up(joint)
    ports = joint.input_ports()
    losses = joint.outputs_of(Role.LOSS)
    losses += [loss.all_input_nodes[0] for loss in losses if loss.target is operator.getitem]  # not to part a tuple
    stage, stages = 0, list[int]()
    for node in line.forward:
        if node in losses and loss_stage is not None:
            stage = max(stage, loss_stage)
        for name in sorted(tensor_names_read(node, line, ports) & owners.keys()):
            later = [owner for owner in owners[name] if owner >= stage]
            if not later and (passing := passed_on(joint, name, line.forward[bisect_right(stages, max(owners[name]))])):
                return placed_by_reads(passing, owners, stage_count, loss_stage)
            if not later:
                raise ZbfxError(
                    f"the model runs its parts in another order than when it was compiled: {name}, of stage "
                    f"{max(owners[name])}, is read after stage {stage} has begun. Compile a pipeline of its own for it"
                )
            stage = min(later)
        stages.append(stage)
    return cut_at(joint, line, [bisect_left(stages, index) for index in range(1, stage_count)])


def lowered(joint: Joint) -> Joint:
    """A copy of the joint graph in which what is made of inputs, constants, and buffers that the graph only reads comes
    right before the first node that reads it."""
    ports, results = joint.input_ports(), {joint.graph.output_node(), *joint.output_values}
    named = {port.name: node for node, port in ports.items()}
    free = {node for node, port in ports.items() if port.role in (Role.INPUT, Role.CONSTANT, Role.BUFFER)}
    free -= {named.get(port.name) for port in joint.outputs if port.role is Role.BUFFER_UPDATE}
    movable = list[fx.Node]()
    for node in joint.graph.nodes:
        if node not in ports and free.issuperset(node.all_input_nodes) and not is_random(node):
            free.add(node)
            movable += [node] if node.users and node not in results else []
    graph = copy_graph(joint.graph)
    copies = dict(zip(joint.graph.nodes, graph.nodes, strict=True))
    for node in reversed(movable):
        min(copies[node].users).prepend(copies[node])
    return replace(joint, graph=graph)


def passed_on(joint: Joint, name: str, before: fx.Node) -> Joint | None:
    """The joint graph in which all nodes read a copy of the buffer `name`, made ahead of the node `before`. None if
    `name` is no buffer, is one that the graph writes, or has such a copy already."""
    read, port = next((node, port) for node, port in joint.input_ports().items() if port.name == name)
    is_written = any(port.name == name for port in joint.outputs)
    if port.role is not Role.BUFFER or is_written or any(IS_PLACED in user.meta for user in read.users):
        return None
    graph = copy_graph(joint.graph)
    copies = dict(zip(joint.graph.nodes, graph.nodes, strict=True))
    placeholder = copies[read]
    users = list(placeholder.users)
    with graph.inserting_before(min(copies[before], *users)):
        copy = graph.call_function(aten.clone.default, (placeholder,))
    copy.meta = {**placeholder.meta, "is_backward": False, IS_PLACED: True}
    for user in users:
        user.replace_input_with(placeholder, copy)
    return replace(joint, graph=graph)


def tensor_names_read(node: fx.Node, line: Line, ports: Mapping[fx.Node, Port]) -> set[str]:
    """The names of the parameters and buffers that a node reads, also through nodes that every stage makes."""
    found, pending = set(), list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        if source in ports:
            found.add(ports[source].name)
        elif source not in line.position:
            pending += source.all_input_nodes
    return found


def named_cuts(joint: Joint, line: Line, cuts: Sequence[str], stage_count: int) -> list[int]:
    """The position of the first node of each submodule that `cuts` names."""
    if len(cuts) != stage_count - 1:
        raise ZbfxError(
            f"{stage_count} stages have {stage_count - 1} cuts, each named once; found {len(cuts)}: {list(cuts)}. "
            f"There are stages= times stages_per_rank= of them (2 a rank by default in V and interleaved schedules)"
        )
    owners = [module_of(node) for node in line.forward]
    starts = []
    for name in cuts:
        inside = [k for k, owner in enumerate(owners) if owner == name or owner.startswith(name + ".")]
        if not inside:
            known = list(dict.fromkeys(owner for owner in owners if owner))
            close = get_close_matches(name, known, n=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ZbfxError(
                f"cuts name submodules of the model that compute something; found {name!r}{meant}. "
                f"Known: {listed(known)}"
            )
        starts.append(inside[0])
    if starts != sorted(set(starts)) or starts[:1] == [0]:
        raise ZbfxError(
            f"cuts name submodules in the order in which they run, none of them the first, and no place twice; found "
            f"{list(cuts)}"
        )
    forbidden = glued(joint, line)
    for name, start in zip(cuts, starts, strict=True):
        if forbidden[start]:
            raise ZbfxError(
                f"cuts fall where nothing is torn apart; {name!r} begins between the first read of a buffer and its "
                f"last write in a microbatch, at {line.forward[start].meta.get('stack_trace')}: the module that "
                f"updates the buffer is used on both sides. Cut before its first use or after its last"
            )
    return starts


def module_of(node: fx.Node) -> str:
    """The qualified name of the submodule that a forward node was traced in."""
    return str(node.meta.get("stack_trace") or "").strip().partition(" in ")[2]


def balanced_cuts(
    joint: Joint, line: Line, placement: Sequence[int], seconds: Callable[[fx.Node], float], bytes_per_s: float
) -> list[int]:
    """The positions at which the second stage, the third, and so on begin in the best cut that is found."""
    crossing, stage_count = crossing_bytes(line), len(placement)
    candidates = cut_candidates(crossing, glued(joint, line), stage_count - 1)
    if len(candidates) < stage_count - 1:
        raise ZbfxError(
            f"stages={stage_count}: the model can be cut into at most {len(candidates) + 1} stages. Ask for fewer"
        )
    work = numpy.zeros(len(line.forward) + 1)
    for node, k in line.position.items():
        work[k + 1] += seconds(node)
    work = numpy.cumsum(work)
    ends = [0, *candidates, len(line.forward)]
    enter = crossing / bytes_per_s

    # The time that bounds the rate of a stage between two of `ends`: that of its work, or of what enters it.
    stage_s = numpy.maximum(work[ends][None, :] - work[ends][:, None], enter[ends][:, None])
    places = cheapest_path(stage_s, stage_count, crossing[ends])
    if len(set(placement)) < stage_count:
        places = level_ranks(places, placement, stage_s, crossing[ends])
    return [ends[place] for place in places]


def level_ranks(
    starts: list[int], placement: Sequence[int], stage_s: numpy.ndarray, crossing: numpy.ndarray
) -> list[int]:
    """Move one cut at a time as long as the loads of ranks get more even, and the heaviest rank no heavier. No cut
    moves to where more crosses than at the fullest cut of `starts`."""
    end = len(crossing) - 1

    def loads(cuts: Sequence[int]) -> tuple[float, float]:
        """The seconds of the heaviest rank, and the sum of the squares of all ranks' seconds."""
        ranks = [0.0] * (max(placement) + 1)
        for rank, between in zip(placement, pairwise([0, *cuts, end]), strict=True):
            ranks[rank] += float(stage_s[between])
        return max(ranks), sum(load**2 for load in ranks)

    fullest = max(crossing[k] for k in starts)
    best, moved = loads(starts), True
    while moved:
        moved = False
        for index in range(len(starts)):
            low, _, high = [0, *starts, end][index : index + 3]
            for place in [k for k in range(low + 1, high) if crossing[k] <= fullest]:
                cuts = [*starts[:index], place, *starts[index + 1 :]]
                found = loads(cuts)
                if found[0] <= best[0] and found[1] < best[1] * (1 - 1e-9):
                    best, starts, moved = found, cuts, True
    return starts


def cheapest_path(stage_s: numpy.ndarray, stage_count: int, crossing: numpy.ndarray) -> list[int]:
    """The `stage_count - 1` places at which to cut: a shortest path from the first to the last, by dynamic programming
    over the last stage. A stage between places i and j takes `stage_s[i, j]`, and `crossing[i]` bytes enter it."""
    limit = least_heaviest(stage_s, stage_count) * STAGE_SLACK
    fits = numpy.triu(stage_s <= limit, 1)
    # Of paths with equal bytes, but for fractions of one, the most even has the least sum of squares.
    step = numpy.where(fits, crossing[:, None] + (stage_s / limit) ** 2, numpy.inf)
    best, before = step[0], list[numpy.ndarray]()
    for _ in range(stage_count - 1):
        through = best[:, None] + step
        before.append(through.argmin(axis=0))
        best = through.min(axis=0)
    places = [len(crossing) - 1]
    for origin in reversed(before):
        places.append(int(origin[places[-1]]))
    return places[:0:-1]


def least_heaviest(stage_s: numpy.ndarray, stage_count: int) -> float:
    """The least possible time of the heaviest of `stage_count` stages, by dynamic programming over the last stage."""
    cost = numpy.where(numpy.triu(numpy.ones(stage_s.shape, dtype=bool), 1), stage_s, numpy.inf)
    best = cost[0]
    for _ in range(stage_count - 1):
        best = numpy.min(numpy.maximum(best[:, None], cost), axis=0)
    return float(best[-1])


def crossing_bytes(line: Line) -> numpy.ndarray:
    """At index k, the bytes of activations and gradients that cross a cut before position k, each storage once."""
    owner_span: dict[tuple[fx.Node, bool], tuple[int, int]] = {}
    for node, own in line.position.items():
        uses = [line.position[user] for user in node.users if user in line.position]
        key = (storage_owner(node), node in line.gradients)
        low, high = owner_span.get(key, (own, own))
        owner_span[key] = (min([low, own, *uses]), max([high, own, *uses]))
    change = numpy.zeros(len(line.forward) + 2)
    for (owner, _), (low, high) in owner_span.items():
        if owner in line.position:
            change[low + 1] += value_bytes(owner)
            change[high + 1] -= value_bytes(owner)
    return numpy.cumsum(change)[: len(line.forward) + 1]


def glued(joint: Joint, line: Line) -> numpy.ndarray:
    """At index k, whether a cut before position k is forbidden: it would part a tuple from its entries, or the first
    read of a buffer from the write of its new value."""
    forbidden = numpy.zeros(len(line.forward) + 1, dtype=bool)
    for k, node in enumerate(line.forward):
        if node.target is operator.getitem and (source := node.all_input_nodes[0]) in line.position:
            forbidden[line.position[source] + 1 : k + 1] = True
    reads = {str(n.args[0]): k for n, k in line.position.items() if n.args and is_placeholder(n.args[0])}
    names = {port.name: str(node) for node, port in joint.input_ports().items()}
    for value, port in zip(joint.output_values, joint.outputs, strict=True):
        if port.role is Role.BUFFER_UPDATE and value in line.position:
            ends = (line.position[value], reads.get(names[port.name], line.position[value]))
            forbidden[min(ends) + 1 : max(ends) + 1] = True
    return forbidden


def is_placeholder(value: object) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder"


def cut_candidates(crossing: numpy.ndarray, forbidden: numpy.ndarray, cut_count: int) -> list[int]:
    """The allowed positions that no neighbour beats in crossing bytes, or all allowed ones where these are fewer than
    `cut_count`. Of more than `MAX_CANDIDATES`, the cheapest."""
    allowed = [k for k in range(1, len(crossing) - 1) if not forbidden[k]]
    local = [k for k in allowed if crossing[k] <= crossing[k - 1] and crossing[k] <= crossing[k + 1]]
    found = local if len(local) >= cut_count else allowed
    cheapest = sorted(found, key=lambda k: crossing[k])[: max(MAX_CANDIDATES, cut_count)]
    return sorted(cheapest)
