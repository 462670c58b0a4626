"""Stages and a Schedule -> one Program per rank: a flat fx graph of compute, receive and send, in order.
A program begins with the prologues of the rank's stages, whose values live to the end of the step.
For each action of the rank's order the program receives what other ranks made for it, calls the stage's phase, and
sends what other ranks need. Receives are posted one action ahead, on each channel in the order in which the other side
sends. A sent message is let go once the plan says that it has arrived. A value dies after its last use: fx writes that
as `x = None` into the code, and the runtime drops the value at the same node."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from zbfx.errors import InvalidSchedule, listed
from zbfx.graphs import Forms, Phase, Role, Stage, add_node
from zbfx.metrics import MetricKind
from zbfx.plan import Action, Kind
from zbfx.program import streams
from zbfx.program.calls import Item, PhaseCall, Readers, arguments_of, bundles_of, packing_of
from zbfx.program.chain import Chain, RankChain, Unfused, chain_of, loss_rank, order_of_ranks, summary_of
from zbfx.program.messages import Message, SharedGradient, messages_among, release_positions, shared_gradients
from zbfx.program.rank_graph import RankGraph, Relay
from zbfx.program.reductions import Bucket, RankReductions
from zbfx.program.shared_sums import SharedSums
from zbfx.schedule.schedule import Schedule


class Result(NamedTuple):
    """What a program returns: a name, and the microbatch that it is of, None for the whole batch."""

    name: str
    microbatch: int | None


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does in a step. `code` prints it; `messages` holds every message that the rank sends or receives,
    `buckets` what it sums over the replicas.

    The module takes `transport` and one `Microbatch` per microbatch. It returns what `results` names: of each of them
    what is for the user, on the rank that computes it, and on every rank the summary, which has no microbatch: the loss
    of the batch and its metrics.

    Nodes `verdict[0]` to `verdict[1]`, exclusive, look at the last optimizer step; those before them are the prefix.
    (0, 0): no node does."""

    rank: int
    module: fx.GraphModule
    messages: dict[str, Message]
    chain: RankChain
    results: tuple[Result, ...] = ()
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
    metrics: Sequence[MetricKind] = (),
) -> tuple[Program, ...]:
    """One program per rank of the schedule. `reductions`, one per rank, add sums of gradients over replicas; a `chain`
    that passes a state makes programs for an optimizer that waits for no barrier. `metrics` are those of the loss.

    Raises `InvalidSchedule` where backwards would write a buffer in another order than that of the microbatches.
    """
    refuse_writes_out_of_order(stages, schedule)
    forms = Forms.alike(stages, schedule.microbatches)
    messages = messages_among(forms, schedule)
    if chain is None:
        ranks = order_of_ranks(schedule, loss_rank(stages, schedule.costs.placement))
        chain = chain_of(schedule, messages, ranks, summary_of(stages, metrics))
    whole = Whole.of(forms, schedule, messages, chain)
    summed: Sequence[RankReductions | None] = reductions or [None] * len(schedule.ranks)
    return tuple(rank_program(whole, rank, own) for rank, own in enumerate(summed))


def rank_program(whole: Whole, rank: int, reductions: RankReductions | None) -> Program:
    """The program of one rank. `reductions`: what it sums over replicas; None: there are none."""
    return RankProgram(whole, rank, reductions).generate()


def refuse_writes_out_of_order(stages: Sequence[Stage], schedule: Schedule) -> None:
    written = {s.index: s.phases[Kind.B].updates[0] for s in stages if s.phases[Kind.B].updates}
    for rank, order in enumerate(schedule.ranks):
        for stage in written.keys() & {action.stage for action in order}:
            found = [a.microbatch for a in order if a.stage == stage and a.kind in (Kind.B, Kind.BW)]
            if found != sorted(found):
                raise InvalidSchedule(
                    f"rank {rank}: backwards of stage {stage} write the buffer {written[stage]}, and so run in "
                    f"ascending order of microbatches; found {listed(found)}. Ask for another schedule"
                )


def optimizer_program(chain: Chain, schedule: Schedule, rank: int) -> Program:
    """What a rank does after its step: passes the state of all gradients on and steps its optimizer."""
    nodes, part = RankGraph(), RankChain(chain, Unfused.of(schedule), (), rank)
    Relay(nodes, part).optimizer_step()
    return Program(rank, nodes.module(f"Optimizer{rank}"), nodes.messages, part)


@dataclass(frozen=True)
class Whole:
    """What the programs of all ranks are made of. `shared` is the same for all forms; `readers` has one entry each."""

    forms: Forms
    schedule: Schedule
    unfused: Unfused
    messages: Sequence[Message]
    shared: Sequence[SharedGradient]
    readers: Sequence[Readers]
    chain: Chain

    @classmethod
    def of(
        cls,
        forms: Forms,
        schedule: Schedule,
        messages: Sequence[Message],
        chain: Chain,
        readers: Sequence[Readers] | None = None,
    ) -> Whole:
        shared = shared_gradients(forms.stages[0], schedule.costs.placement)
        readers = readers or [Readers.of(stages) for stages in forms.stages]
        return cls(forms, schedule, Unfused.of(schedule), messages, shared, readers, chain)


class RankProgram:
    """Builds the graph of one rank. `values` maps (value or bundle, microbatch) to the node that holds it. What the
    prologue of form k makes is of no microbatch: -1 - k stands in its place."""

    def __init__(self, whole: Whole, rank: int, reductions: RankReductions | None) -> None:
        self.whole, self.forms, self.rank = whole, whole.forms, rank
        self.order, schedule = whole.unfused.ranks[rank], whole.schedule
        self.beside = dict(schedule.beside)
        self.guests = {host: guest for guest, host in schedule.beside}
        self.outgoing = [m for m in whole.messages if m.source == rank]
        self.incoming = [m for m in whole.messages if m.target == rank]
        self.reductions = reductions or RankReductions(())
        self.nodes = RankGraph()
        own = [stage for stage in self.forms.stages[0] if schedule.costs.placement[stage.index] == rank]
        self.last = [port for stage in own for phase in stage.phases.values() for port in phase.last]
        self.microbatches = [self.nodes.graph.placeholder(f"microbatch_{k}") for k in range(schedule.microbatches)]
        self.values: dict[tuple[Item, int], fx.Node] = {}
        self.kept: dict[tuple[int, int], tuple[Item, ...]] = {}  # by form and stage, the bundles of its prologue
        self.part = RankChain(whole.chain, whole.unfused, self.incoming, rank)
        self.relay = Relay(self.nodes, self.part)
        buckets = None if reductions is None else [bucket for bucket in reductions.buckets if bucket.shared]
        held = [gradient for gradient in whole.shared if rank in gradient.holders]
        self.shared_sums = SharedSums(self.nodes, held, schedule.costs.placement, rank, buckets)
        self.verdict = (0, 0)
        self.summary: tuple[fx.Node, ...] = ()

    def generate(self) -> Program:
        nodes, part, reductions = self.nodes, self.part, self.reductions
        posts, releases = part.posts(self.order), self.releases()
        sent = by_action((message.ends[0], message) for message in self.outgoing)
        received = by_action((message.ends[1], message) for message in self.incoming)
        calls = reductions.calls(self.order, self.forms)
        starts, reads = reductions.starts(calls), reductions.reads(calls, self.early())
        for bucket in (bucket for position in sorted(reads) for bucket in reads[position]):
            nodes.gather(bucket)
        final: dict[Action, list[Bucket]] = defaultdict(list)  # by the action that completes the gradients
        whole = len(self.order) - reductions.trailing  # the calls before the Ws in pieces; no message is let go later
        for position, (action, phase) in enumerate(calls):
            self.come_to(position, posts, releases[position] if position < whole else ())
            for bucket in reads.get(position, ()):
                nodes.gathered(bucket)
            if not position:
                self.run_prologues()
            joins = self.fork(self.guests[action]) if action in self.guests else ()
            for message in received[action]:
                self.unpack(nodes.receive(message), message.names, action.microbatch)
            if action not in self.beside and not phase.is_empty:
                name, call = self.call_of(phase, self.forms.of[action.microbatch])
                self.unpack(self.call_phase(action, name, call), call.returned, action.microbatch)
            for message in sent[action]:
                nodes.send(message, [self.values[name, action.microbatch] for name in message.names])
            if joins:
                nodes.add(streams.join, joins)
            final[self.beside.get(action, action)] += starts.get(position, ())
            if action not in self.beside:
                for bucket in final.pop(action, ()):
                    nodes.reduce(bucket)
        self.come_to(len(self.order), posts)
        self.shared_sums.add()
        for bucket in reductions.buckets:
            if not bucket.shared:
                nodes.reduced(bucket)
        own = {Result(item, k): self.values[item, k] for item in self.own_results() for k in self.all_of(item)}
        names = [name for name, _ in part.summary]
        module = nodes.module(f"Rank{self.rank}", [*own.values(), *self.summary])
        results = (*own, *(Result(name, None) for name in names[: len(self.summary)]))
        return Program(self.rank, module, nodes.messages, part, results, reductions.buckets, self.verdict)

    def run_prologues(self) -> None:
        """Make what the rank's stages keep: before the verdict on an optimizer step, if forwards are, and again with
        them where that was wrong."""
        for index in self.own_stages():
            for form, stages in enumerate(self.forms.stages):
                phase = stages[index].phases[Kind.P]
                if not phase.is_empty and self.forms.prologue(form, index) == form:
                    name, call = self.call_of(phase, form)
                    self.kept[form, index] = call.returned
                    node = self.call_phase(Action(Kind.P, index, self.forms.of.index(form)), name, call)
                    self.unpack(node, call.returned, -1 - form)

    def own_stages(self) -> tuple[int, ...]:
        return self.whole.schedule.costs.stages_of(self.rank)

    def early(self) -> set[str]:
        """The parameters that prologues read."""
        stages = [stages[index] for stages in self.forms.stages for index in self.own_stages()]
        return {name for stage in stages for name in stage.phases[Kind.P].parameters}

    def releases(self) -> dict[int, list[Message]]:
        releases = release_positions(self.outgoing, self.order, self.whole.unfused.start_s)
        moved: dict[int, list[Message]] = defaultdict(list)
        for position, found in sorted(releases.items()):
            for message in found:
                late = self.part.is_read_late(message)
                moved[max(position, self.part.prefix) if late else position].append(message)
        return moved

    def come_to(self, position: int, posts: dict[int, list[Message]], released: Sequence[Message] = ()) -> None:
        """What precedes an action. The loss is passed on before the one that the plan names, once all receives that
        come before it on its channel are posted."""
        self.look_at_verdict(position, posts)
        for message in released:
            self.nodes.release(message)
        for message in posts.pop(position, ()):
            self.nodes.post(message)
        if position == self.part.loss_at and not self.summary:  # the calls of Ws in pieces go past the last position
            terms = [port for port in self.last if port.role is not Role.OUTPUT]
            self.summary = self.relay.summary(
                [self.values[str(port), k] for port in terms for k in self.all_of(str(port))]
            )

    def look_at_verdict(self, position: int, posts: dict[int, list[Message]]) -> None:
        """At the end of the prefix, in programs that validate an optimizer step. Messages that a wrong verdict drops
        are posted before it is received, if their sender passes it on to this rank: only once they have left."""
        if self.part.validates and position == self.part.prefix:
            here = posts.get(position, ())
            for message in [m for m in here if m in self.part.dropped and m.source in self.part.later]:
                self.nodes.post(message)
                posts[position].remove(message)
            begin = len(self.nodes)
            self.relay.verdict()
            self.verdict = (begin, len(self.nodes))

    def own_results(self) -> list[str]:
        """The names of what this rank returns of each microbatch: the loss, and what users asked for. Metrics end in
        the summary."""
        return [str(port) for port in self.last if port.role is not Role.METRIC]

    def all_of(self, item: str) -> list[int]:
        """The microbatches of which this rank has a value of this name."""
        return [k for k in range(len(self.microbatches)) if (item, k) in self.values]

    def fork(self, action: Action) -> tuple[fx.Node, ...]:
        """Start a W on the second stream; returns the arguments of its join."""
        phase = self.forms.phase(action)
        if phase.is_empty:
            return ()
        alone, call = self.call_of(phase, self.forms.of[action.microbatch])
        name = f"{alone}_beside"
        self.nodes.modules.setdefault(name, streams.Beside(call))
        started = self.call_phase(action, name, call)
        return (started, *started.all_input_nodes)

    def call_phase(self, action: Action, module: str, call: PhaseCall) -> fx.Node:
        """A node that runs a phase for the action's microbatch, through the module of this name."""
        k = action.microbatch
        form = self.forms.prologue(self.forms.of[k], action.stage)
        kept = self.kept.get((form, action.stage), ())
        args = (self.microbatches[k], *(self.values[item, -1 - form if item in kept else k] for item in call.arguments))
        node = add_node(self.nodes.graph, "call_module", module, args, f"{call.phase.name}_{k}")
        node.meta["action"] = action
        return node

    def call_of(self, phase: Phase, form: int) -> tuple[str, PhaseCall]:
        """The module that runs a phase, one for all microbatches of a form, and its name."""
        name = f"{phase.name}_form{form}" if form else phase.name
        known = self.nodes.modules.get(name)
        if isinstance(known, PhaseCall):
            return name, known
        bundles = bundles_of(self.forms.stages[form][phase.stage], self.whole.readers[form])
        call = PhaseCall(phase, arguments_of(phase, bundles), packing_of(phase, bundles[phase.kind]))
        self.nodes.modules[name] = call
        return name, call

    def unpack(self, node: fx.Node, items: Sequence[Item], microbatch: int) -> None:
        for index, item in enumerate(items):
            if isinstance(item, str):
                name = f"{item}_m{microbatch}"
            elif microbatch < 0:
                name = f"{node.name}_kept"
            else:
                readers = self.whole.readers[self.forms.of[microbatch]]
                name = f"{node.name}_for_{readers.last(item[0])}"
            self.values[item, microbatch] = self.nodes.add(operator.getitem, (node, index), name)


def by_action(messages: Iterable[tuple[Action, Message]]) -> dict[Action, list[Message]]:
    grouped: dict[Action, list[Message]] = defaultdict(list)
    for action, message in messages:
        grouped[action].append(message)
    return grouped
