"""Placed -> Split: which backward nodes of a stage are B (the gradient of its input) and which are W.

Takes   a joint graph with a stage for each node.
Gives   the phase of each node: F, B or W. B is every backward node of a stage that a gradient sent to another stage
        depends on; the others are W. Two refinements:
        - The first stage sends no gradient. Its B is the chain of nodes that two or more parameter gradients depend on.
        - A cheap parameter gradient is computed in B where it would keep more bytes for W than it has itself.
        - The backward reads and writes a buffer in B, which runs microbatch after microbatch.
        An op that computes gradients of both kinds at once runs whole in B; `unsplit_notes` names these.
Raises  nothing. Source: section 2 of the paper, for a transformer; reachability in the graph does it for any model.
"""

from __future__ import annotations

import operator
from collections import defaultdict

from torch import fx

from zbfx.graphs import Joint, Placed, Role, Split
from zbfx.passes.nodes import flop_formula, is_view, storage_owner, value_bytes
from zbfx.plan import Kind


def split(placed: Placed) -> Split:
    """The phase of every node that has a stage."""
    forward = set(placed.line.forward)
    backward: dict[int, list[fx.Node]] = defaultdict(list)  # per stage, in graph order
    for node in placed.joint.graph.nodes:
        if node in placed.stage_of and node not in forward:
            backward[placed.stage_of[node]].append(node)
    phase_of = dict.fromkeys(forward, Kind.F)
    terms = set(placed.joint.outputs_of(Role.GRADIENT))
    touching = touching_written_buffers(placed.joint)
    for stage, nodes in backward.items():
        sent = {n for n in nodes if any(placed.stage_of.get(user, stage) != stage for user in n.users)}
        chain = ancestors(nodes, (sent or shared_chain(nodes, terms)) | touching)
        for node in nodes:
            of_tuple = node.target is operator.getitem and node.args[0] in chain
            phase_of[node] = Kind.B if node in chain or of_tuple else Kind.W
        for term in (node for node in nodes if node in terms and phase_of[node] is Kind.W):
            settle_in_b(term, nodes, phase_of)
    return Split(placed, phase_of)


def unsplit_notes(split: Split) -> list[str]:
    """A line for each op that runs whole in B because it computes gradients of both kinds at once."""
    placed = split.placed
    terms = set(placed.joint.outputs_of(Role.GRADIENT))
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node, kind in split.phase_of.items():
        parts = [user for user in node.users if user.target is operator.getitem]
        if kind is Kind.B and len(parts) > 1 and node in placed.line.gradients:
            ends = [is_view_of_term(part, terms) for part in parts if part.users]
            if any(ends) and not all(ends):
                found[str(node.target)].append(node)
    notes = []
    for target, nodes in found.items():
        stages = ", ".join(map(str, sorted({placed.stage_of[node] for node in nodes})))
        place = nodes[0].meta.get("stack_trace") or "an unknown line"
        notes.append(
            f"not split: {target} computes gradients of inputs and parameters at once and runs whole in B "
            f"({len(nodes)} in stages {stages}; {nodes[0].name} at {place})"
        )
    return notes


def is_view_of_term(node: fx.Node, terms: set[fx.Node]) -> bool:
    """Whether a node is one of `terms`, or views alone lead from it to one of them."""
    user = next(iter(node.users), None)
    return node in terms or (
        len(node.users) == 1 and user is not None and is_view(user) and is_view_of_term(user, terms)
    )


def touching_written_buffers(joint: Joint) -> set[fx.Node]:
    """The nodes that read or write a buffer that the graph writes."""
    ends = zip(joint.output_values, joint.outputs, strict=True)
    updates = {port.name: value for value, port in ends if port.role is Role.BUFFER_UPDATE}
    reads = [node for node, port in joint.input_ports().items() if port.name in updates]
    return {*updates.values(), *(user for node in reads for user in node.users)}


def ancestors(nodes: list[fx.Node], targets: set[fx.Node]) -> set[fx.Node]:
    """Those of `nodes` that are targets, or that a target depends on."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in targets or any(user in found for user in node.users):
            found.add(node)
    return found


def shared_chain(nodes: list[fx.Node], terms: set[fx.Node]) -> set[fx.Node]:
    """The activation gradients of a stage that sends none: nodes that at least two parameter gradients depend on."""
    reached: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in reversed(nodes):
        own = frozenset({node} if node in terms else ())
        reached[node] = own.union(*(reached.get(user, frozenset()) for user in node.users))
        if len(reached[node]) > 2:
            reached[node] = frozenset(list(reached[node])[:2])
    return {node for node in nodes if len(reached[node]) > 1 and node not in terms}


def settle_in_b(term: fx.Node, nodes: list[fx.Node], phase_of: dict[fx.Node, Kind]) -> None:
    """Move the computation of one parameter gradient to B, if it is cheap and its inputs, kept until W, would take more
    bytes than the gradient."""
    late = {node for node in nodes if phase_of[node] is Kind.W}
    cone: set[fx.Node] = set()
    for node in reversed(nodes):
        if node is term or (node in late and node.users and all(user in cone for user in node.users)):
            cone.add(node)
    inputs = {source for node in cone for source in node.all_input_nodes if source in phase_of} - cone
    if any(source in late for source in inputs) or any(flop_formula(node) is not None for node in cone):
        return
    kept_anyway = {storage_owner(s) for node in late - cone for s in node.all_input_nodes if s not in late}
    kept_for_term = {storage_owner(source) for source in inputs} - kept_anyway
    if sum(value_bytes(owner) for owner in kept_for_term) > value_bytes(term):
        phase_of.update(dict.fromkeys(cone, Kind.B))
