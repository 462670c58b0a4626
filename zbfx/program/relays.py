"""The nodes of a rank's graph that pass values along the chain of ranks (`zbfx.program.chain`).

In: a rank's graph, the rank's part in the chain. Out: nodes for the loss, the optimizer's state and its verdict, whose
functions are bound at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from zbfx.program.chain import Passed, RankChain
from zbfx.program.rank_graph import RankGraph


class Bound(nn.Module):
    """A node that runs a function bound at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Callable[..., Any] | None = None

    def forward(self, *args: Any) -> Any:
        assert self.run is not None, "bound before the program runs"
        return self.run(*args)


class BatchLoss(Bound):
    """Makes the loss of the batch from the losses of its microbatches."""


class Relay:
    """Adds to a rank's graph what the rank does in the chain."""

    def __init__(self, nodes: RankGraph, part: RankChain) -> None:
        self.nodes, self.part = nodes, part

    def verdict(self) -> None:
        """Get the verdict, pass it on, and look at it."""
        source, target = self.part.passed_on(Passed.VERDICT)
        if source is None:
            verdict = self.nodes.call("own_verdict", Bound())
        else:
            self.nodes.post(source)
            verdict = self.nodes.receive_one(source)
        if target is not None:
            self.nodes.send(target, [verdict])
        self.nodes.call("judge", Bound(), [verdict])

    def loss(self, losses: Sequence[fx.Node]) -> fx.Node:
        """Make the loss where it arises, get it elsewhere, and pass it on."""
        source, target = self.part.passed_on(Passed.LOSS)
        loss = self.nodes.call("loss", BatchLoss(), losses) if source is None else self.nodes.receive_one(source)
        if target is not None:
            self.nodes.send(target, [loss])
        return loss

    def optimizer_step(self) -> None:
        """Add this rank's gradients to the state, pass it on, and step."""
        source, target = self.part.passed_on(Passed.STATE)
        if source is not None:
            self.nodes.post(source)
        received = [] if source is None else [self.nodes.receive_one(source)]
        state = self.nodes.call("reduce", Bound(), received)
        if target is not None:
            self.nodes.send(target, [state])
        self.nodes.call("step", Bound(), [state])
