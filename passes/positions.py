"""Joint -> Line: where every node of a joint graph sits along the model, before anything is cut.

Takes   a canonical joint graph.
Gives   a `Line`: the forward nodes that compute activations, in graph order, and a position for each node: for a
        backward node that of the forward node that it differentiates. A cut falls between two positions. What is made
        of parameters by views and casts alone, or of inputs and constants alone, has none: every stage makes it for
        itself.
Raises  `TraceError` where checkpointing repeats one of several random draws from one value: which one cannot be told.
Source  ours: sequence numbers of autograd (`seq_nr`) pair forward and backward, value numbering finds what is
        recomputed.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from zbfx._torch.operators import CAST
from zbfx.errors import TraceError
from zbfx.graphs import Joint, Line, Role
from zbfx.passes.canonicalize import is_gradient_addition
from zbfx.passes.nodes import flop_formula, is_random, is_view

IS_PLACED = "is_placed"  # a key in the meta of nodes that have a position whatever they are made of


def line_up(joint: Joint) -> Line:
    """The line of a canonical joint graph."""
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    gradients = dependents(joint, Role.LOSS_GRADIENT)
    floating = without_position(joint, gradients)
    forward = tuple(n for n in calls if not n.meta["is_backward"] and n not in gradients and n not in floating)
    position = {node: k for k, node in enumerate(forward)}
    backward = [node for node in calls if node not in position and node not in floating]
    everywhere = [node for node in calls if node in floating]
    original = recomputed(forward, [node for node in backward if node not in gradients], everywhere)
    partner = {node.meta.get("seq_nr"): position[node] for node in forward}
    last = len(forward) - 1
    for node in backward:
        if node in gradients:
            after = [position[source] for source in node.all_input_nodes if source in gradients and source in position]
            own = last if is_gradient_addition(node) else partner.get(node.meta.get("seq_nr"), last)
            position[node] = min([own, *after, *saved_for(node, original, position)])
        elif node in original:
            position[node] = position[original[node]]
    for node in reversed(backward):
        if node not in position and node.target is not operator.getitem:
            position[node] = max(
                (position[user] for user in readers(node) if user in position),
                default=partner.get(node.meta.get("seq_nr"), last),
            )
    for node in backward:
        if node not in position:
            position[node] = position[node.args[0]]  # an entry is where its tuple is
    return Line(forward, position, frozenset(gradients), original)


def saved_for(node: fx.Node, original: Mapping[fx.Node, fx.Node], position: Mapping[fx.Node, int]) -> list[int]:
    """The positions of the forward ops that a backward node differentiates, as far as recomputed entries tell. An entry
    that the forward does not read is read by the backward of its op alone."""
    entries = [s for s in node.all_input_nodes if s.target is operator.getitem and s not in original]
    return [position[original[s.args[0]]] for s in entries if s.args[0] in original]  # type: ignore[index]


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a node's value, or an entry of it if it is a tuple."""
    return [reader for user in node.users for reader in (user.users if user.target is operator.getitem else (user,))]


def dependents(joint: Joint, role: Role) -> set[fx.Node]:
    """Every node that depends on an input of this role, and these inputs."""
    found = {node for node, port in joint.input_ports().items() if port.role is role}
    for node in joint.graph.nodes:
        if node.op == "call_function" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def without_position(joint: Joint, gradients: set[fx.Node]) -> set[fx.Node]:
    """The nodes that every stage computes for itself. They are cheap, draw no random numbers, are made of parameters
    alone or of inputs alone, and are no buffer's new value."""
    written = {port.name for port in joint.outputs if port.role is Role.BUFFER_UPDATE}
    updates = {v for v, port in zip(joint.output_values, joint.outputs, strict=True) if port.name in written}
    kinds: dict[fx.Node, set[Role]] = {}
    for node, port in joint.input_ports().items():
        if port.role is Role.PARAMETER:
            kinds[node] = {Role.PARAMETER}
        elif port.role is not Role.LOSS_GRADIENT and not (port.role is Role.BUFFER and port.name in written):
            kinds[node] = {Role.INPUT}
    floating = set()
    for node in joint.graph.nodes:
        sources = node.all_input_nodes
        if node.op != "call_function" or node in gradients or is_random(node) or flop_formula(node) is not None:
            continue
        if node in updates or IS_PLACED in node.meta or not node.users or not kinds.keys() >= set(sources):
            continue
        kind = set[Role]().union(*(kinds[source] for source in sources))
        if kind <= {Role.INPUT} or (kind == {Role.PARAMETER} and (is_view(node) or node.target is CAST)):
            kinds[node] = kind
            floating.add(node)
    return floating


def recomputed(
    forward: tuple[fx.Node, ...], repeats: list[fx.Node], everywhere: list[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Match the nodes that repeat a part of the forward (activation checkpointing) with the nodes that they repeat.
    This is value numbering: of nodes with one op on equal values, the k-th of `repeats` repeats the k-th of `forward`.
    Nodes without a position (`everywhere`) count as one value where they compute the same."""
    pool: dict[str, list[fx.Node]] = defaultdict(list)
    original: dict[fx.Node, fx.Node] = {}
    first: dict[str, fx.Node] = {}
    equal: dict[fx.Node, fx.Node] = {}

    def value_number(node: fx.Node) -> str:
        args = fx.map_arg((node.args, node.kwargs), lambda n: original.get(n) or equal.get(n, n))
        return f"{node.target}{args}"

    for node in everywhere:
        equal[node] = first.setdefault(value_number(node), node)
    for node in forward:
        pool[value_number(node)].append(node)
    draws = {id(nodes) for nodes in pool.values() if len(nodes) > 1 and is_random(nodes[0])}
    for node in repeats:
        matches = pool.get(value_number(node))
        if matches:
            if id(matches) in draws:
                raise TraceError(
                    f"{node.target} draws more than once from one value, at {matches[0].meta.get('stack_trace')}, and "
                    f"checkpointing repeats a draw: which one cannot be told. Let each draw from a value of its own "
                    f"(`x.clone()`), or keep dropout out of the checkpointed part"
                )
            original[node] = matches.pop(0)
    return original
