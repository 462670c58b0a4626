"""Joint graphs as values: equal for graphs that are equal node by node, whatever their nodes are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from zbfx._torch.tracing import GRADIENT_ADDITION_MARK
from zbfx.graphs import Joint
from zbfx.trace.tracer import trace


class Number(NamedTuple):
    """A node by its place in its graph."""

    place: int


def told(joint: Joint) -> list[Any]:
    """A graph up to the names of its nodes, with the forward node that each node of the backward belongs to."""
    places = {node: Number(place) for place, node in enumerate(joint.graph.nodes)}
    first: dict[Any, Number] = {}
    for node, place in places.items():
        if not node.meta.get("is_backward"):
            first.setdefault(node.meta.get("seq_nr"), place)

    def laid_out(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.stride(), value.dtype
        return [laid_out(entry) for entry in value] if isinstance(value, tuple | list) else value

    def partner(node: fx.Node) -> Number | None:
        if not node.meta.get("is_backward") or GRADIENT_ADDITION_MARK in str(node.meta.get("stack_trace")):
            return None
        return first.get(node.meta.get("seq_nr"))

    nodes = [
        (
            node.op,
            None if node.op == "placeholder" else node.target,
            repr(fx.map_arg((node.args, node.kwargs), places.__getitem__)),
            laid_out(node.meta.get("val")),
            node.meta.get("is_backward"),
            (node.meta.get("stack_trace") or "").strip(),
            partner(node),
        )
        for node in places
    ]
    constants = {name: (value.dtype, repr(value.tolist())) for name, value in joint.constants.items()}
    return [*nodes, joint.inputs, joint.outputs, constants, joint.replaced]


def stamped(joint: Joint) -> int:
    """How many layers were not traced by themselves."""
    return len({node.meta["seq_nr"][0] for node in joint.graph.nodes if isinstance(node.meta.get("seq_nr"), tuple)})


def joints(
    model: nn.Module,
    inputs: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Any = None,
    targets: tuple[Any, ...] = (),
) -> tuple[Joint, Joint]:
    """The graph with layers traced once, and that of the whole."""
    found = [
        trace(model, loss, inputs, dict(kwargs or {}), targets, device=torch.device("cpu"), share_layers=share)[0]
        for share in (True, False)
    ]
    return found[0], found[1]
