"""Plain PyTorch with the random numbers of a pipeline, so that the results of both can be compared."""

from __future__ import annotations

from typing import Any

from zbfx import rng
from zbfx._torch.switches import TorchDispatchMode
from zbfx.graphs import Joint
from zbfx.passes.canonicalize import canonicalize
from zbfx.passes.nodes import draws, is_random
from zbfx.passes.positions import line_up


class OtherDraws(Exception):
    """A model draws random numbers otherwise than its graph."""


class Replayed(TorchDispatchMode):
    """Meanwhile, operators of a microbatch draw what the nodes of a joint graph draw: the first one of the forward what
    the first random node of the forward draws, and so on, and likewise in the backward. Raises `OtherDraws` where
    there are more operators than nodes, or fewer (`begin_backward`, `end`)."""

    def __init__(self, joint: Joint) -> None:
        super().__init__()
        repeats = repeated_draws(joint)
        self.streams: dict[bool, list[int]] = {False: [], True: []}  # by whether they are the backward's
        for node in joint.graph.nodes:
            if is_random(node):
                in_backward = bool(node.meta.get("is_backward"))
                self.streams[in_backward].append(rng.stream_number(repeats.get(node.name, node.name)))
        self.begin(0)

    def begin(self, seed: int) -> None:
        """The forward of a microbatch begins, whose random numbers have this seed."""
        self.seed, self.left = seed, iter(self.streams[False])

    def begin_backward(self) -> None:
        self.end()
        self.left = iter(self.streams[True])

    def end(self) -> None:
        """The forward, or the backward, is over."""
        if next(self.left, None) is not None:
            raise OtherDraws("the graph draws more random numbers than the model")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        stream = next(self.left, None)
        if stream is None:
            raise OtherDraws(f"{func} draws random numbers, and no node of the graph is left that does")
        return rng.seeded(func, stream, self.seed, *args, **kwargs)


def repeated_draws(joint: Joint) -> dict[str, str]:
    """The random nodes of a joint graph that recompute, and the nodes that they repeat."""
    if not any(is_random(node) and node.meta.get("is_backward") for node in joint.graph.nodes):
        return {}
    original = line_up(canonicalize(joint)).original
    return {node.name: first.name for node, first in original.items() if is_random(node)}
