"""The graph of one rank while it is built: nodes that move messages, call modules, and pass values along the chain.
In: `Message`s, `Bucket`s and modules, in the order of the program. Out: an fx module that takes `transport` first."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from zbfx._torch.compiling import graph_module
from zbfx.graphs import add_node
from zbfx.program import ops
from zbfx.program.calls import Bound, GradientBucket, ParameterBucket, Summary
from zbfx.program.chain import Passed, RankChain
from zbfx.program.messages import Message
from zbfx.program.reductions import Bucket


class RankGraph:
    """A graph under construction. `messages` are all that it posts, receives or sends, by key."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.transport = self.graph.placeholder("transport")
        self.modules: dict[str, nn.Module] = {}
        self.messages: dict[str, Message] = {}

    def __len__(self) -> int:
        return len(self.graph.nodes)

    def call(self, name: str, module: nn.Module, args: Sequence[fx.Node] = ()) -> fx.Node:
        self.modules[name] = module
        return add_node(self.graph, "call_module", name, tuple(args))

    def add(self, function: Callable[..., Any], args: tuple[Any, ...], name: str | None = None) -> fx.Node:
        return add_node(self.graph, "call_function", function, args, name)

    def post(self, message: Message) -> None:
        self.messages[message.key] = message
        self.add(ops.post, (self.transport, message.key))

    def receive(self, message: Message) -> fx.Node:
        """The tuple of a message's values."""
        self.messages[message.key] = message
        return self.add(ops.receive, (self.transport, message.key))

    def receive_one(self, message: Message) -> fx.Node:
        """The value of a message that has one."""
        return self.add(operator.getitem, (self.receive(message), 0))

    def send(self, message: Message, values: Sequence[fx.Node]) -> None:
        self.messages[message.key] = message
        self.add(ops.send, (self.transport, message.key, tuple(values)))

    def release(self, message: Message) -> None:
        self.add(ops.release, (self.transport, message.key))

    def reduce(self, bucket: Bucket) -> None:
        name = f"gradients_{len(self.graph.find_nodes(op='call_function', target=ops.reduce))}"
        gradients = self.call(name, GradientBucket(bucket))
        self.add(ops.reduce, (self.transport, bucket.key, gradients))

    def reduced(self, bucket: Bucket) -> None:
        self.add(ops.reduced, (self.transport, bucket.key))

    def gather(self, bucket: Bucket) -> None:
        name = f"parameters_{len(self.graph.find_nodes(op='call_function', target=ops.gather))}"
        parameters = self.call(name, ParameterBucket(bucket))
        self.add(ops.gather, (self.transport, bucket.key, parameters))

    def gathered(self, bucket: Bucket) -> None:
        self.add(ops.gathered, (self.transport, bucket.key))

    def module(self, name: str, results: Sequence[fx.Node] = ()) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.lint()
        return graph_module(self.modules, self.graph, name)


class Relay:
    """Adds a rank's part in the chain (`zbfx.program.chain`): nodes for the loss and the metrics, the optimizer state
    and its verdict, whose functions are bound at run time."""

    def __init__(self, nodes: RankGraph, part: RankChain) -> None:
        self.nodes, self.part = nodes, part

    def verdict(self) -> None:
        """Get the verdict, pass it on, and look at it."""
        source, target = self.part.passed_on(Passed.VERDICT)
        if source is None:
            verdict = self.nodes.call("own_verdict", Bound(Passed.VERDICT.value))
        else:
            self.nodes.post(source)
            verdict = self.nodes.receive_one(source)
        if target is not None:
            self.nodes.send(target, [verdict])
        self.nodes.call("judge", Bound(), [verdict])

    def summary(self, terms: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Make the loss and the metrics where they arise, get them elsewhere, and pass them on. `terms` are those of
        the microbatches: all losses, then all values of each metric."""
        if not self.part.summary:
            return ()
        source, target = self.part.passed_on(Passed.LOSS)
        whole = self.nodes.call("summary", Summary(), terms) if source is None else self.nodes.receive(source)
        entries = range(len(self.part.summary))
        found = [self.nodes.graph.call_function(operator.getitem, (whole, index)) for index in entries]
        if target is not None:
            self.nodes.send(target, found)
        return tuple(found)

    def optimizer_step(self) -> None:
        """Add this rank's gradients to the state, pass it on, and step."""
        source, target = self.part.passed_on(Passed.STATE)
        received = []
        if source is not None:
            self.nodes.post(source)
            received = [self.nodes.receive_one(source)]
        state = self.nodes.call("reduce", Bound(Passed.STATE.value), received)
        if target is not None:
            self.nodes.send(target, [state])
        self.nodes.call("step", Bound(), [state])
