"""The end of a rank's graph: gradients of parameters that several stages or ranks share are exchanged and added up. In:
`SharedGradient`s, the graph after its last action. Out: the same graph, at whose end every holder has the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zbfx.program.calls import AddToGradient, Gradient, PartialSum
from zbfx.program.messages import Message, SharedGradient
from zbfx.program.rank_graph import RankGraph
from zbfx.program.reductions import Bucket

Sums = dict[tuple[str, int], fx.Node]  # by gradient and stage


@dataclass(frozen=True, slots=True)
class SharedSums:
    """Adds the nodes of one rank. `buckets` are those of shared gradients that the rank takes part in; None without
    replicas. Without replicas every holder of a gradient gets each stage's sum and adds them up. With replicas the
    first holder alone does; it sums over the replicas and sends the result to the others. All reductions run in the
    order of the parameters."""

    nodes: RankGraph
    shared: Sequence[SharedGradient]  # that the rank holds
    placement: Sequence[int]
    rank: int
    buckets: Sequence[Bucket] | None

    def add(self) -> None:
        sums = self.sums_of_stages()
        self.exchange(sums)
        for index, gradient in enumerate(self.shared):
            if self.adds_up(gradient, self.rank):
                module = AddToGradient(gradient.name)
                self.nodes.call(f"add_{index}", module, [sums[gradient.name, stage] for stage in gradient.stages])
        if self.buckets is not None:
            self.reduce(self.buckets)

    def adds_up(self, gradient: SharedGradient, rank: int) -> bool:
        return rank == gradient.holders[0] or self.buckets is None

    def sums_of_stages(self) -> Sums:
        return {
            (gradient.name, stage): self.nodes.call(f"sum_{index}_{stage}", PartialSum(gradient.name, stage))
            for index, gradient in enumerate(self.shared)
            for stage in gradient.stages
            if self.placement[stage] == self.rank
        }

    def exchange(self, sums: Sums) -> None:
        """Send this rank's sums to the ranks that add them up, and receive theirs into `sums`."""
        messages = {
            (gradient.name, stage, target): Message(
                f"{gradient.name}:{stage}>{target}", None, None, source, target, (gradient.name,), (gradient.layout,)
            )
            for gradient in self.shared
            for stage in gradient.stages
            for source in [self.placement[stage]]
            for target in gradient.holders
            if target != source and self.rank in (source, target) and self.adds_up(gradient, target)
        }
        incoming = {key: message for key, message in messages.items() if message.target == self.rank}
        for message in incoming.values():
            self.nodes.post(message)
        for (name, stage, _), message in messages.items():
            if message.source == self.rank:
                self.nodes.send(message, [sums[name, stage]])
        for (name, stage, _), message in incoming.items():
            sums[name, stage] = self.nodes.receive_one(message)

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        """Sum over the replicas what this rank has added up, and send it to the other holders."""
        own = {gradient.name for gradient in self.shared if gradient.holders[0] == self.rank}
        messages = [
            Message(f"{g.name}>{target}", None, None, g.holders[0], target, (g.name,), (g.layout,))
            for g in self.shared
            for target in g.holders[1:]
            if self.rank in (g.holders[0], target)
        ]
        for message in messages:
            if message.target == self.rank:
                self.nodes.post(message)
        for bucket in buckets:
            if bucket.key in own:
                self.nodes.reduce(bucket)
        for index, bucket in enumerate(buckets):
            if bucket.key in own:
                self.nodes.reduced(bucket)
                for message in messages:
                    if message.names == bucket.names and message.source == self.rank:
                        self.nodes.send(message, [self.nodes.call(f"total_{index}", Gradient(bucket.key))])
        for index, message in enumerate(messages):
            if message.target == self.rank:
                module = AddToGradient(message.names[0])
                self.nodes.call(f"add_{len(self.shared) + index}", module, [self.nodes.receive_one(message)])
