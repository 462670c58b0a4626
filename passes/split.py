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
        sharing = Sharing(nodes, phase_of)
        for term in (node for node in nodes if node in terms and phase_of[node] is Kind.W):
            settle_in_b(term, sharing, phase_of)
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


class Sharing:
    """Who reads what in the backward of a stage, whose nodes these are, as nodes move from W to B in `phase_of`."""

    def __init__(self, nodes: list[fx.Node], phase_of: dict[fx.Node, Kind]) -> None:
        self.phase_of, self.place = phase_of, {node: k for k, node in enumerate(nodes)}
        self.values: dict[fx.Node, dict[fx.Node, None]] = defaultdict(dict)  # by the owner of their storage
        for node in nodes:
            for source in node.all_input_nodes:
                self.values[storage_owner(source)][source] = None

    def is_late(self, node: fx.Node) -> bool:
        """Whether a node of the stage runs in W."""
        return node in self.place and self.phase_of[node] is Kind.W

    def cone(self, term: fx.Node) -> set[fx.Node]:
        """The nodes in W that serve this term alone."""
        late, pending = {term}, [term]
        while pending:
            for source in pending.pop().all_input_nodes:
                if source not in late and self.is_late(source):
                    late.add(source)
                    pending.append(source)
        cone: set[fx.Node] = set()
        for node in sorted(late, key=self.place.__getitem__, reverse=True):
            if node is term or all(user in cone for user in node.users):
                cone.add(node)
        return cone

    def is_kept_without(self, owner: fx.Node, cone: set[fx.Node]) -> bool:
        """Whether W reads a value in a storage that B or F makes, with other nodes than those of a cone."""
        kept = (value for value in self.values[owner] if not self.is_late(value))
        return any(self.is_late(user) and user not in cone for value in kept for user in value.users)


def settle_in_b(term: fx.Node, sharing: Sharing, phase_of: dict[fx.Node, Kind]) -> None:
    """Move the computation of one parameter gradient to B, if it is cheap and its inputs, kept until W, would take more
    bytes than the gradient."""
    cone = sharing.cone(term)
    inputs = {source for node in cone for source in node.all_input_nodes if source in phase_of} - cone
    if any(map(sharing.is_late, inputs)) or any(flop_formula(node) is not None for node in cone):
        return
    owners = {storage_owner(source) for source in inputs}
    kept_for_term = [owner for owner in owners if not sharing.is_kept_without(owner, cone)]
    if sum(value_bytes(owner) for owner in kept_for_term) > value_bytes(term):
        phase_of.update(dict.fromkeys(cone, Kind.B))
