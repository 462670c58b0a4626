"""The nodes that pass the optimizer's state, its verdict and the loss along the chain of ranks
(`zbfx.program.chain`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from zbfx.program import ops
from zbfx.program.chain import RankChain
from zbfx.program.messages import Message


class Bound(nn.Module):
    """A node that runs a function bound at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Callable[..., Any] | None = None

    def forward(self, *args: Any) -> Any:
        assert self.run is not None, "bound before the program runs"
        return self.run(*args)


class Relay:
    """Adds nodes to a rank's graph, and their modules to `modules`; `messages` collects what travels."""

    def __init__(self, graph: fx.Graph, transport: fx.Node, modules: dict[str, nn.Module], part: RankChain) -> None:
        self.graph, self.transport, self.modules, self.part = graph, transport, modules, part
        self.messages: list[Message] = []

    def call(self, name: str, *args: fx.Node) -> fx.Node:
        self.modules[name] = Bound()
        return self.graph.call_module(name, args)

    def receive(self, message: Message) -> fx.Node:
        self.messages.append(message)
        received = self.graph.call_function(ops.receive, (self.transport, message.key))
        return self.graph.call_function(operator.getitem, (received, 0))

    def send(self, message: Message | None, value: fx.Node) -> None:
        if message is not None:
            self.messages.append(message)
            self.graph.call_function(ops.send, (self.transport, message.key, (value,)))

    def post(self, message: Message) -> None:
        self.graph.call_function(ops.post, (self.transport, message.key))

    def verdict(self) -> None:
        """Get the verdict, pass it on, and look at it."""
        source, target = self.part.passed_on("verdict")
        if source is None:
            verdict = self.call("own_verdict")
        else:
            self.post(source)
            verdict = self.receive(source)
        self.send(target, verdict)
        self.call("judge", verdict)

    def loss(self, losses: Sequence[fx.Node]) -> fx.Node:
        """Make the loss where it arises, get it elsewhere, and pass it on."""
        source, target = self.part.passed_on("loss")
        loss = self.call("loss", *losses) if source is None else self.receive(source)
        self.send(target, loss)
        return loss

    def optimizer_step(self) -> None:
        """Add this rank's gradients to the state, pass it on, and step."""
        source, target = self.part.passed_on("state")
        if source is not None:
            self.post(source)
        state = self.call("reduce", *(() if source is None else (self.receive(source),)))
        self.send(target, state)
        self.call("step", state)
