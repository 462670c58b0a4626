"""Seconds of nodes, as compiled phases run them. In: a joint graph and the seconds of its nodes alone. Out: their
seconds where a compiler fuses those that move bytes with their neighbours, so that what these pass to each other never
leaves the chip."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from zbfx.graphs import Joint
from zbfx.passes.nodes import flop_formula, is_view, storage_owner, value_bytes

Seconds = Callable[[fx.Node], float]


def fused(joint: Joint, seconds: Seconds) -> Seconds:
    """`seconds` of nodes that multiply nothing, times the share of their bytes that comes from or goes to memory: what
    such nodes give to each other does neither. A backward does not find what a forward has made on the chip: it reads
    from memory what that is made of."""
    shares = {node.name: memory_share(node) for node in joint.graph.nodes if is_fused(node) and seconds(node) > 0}
    return lambda node: seconds(node) * shares.get(node.name, 1.0)


def is_fused(node: fx.Node) -> bool:
    """Whether a compiler computes the node beside others, in one kernel."""
    return node.op == "call_function" and "val" in node.meta and not is_view(node) and flop_formula(node) is None


def memory_share(node: fx.Node) -> float:
    """Of the bytes that a node of its own reads and writes, the share that a fused one does."""
    read = {storage_owner(source) for source in node.all_input_nodes if "val" in source.meta}
    written = value_bytes(node)
    every = written + sum(map(value_bytes, read))
    inside = sum(
        value_bytes(source) for source in read if is_fused(source) and is_backward(source) == is_backward(node)
    )
    if all(map(is_fused, readers_of_value(node))):
        inside += written
    return 1.0 - inside / every if every else 1.0


def is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("is_backward"))


def readers_of_value(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a node's value, or a view of it."""
    for user in node.users:
        if is_view(user):
            yield from readers_of_value(user)
        else:
            yield user
