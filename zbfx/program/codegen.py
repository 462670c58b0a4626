"""Stages and a Schedule -> one Program per rank: a flat fx graph of compute, receive and send, in order.

For each action of the rank's order the program receives what other ranks made for it, calls the stage's phase, and
sends what other ranks need. Receives are posted one action ahead, on each channel in the order in which the other side
sends; what was sent is let go once the plan says that it has arrived. A value dies after its last use: fx writes that
as `x = None` into the code, and the runtime does the same.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from zbfx.graphs import Phase, Stage
from zbfx.plan import Action, Kind, parts
from zbfx.program import ops, streams
from zbfx.program.calls import (
    AddToGradient,
    Gradient,
    GradientBucket,
    Item,
    ParameterBucket,
    PartialSum,
    PhaseCall,
    arguments_of,
    bundles_of,
    packing_of,
)
from zbfx.program.chain import Chain, RankChain, chain_of, loss_layout, loss_rank, order_of_ranks
from zbfx.program.messages import (
    Message,
    SharedGradient,
    messages_of,
    post_positions,
    release_positions,
    shared_gradients,
)
from zbfx.program.reductions import Bucket, RankReductions
from zbfx.program.relays import Relay
from zbfx.schedule.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """What one rank does in a step. `code` prints it; `messages` holds every message that the rank sends or receives,
    `buckets` what it sums over the replicas.

    The module takes `transport` and one `Microbatch` per microbatch, and returns the losses of the microbatches, in
    order, on the rank that computes them, and the loss of the batch on every rank. `verdict` are the first and the end
    of the nodes that look at the last optimizer step, which come between the prefix and the rest; (0, 0): none do.
    """

    rank: int
    module: fx.GraphModule
    messages: dict[str, Message]
    chain: RankChain
    buckets: tuple[Bucket, ...] = ()
    verdict: tuple[int, int] = (0, 0)

    @property
    def code(self) -> str:
        return str(self.module.code)


def generate(
    stages: Sequence[Stage],
    schedule: Schedule,
    reductions: Sequence[RankReductions] = (),
    chain: Chain | None = None,
) -> tuple[Program, ...]:
    """One program per rank of the schedule; with `reductions` (per rank), one that sums gradients over replicas; with
    a `chain` that passes a state, one for steps whose optimizer waits for no barrier."""
    messages = messages_of(stages, schedule)
    shared = shared_gradients(stages, schedule.costs.placement)
    if chain is None:
        ranks = order_of_ranks(schedule, loss_rank(stages, schedule.costs.placement))
        chain = chain_of(schedule, messages, ranks, loss_layout(stages))
    return tuple(
        RankProgram(
            stages, schedule, messages, shared, rank, reductions[rank] if reductions else None, chain
        ).generate()
        for rank in range(len(schedule.ranks))
    )


def optimizer_program(chain: Chain, schedule: Schedule, rank: int) -> Program:
    """What a rank does after its step: passes the state of all gradients on and steps its optimizer."""
    graph, modules = fx.Graph(), dict[str, nn.Module]()
    part = RankChain(chain, schedule, (), rank)
    relay = Relay(graph, graph.placeholder("transport"), modules, part)
    relay.optimizer_step()
    graph.output(())
    module = fx.GraphModule(modules, graph, f"Optimizer{rank}")
    return Program(rank, module, {m.key: m for m in relay.messages}, part)


class RankProgram:
    """Builds the graph of one rank: `nodes` maps (value or bundle, microbatch) to the node that holds it."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        messages: Sequence[Message],
        shared: Sequence[SharedGradient],
        rank: int,
        reductions: RankReductions | None,
        chain: Chain,
    ) -> None:
        self.schedule = schedule
        self.stages, self.rank, self.placement = stages, rank, schedule.costs.placement
        self.order = [part for action in schedule.ranks[rank] for part in parts(action)]
        self.beside = dict(schedule.beside)
        self.guests = {host: guest for guest, host in schedule.beside}
        self.shared = [gradient for gradient in shared if rank in gradient.holders]
        self.outgoing = [m for m in messages if m.source == rank]
        self.incoming = [m for m in messages if m.target == rank]
        self.reductions = reductions
        self.graph = fx.Graph()
        self.transport = self.graph.placeholder("transport")
        self.microbatches = [self.graph.placeholder(f"microbatch_{k}") for k in range(schedule.microbatches)]
        self.nodes: dict[tuple[Item, int], fx.Node] = {}
        self.modules: dict[str, nn.Module] = {}
        self.part = RankChain(chain, schedule, self.incoming, rank)
        self.relay = Relay(self.graph, self.transport, self.modules, self.part)
        self.verdict = (0, 0)
        self.batch_loss: tuple[fx.Node, ...] = ()

    def generate(self) -> Program:
        posts, releases = self.posts(), self.releases()
        received, sent = by_action(self.incoming, "consumer"), by_action(self.outgoing, "producer")
        reductions = self.reductions or RankReductions(())
        calls = reductions.calls(self.order, self.stages)
        starts, reads = reductions.starts(calls), reductions.reads(calls)
        for bucket in (bucket for position in sorted(reads) for bucket in reads[position]):
            self.gather(bucket)
        final: dict[Action, list[Bucket]] = defaultdict(list)  # after which action buckets are
        whole = len(self.order) - reductions.trailing  # the calls before the Ws in parts, which let nothing go
        for position, (action, phase) in enumerate(calls):
            self.look_at_verdict(position, posts)
            for message in releases[position] if position < whole else ():
                self.graph.call_function(ops.release, (self.transport, message.key))
            self.post(posts, position)
            self.pass_on_loss(position)
            joins = self.fork(self.guests[action]) if action in self.guests else ()
            for message in received[action]:
                node = self.graph.call_function(ops.receive, (self.transport, message.key))
                self.unpack(node, message.names, action.microbatch)
            for bucket in reads.get(position, ()):
                self.graph.call_function(ops.gathered, (self.transport, bucket.key))
            if action not in self.beside:
                self.compute(action, phase)
            for message in sent[action]:
                values = tuple(self.nodes[name, action.microbatch] for name in message.names)
                self.graph.call_function(ops.send, (self.transport, message.key, values))
            if joins:
                self.graph.call_function(streams.join, joins)
            final[self.beside.get(action, action)] += starts.get(position, ())
            if action not in self.beside:
                for bucket in final.pop(action, ()):
                    self.reduce(bucket)
        end = len(self.order)
        self.look_at_verdict(end, posts)
        self.post(posts, end)
        self.pass_on_loss(end)
        exchanged = self.exchange_shared_gradients()
        for bucket in reductions.buckets:
            if not bucket.shared:
                self.graph.call_function(ops.reduced, (self.transport, bucket.key))
        self.graph.output((*self.losses(), *self.batch_loss))
        self.graph.lint()
        module = fx.GraphModule(self.modules, self.graph, f"Rank{self.rank}")
        messages = (*self.incoming, *self.outgoing, *exchanged, *self.relay.messages)
        return Program(self.rank, module, {m.key: m for m in messages}, self.part, reductions.buckets, self.verdict)

    def posts(self) -> dict[int, list[Message]]:
        return post_positions(self.part.incoming, self.order, self.part.needed_at(), self.part.not_before())

    def releases(self) -> dict[int, list[Message]]:
        releases = release_positions(self.outgoing, self.schedule, self.rank)
        moved: dict[int, list[Message]] = defaultdict(list)
        for position, found in sorted(releases.items()):
            for message in found:
                late = self.part.released_after_verdict(message)
                moved[max(position, self.part.prefix) if late else position].append(message)
        return moved

    def post(self, posts: dict[int, list[Message]], position: int) -> None:
        for message in posts.pop(position, ()):
            self.graph.call_function(ops.post, (self.transport, message.key))

    def look_at_verdict(self, position: int, posts: dict[int, list[Message]]) -> None:
        """Before the action at the end of the prefix, where an optimizer step is validated."""
        if self.part.validates and position == self.part.prefix:
            here = posts.get(position, ())
            for message in [m for m in here if m in self.part.dropped and m.source in self.part.later]:
                self.graph.call_function(ops.post, (self.transport, message.key))
                posts[position].remove(message)
            begin = len(self.graph.nodes)
            self.relay.verdict()
            self.verdict = (begin, len(self.graph.nodes))

    def pass_on_loss(self, position: int) -> None:
        """Before the action that the plan says, once everything that comes before it on its channel is posted."""
        if position == self.part.loss_at and not self.batch_loss:  # Ws in parts come after the last position too
            self.batch_loss = (self.relay.loss(self.losses()),)

    def losses(self) -> list[fx.Node]:
        return [self.nodes["loss", k] for k in range(len(self.microbatches)) if ("loss", k) in self.nodes]

    def compute(self, action: Action, phase: Phase) -> None:
        if phase.is_empty:
            return
        k = action.microbatch
        module = self.call_of(phase)
        args = (self.microbatches[k], *(self.nodes[item, k] for item in module.arguments))
        call = self.graph.create_node("call_module", phase.name, args, name=f"{phase.name}_{k}")
        call.meta["action"] = action
        self.unpack(call, module.returned, k)

    def reduce(self, bucket: Bucket) -> None:
        """Start to sum a bucket over the replicas."""
        name = f"gradients_{len(self.graph.find_nodes(op='call_function', target=ops.reduce))}"
        self.modules[name] = GradientBucket(bucket)
        self.graph.call_function(ops.reduce, (self.transport, bucket.key, self.graph.call_module(name)))

    def gather(self, bucket: Bucket) -> None:
        """Start to collect a bucket's parameters from the replicas."""
        name = f"parameters_{len(self.graph.find_nodes(op='call_function', target=ops.gather))}"
        self.modules[name] = ParameterBucket(bucket)
        self.graph.call_function(ops.gather, (self.transport, bucket.key, self.graph.call_module(name)))

    def fork(self, action: Action) -> tuple[fx.Node, ...]:
        """Start a W on the second stream; returns the arguments of its join."""
        phase = self.stages[action.stage].phases[action.kind]
        if phase.is_empty:
            return ()
        call, name = self.call_of(phase), f"{phase.name}_beside"
        self.modules.setdefault(name, streams.Beside(call))
        k = action.microbatch
        args = (self.microbatches[k], *(self.nodes[item, k] for item in call.arguments))
        started = self.graph.create_node("call_module", name, args, name=f"{phase.name}_{k}")
        started.meta["action"] = action
        return (started, *args)

    def call_of(self, phase: Phase) -> PhaseCall:
        """The module that runs a phase, one for all microbatches."""
        known = self.modules.get(phase.name)
        if isinstance(known, PhaseCall):
            return known
        bundles = bundles_of(self.stages, phase.stage)
        call = PhaseCall(phase, arguments_of(phase, bundles), packing_of(phase, bundles[phase.kind]))
        self.modules[phase.name] = call
        return call

    def exchange_shared_gradients(self) -> list[Message]:
        """After the last action: every holder of a shared gradient gets each stage's sum, and adds them up.

        Where there are replicas, the first holder alone does, sums over the replicas, and sends what comes out to the
        others: one reduction, in the order of the parameters.
        """
        sums = self.sums_of_stages()
        messages = self.send_sums(sums)
        for index, gradient in enumerate(self.shared):
            if self.adds_up(gradient, self.rank):
                self.modules[f"add_{index}"] = AddToGradient(gradient.name)
                self.graph.call_module(f"add_{index}", tuple(sums[gradient.name, stage] for stage in gradient.stages))
        return messages if self.reductions is None else messages + self.reduce_shared_gradients(self.reductions)

    def adds_up(self, gradient: SharedGradient, rank: int) -> bool:
        return rank == gradient.holders[0] or self.reductions is None

    def sums_of_stages(self) -> dict[tuple[str, int], fx.Node]:
        sums: dict[tuple[str, int], fx.Node] = {}
        for index, gradient in enumerate(self.shared):
            for stage in gradient.stages:
                if self.placement[stage] == self.rank:
                    self.modules[f"sum_{index}_{stage}"] = PartialSum(gradient.name, stage)
                    sums[gradient.name, stage] = self.graph.call_module(f"sum_{index}_{stage}")
        return sums

    def send_sums(self, sums: dict[tuple[str, int], fx.Node]) -> list[Message]:
        """Send this rank's sums to those that add them up, and receive theirs into `sums`."""
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
        for message in messages.values():
            if message.target == self.rank:
                self.graph.call_function(ops.post, (self.transport, message.key))
        for (name, stage, _), message in messages.items():
            if message.source == self.rank:
                self.graph.call_function(ops.send, (self.transport, message.key, (sums[name, stage],)))
        for (name, stage, _), message in messages.items():
            if message.target == self.rank:
                sums[name, stage] = self.receive_one(message)
        return list(messages.values())

    def reduce_shared_gradients(self, reductions: RankReductions) -> list[Message]:
        """Sum over the replicas what this rank has added up, and hand it to the other holders."""
        own = {gradient.name: gradient for gradient in self.shared if gradient.holders[0] == self.rank}
        messages = [
            Message(f"{g.name}>{target}", None, None, g.holders[0], target, (g.name,), (g.layout,))
            for g in self.shared
            for target in g.holders[1:]
            if self.rank in (g.holders[0], target)
        ]
        for message in messages:
            if message.target == self.rank:
                self.graph.call_function(ops.post, (self.transport, message.key))
        buckets = [bucket for bucket in reductions.buckets if bucket.shared]
        for bucket in buckets:
            if bucket.key in own:
                self.reduce(bucket)
        for index, bucket in enumerate(buckets):
            if bucket.key in own:
                self.graph.call_function(ops.reduced, (self.transport, bucket.key))
                for message in messages:
                    if message.names == bucket.names and message.source == self.rank:
                        self.modules[f"total_{index}"] = Gradient(bucket.key)
                        total = self.graph.call_module(f"total_{index}")
                        self.graph.call_function(ops.send, (self.transport, message.key, (total,)))
        for index, message in enumerate(messages):
            if message.target == self.rank:
                self.modules[f"add_{len(self.shared) + index}"] = AddToGradient(message.names[0])
                self.graph.call_module(f"add_{len(self.shared) + index}", (self.receive_one(message),))
        return messages

    def receive_one(self, message: Message) -> fx.Node:
        received = self.graph.call_function(ops.receive, (self.transport, message.key))
        return self.graph.call_function(operator.getitem, (received, 0))

    def unpack(self, node: fx.Node, items: Sequence[Item], microbatch: int) -> None:
        for index, item in enumerate(items):
            name = f"{item}_m{microbatch}" if isinstance(item, str) else f"{node.name}_for_{self.last_reader(item[0])}"
            value = self.graph.create_node("call_function", operator.getitem, (node, index), name=name)
            self.nodes[item, microbatch] = value

    def last_reader(self, name: str) -> Kind:
        return Kind.W if any(name in stage.phases[Kind.W].values for stage in self.stages) else Kind.B


def by_action(messages: Sequence[Message], end: str) -> dict[Action, list[Message]]:
    grouped: dict[Action, list[Message]] = defaultdict(list)
    for message in messages:
        grouped[getattr(message, end)].append(message)
    return grouped
