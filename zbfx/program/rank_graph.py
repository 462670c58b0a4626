"""The graph of one rank while it is built: nodes that move messages, and nodes that call modules.

In: `Message`s, `Bucket`s and modules, in the order of the program. Out: an fx module that takes `transport` first.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx, nn

from zbfx.program import ops
from zbfx.program.calls import GradientBucket, ParameterBucket
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
        return self.graph.call_module(name, tuple(args))

    def post(self, message: Message) -> None:
        self.messages[message.key] = message
        self.graph.call_function(ops.post, (self.transport, message.key))

    def receive(self, message: Message) -> fx.Node:
        """The tuple of a message's values."""
        self.messages[message.key] = message
        return self.graph.call_function(ops.receive, (self.transport, message.key))

    def receive_one(self, message: Message) -> fx.Node:
        """The value of a message that has one."""
        return self.graph.call_function(operator.getitem, (self.receive(message), 0))

    def send(self, message: Message, values: Sequence[fx.Node]) -> None:
        self.messages[message.key] = message
        self.graph.call_function(ops.send, (self.transport, message.key, tuple(values)))

    def release(self, message: Message) -> None:
        self.graph.call_function(ops.release, (self.transport, message.key))

    def reduce(self, bucket: Bucket) -> None:
        """Start to sum a bucket over the replicas."""
        name = f"gradients_{len(self.graph.find_nodes(op='call_function', target=ops.reduce))}"
        gradients = self.call(name, GradientBucket(bucket))
        self.graph.call_function(ops.reduce, (self.transport, bucket.key, gradients))

    def reduced(self, bucket: Bucket) -> None:
        """Wait for a bucket's sum."""
        self.graph.call_function(ops.reduced, (self.transport, bucket.key))

    def gather(self, bucket: Bucket) -> None:
        """Start to collect a bucket's parameters from the replicas."""
        name = f"parameters_{len(self.graph.find_nodes(op='call_function', target=ops.gather))}"
        parameters = self.call(name, ParameterBucket(bucket))
        self.graph.call_function(ops.gather, (self.transport, bucket.key, parameters))

    def gathered(self, bucket: Bucket) -> None:
        """Wait for a bucket's parameters."""
        self.graph.call_function(ops.gathered, (self.transport, bucket.key))

    def module(self, name: str, results: Sequence[fx.Node] = ()) -> fx.GraphModule:
        """The finished graph, which returns `results`."""
        self.graph.output(tuple(results))
        self.graph.lint()
        return fx.GraphModule(self.modules, self.graph, name)
