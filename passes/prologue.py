"""Split -> Split with prologues: what is the same for every microbatch is computed once a step.

Takes   a split joint graph.
Gives   the split with the values that prologues make and keep for all other phases: casts of parameters under autocast,
        weight normalisation, rotary tables, and whatever else the forward computes from parameters, constants, and
        buffers that nothing writes. Equal casts become one. Phases make views of kept values for themselves, and
        the backward of a kept value stays in B and W, microbatch after microbatch: each term of a gradient is rounded
        as before. Left as they were are
        - what is larger than all that it is made of, by more than a table of `TABLE_BYTES`, such as a mask;
        - what is made of parameters in one stage, and read in another one.
Raises  nothing. Source: loop-invariant code motion, with the microbatches as the loop.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from zbfx.graphs import Placed, Port, Role, Split
from zbfx.passes.nodes import is_repeatable, is_view, storage_owner, value_bytes
from zbfx.passes.positions import IS_PLACED
from zbfx.passes.recompute import copy_split
from zbfx.plan import Kind

TABLE_BYTES = 2**25  # of a value that is larger than what it is made of: it is held through the whole step

MadeOf = Mapping[fx.Node, frozenset[fx.Node]]  # of a value that no microbatch changes, the inputs that it is made of


def prologue(before: Split) -> Split:
    """The split with prologues for its stages; the split itself if they would keep nothing."""
    split = copy_split(before)
    merge_equal(split.placed)
    same = unchanging(split)
    kept = frozenset(kept_for_readers(split.placed, same))
    if not kept:
        return before
    placed = split.placed.stage_of
    moved = {node: Kind.P for node in same if node in placed}
    return replace(split, phase_of={**split.phase_of, **moved}, kept=kept)


def merge_equal(placed: Placed) -> None:
    """Let one node stand for all that compute the same, of those that every stage makes for itself: checkpointing casts
    a weight once more in the backward."""
    first: dict[str, fx.Node] = {}
    outputs = set(placed.joint.output_values)
    for node in list(placed.joint.graph.nodes):
        if node.op == "call_function" and node not in placed.stage_of and node not in outputs and is_repeatable(node):
            known = first.setdefault(f"{node.target}{node.args}{node.kwargs}", node)
            if known is not node:
                node.replace_all_uses_with(known)
                placed.joint.graph.erase_node(node)


def unchanging(split: Split) -> MadeOf:
    """The values that are the same for every microbatch, and may be made ahead of all: inputs, and nodes of the
    forward, or of no stage, that are made of such values alone."""
    joint, stage_of = split.placed.joint, split.placed.stage_of
    written = {port.name for port in joint.outputs if port.role is Role.BUFFER_UPDATE}
    outputs = set(joint.output_values)
    found = {node: frozenset([node]) for node, port in joint.input_ports().items() if stays(port, written)}
    parameters = {node for node, port in joint.input_ports().items() if port.role is Role.PARAMETER}

    def may_move(node: fx.Node, sources: frozenset[fx.Node]) -> bool:
        if node in stage_of:
            stages = {stage_of.get(user) for user in node.users}
            leaves = not sources.isdisjoint(parameters) and stages != {stage_of[node]}
            if leaves or IS_PLACED in node.meta or node.meta["is_backward"] or split.phase_of[node] is not Kind.F:
                return False
        return is_view(node) or not sources or value_bytes(node) <= max(TABLE_BYTES, sum(map(value_bytes, sources)))

    for node in joint.graph.nodes:
        if node.op != "call_function" or not found.keys() >= set(node.all_input_nodes):
            continue
        # The entries of a tuple go where it goes.
        ends = {node, *(user for user in node.users if user.target is operator.getitem)}
        if node.meta.get("val") is None or not node.users or not is_repeatable(node) or not outputs.isdisjoint(ends):
            continue
        sources = frozenset[fx.Node]().union(*(found[source] for source in node.all_input_nodes))
        if all(may_move(one, sources) for one in ends):
            found[node] = sources
    return found


def stays(port: Port, written: set[str]) -> bool:
    """Whether no microbatch has, and none makes, another value of an input."""
    return port.role in (Role.PARAMETER, Role.CONSTANT) or (port.role is Role.BUFFER and port.name not in written)


def kept_for_readers(placed: Placed, same: MadeOf) -> Iterator[fx.Node]:
    """Of values that are the same for every microbatch, those that others read, themselves or through views. What is
    cheap and made of nothing, like positions, every phase makes for itself."""
    inputs = set(placed.joint.placeholders)
    for node in placed.joint.graph.nodes:
        if node.op == "call_function" and node not in same:
            owners = {storage_owner(source) for source in node.all_input_nodes if source in same}
            yield from (o for o in owners if o not in inputs and (same[o] or o in placed.stage_of))
