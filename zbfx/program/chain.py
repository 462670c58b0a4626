"""The chain of ranks: along it go the loss, in every program, and the state of an optimizer step without a barrier.
In: a schedule and its messages. Out: `Chain`, and for each rank a `RankChain`, its part in the chain.
The loss, with the metrics, goes back along the chain from the rank that computes it (message `loss>1`: to rank 1).
Each rank passes it on where, by the plan, nobody has to wait for it. A broadcast at the end of the step would be a
barrier. Programs that have neither pass nothing on.
An optimizer step without a barrier is validated (section 4 of the paper). After its last action a rank receives the
gradient norms known so far (`state>2`), adds its own, passes them on and steps its optimizer. The last rank of the
chain then knows all. The full state, the *verdict*, comes back along the chain (`verdict>1`) while the forwards of the
next step run. Each rank looks at it after its *prefix*, the forwards before its first backward. If an early step was
wrong, all ranks see that in the same numbers, correct it, and run the prefix again. A message that a prefix sends may
be read after the reader's own prefix. It was made with wrong weights too, and is received and dropped before the prefix
runs again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import torch

from zbfx.graphs import LOSS, Phase, Port, Role, Stage
from zbfx.metrics import MetricKind
from zbfx.plan import Action, Kind, parts
from zbfx.program.messages import POST_AHEAD, Message, TensorLayout, contiguous, post_positions
from zbfx.schedule.schedule import Schedule
from zbfx.trace.loss import dtype_of_batch_loss

Summed = tuple[tuple[str, TensorLayout], ...]  # the loss of a batch and its metrics, by name


class Passed(Enum):
    """What ranks pass along their chain. The value begins the key of its messages."""

    LOSS = "loss"  # and metrics, from the last rank back to the first
    STATE = "state"  # from the first rank to the last
    VERDICT = "verdict"  # the complete state, from the last rank back to the first


@dataclass(frozen=True, slots=True)
class Chain:
    """`ranks` are in the order in which the state passes; the last computes the loss. For each rank, `prefix` is how
    many of its unfused actions run before it looks at the verdict, and `loss_at` how many before it passes on the
    `summary`, the loss and the metrics. `state` is None where no optimizer step is validated."""

    ranks: tuple[int, ...]
    prefix: tuple[int, ...]
    loss_at: tuple[int, ...]
    summary: Summed
    state: TensorLayout | None = None

    def neighbours(self, rank: int) -> tuple[int | None, int | None]:
        """The ranks before and after a rank in the chain; None at its ends."""
        place, ends = self.ranks.index(rank), (None, *self.ranks, None)
        return ends[place], ends[place + 2]

    def message(self, passed: Passed, source: int, target: int) -> Message:
        found = self.summary if passed is Passed.LOSS else ((passed.value, self.state),)
        layouts = tuple(layout for _, layout in found if layout is not None)
        assert len(layouts) == len(found), "a chain that passes a state"
        names = tuple(name for name, _ in found)
        return Message(f"{passed.value}>{target}", None, None, source, target, names, layouts)

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The (source, target) ranks between which the state and the verdict travel."""
        links = list(zip(self.ranks, self.ranks[1:], strict=False))
        return {*links, *((after, before) for before, after in links)}


def order_of_ranks(schedule: Schedule, loss_rank: int) -> tuple[int, ...]:
    """All ranks: first those whose backwards begin last, and at the end the rank of the loss, which begins them."""
    first_backward = [
        next((span.start_s for span in spans if span.action.kind is not Kind.F), 0.0) for spans in schedule.spans
    ]
    ranks = range(len(schedule.ranks))
    return tuple(sorted(ranks, key=lambda rank: (rank == loss_rank, -first_backward[rank], rank)))


def chain_of(
    schedule: Schedule,
    messages: Sequence[Message],
    ranks: tuple[int, ...],
    summary: Summed,
    state_size: int | None = None,
) -> Chain:
    """The chain of these ranks (`order_of_ranks`); with `state_size`, one along which optimizer steps are validated."""
    orders = [[part for action in order for part in parts(action)] for order in schedule.ranks]
    starts = [
        # An action beside another may start before the one that it comes after in the order.
        list(accumulate((span.start_s for span in spans for _ in parts(span.action)), max))
        for spans in schedule.spans
    ]
    prefix = (0,) * len(ranks) if state_size is None else prefixes(orders, messages)
    state = None if state_size is None else TensorLayout((state_size,), (1,), torch.float64)
    return Chain(ranks, prefix, loss_positions(ranks, orders, starts, prefix), summary, state)


def loss_phase(stages: Sequence[Stage]) -> Phase:
    """The phase that returns the losses; that of the last stage's forward where there are none."""
    phases = [phase for stage in stages for phase in stage.phases.values()]
    return next((phase for phase in phases if phase.has_loss), stages[-1].phases[Kind.F])


def loss_rank(stages: Sequence[Stage], placement: Sequence[int]) -> int:
    """The rank that computes the losses."""
    return placement[loss_phase(stages).stage]


def summary_of(stages: Sequence[Stage], metrics: Sequence[MetricKind] = ()) -> Summed:
    """How the loss of the batch, a scalar, and its metrics travel."""
    phase = loss_phase(stages)
    if not phase.has_loss:
        return ()
    returned: Any = phase.module.graph.output_node().args[0]
    values = [node.meta["val"] for node in returned[len(phase.results) :]]
    places = {str(port): value for port, value in zip(phase.last, values, strict=True)}
    found = [(LOSS, TensorLayout((), (), dtype_of_batch_loss(places[LOSS].dtype)))]
    for kind in metrics:
        name = str(Port(Role.METRIC, kind.name))
        found.append((name, contiguous(tuple(places[name].shape), kind.dtype_of_batch(places[name].dtype))))
    return tuple(found)


def prefixes(orders: Sequence[Sequence[Action]], messages: Sequence[Message]) -> tuple[int, ...]:
    """How many forwards each rank runs before its first backward. A prefix ends earlier, before a forward that reads
    what another rank makes after its own prefix."""
    lengths = [next((k for k, a in enumerate(order) if a.kind is not Kind.F), len(order)) for order in orders]
    position = {action: (rank, k) for rank, order in enumerate(orders) for k, action in enumerate(order)}
    reads = [(position[m.producer], position[m.consumer]) for m in messages if m.producer and m.consumer]
    changed = True
    while changed:
        changed = False
        for (source, made_at), (target, read_at) in reads:
            if read_at < lengths[target] and made_at >= lengths[source]:
                lengths[target], changed = read_at, True
    return tuple(lengths)


def loss_positions(
    ranks: Sequence[int], orders: Sequence[Sequence[Action]], starts: Sequence[Sequence[float]], prefix: Sequence[int]
) -> tuple[int, ...]:
    """How many actions each rank runs before it passes on the loss: those that, in the plan, start before the rank gets
    it. So a rank waits only for what starts earlier in the plan, and ranks never wait for each other in a circle."""
    *others, last = ranks
    positions = {last: max((k + 1 for k, action in enumerate(orders[last]) if action.kind is Kind.F), default=0)}
    previous = last
    for rank in reversed(others):
        sent_at = positions[previous]
        sent_s = starts[previous][sent_at] if sent_at < len(starts[previous]) else float("inf")
        positions[rank] = max(prefix[rank], bisect_left(starts[rank], sent_s))
        previous = rank
    return tuple(positions[rank] for rank in range(len(orders)))


@dataclass(frozen=True)
class Unfused:
    """A schedule's actions, with B and W in the place of BW: each rank's in order, and by action the second at which it
    starts in the plan and its place in its rank's order."""

    ranks: tuple[tuple[Action, ...], ...]
    start_s: Mapping[Action, float]
    places: Mapping[Action, int]

    @classmethod
    def of(cls, schedule: Schedule) -> Unfused:
        ranks = tuple(tuple(part for action in order for part in parts(action)) for order in schedule.ranks)
        return cls(
            ranks,
            {part: span.start_s for spans in schedule.spans for span in spans for part in parts(span.action)},
            {action: place for order in ranks for place, action in enumerate(order)},
        )


class RankChain:
    """One rank's part in the chain: what it gets from and sends to its neighbours, and when it posts its receives.
    `incoming` are the rank's messages and the loss, those of one sender in the order in which it sends them. `dropped`
    are the messages that a prefix sends and that this rank reads after its own prefix."""

    def __init__(self, chain: Chain, unfused: Unfused, incoming: Sequence[Message], rank: int) -> None:
        self.chain, self.rank, self.summary = chain, rank, chain.summary
        self.validates = chain.state is not None  # whether this rank looks at an optimizer step's verdict
        self.prefix, self.loss_at = chain.prefix[rank], chain.loss_at[rank]
        self.before, self.after = chain.neighbours(rank)
        self.later = chain.ranks[chain.ranks.index(rank) + 1 :]  # they hear of a verdict before this rank does
        self.early = {a for order, count in zip(unfused.ranks, chain.prefix, strict=True) for a in order[:count]}
        self.dropped = tuple(filter(self.is_read_late, incoming))
        self.incoming = list(incoming)
        loss, _ = self.passed_on(Passed.LOSS)
        if loss is not None:
            place = next(
                (
                    k
                    for k, m in enumerate(incoming)
                    if m.producer and m.source == loss.source and unfused.places[m.producer] >= chain.loss_at[m.source]
                ),
                len(incoming),
            )
            self.incoming.insert(place, loss)

    def passed_on(self, passed: Passed) -> tuple[Message | None, Message | None]:
        """The message that this rank gets from one neighbour, and the one that it sends to the other."""
        if passed is Passed.LOSS and not self.summary:
            return None, None
        source, target = (self.before, self.after) if passed is Passed.STATE else (self.after, self.before)
        return (
            None if source is None else self.chain.message(passed, source, self.rank),
            None if target is None else self.chain.message(passed, self.rank, target),
        )

    def posts(self, order: Sequence[Action]) -> dict[int, list[Message]]:
        """The receives to post before each action of the rank's unfused order."""
        return post_positions(self.incoming, order, self.needed_at(), self.not_before())

    def needed_at(self) -> dict[str, int]:
        """Before which action a message counts as needed, by key, where its consumer does not say so.

        A message that a wrong verdict drops is posted as soon as the verdict is known, since a captured prefix ends
        only when all that it sent has arrived. If its sender passes the verdict on to this rank, the message is posted
        before the verdict: the sender's prefix must end before it passes anything on."""
        needed = {m.key: self.prefix + (0 if m.source in self.later else POST_AHEAD) for m in self.dropped}
        return needed | {m.key: self.loss_at for m in self.incoming if m.producer is None}

    def not_before(self) -> dict[str, int]:
        """Before which action a message may be posted at the earliest, by key. A prefix may run twice, but messages
        that no prefix sends come once: they are posted after this rank's prefix."""
        return {m.key: self.prefix for m in self.incoming if m.producer not in self.early}

    def is_read_late(self, message: Message) -> bool:
        """Whether a prefix sends the message, and its reader reads it after its own prefix."""
        return message.producer in self.early and message.consumer not in self.early
