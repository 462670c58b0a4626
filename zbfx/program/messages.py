"""What travels between ranks: messages between actions, and the gradients of parameters that ranks share.
In: stages, a schedule. Out: `Message`s and `SharedGradient`s, and when a rank posts and releases its messages."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from zbfx.graphs import Forms, Role, Stage
from zbfx.plan import Action, Kind, parts
from zbfx.schedule.schedule import Schedule
from zbfx.trace.signature import dense_stride

POST_AHEAD = 1  # actions between posting a receive and waiting for it


class TensorLayout(NamedTuple):
    """Shape, strides (in elements) and dtype of a tensor that travels."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(map(int, self.shape)) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Message:
    """Values that one action makes for a stage on another rank. `key` reads like `F0.3>1`: by F0.3, for stage 1."""

    key: str
    producer: Action | None  # None: after the last action
    consumer: Action | None
    source: int  # rank
    target: int  # rank
    names: tuple[str, ...]
    layouts: tuple[TensorLayout, ...]

    @property
    def ends(self) -> tuple[Action, Action]:
        """The producer and the consumer of a message between actions."""
        assert self.producer is not None, "a message between actions"
        assert self.consumer is not None, "a message between actions"
        return self.producer, self.consumer


@dataclass(frozen=True, slots=True)
class SharedGradient:
    """A parameter whose gradient comes from several stages, or that several ranks hold. Each contributing stage
    collects its own sum over the microbatches; at the end of the step every holder adds up all of them in stage order,
    so that the gradient depends neither on the placement nor on the schedule."""

    name: str
    stages: tuple[int, ...]
    holders: tuple[int, ...]  # ranks
    layout: TensorLayout


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> TensorLayout:
    return TensorLayout(shape, tuple(torch.empty(shape, device="meta").stride()), dtype)


class SentValues(NamedTuple):
    """What an action of a microbatch sends to a stage on another rank."""

    target: int  # stage
    names: tuple[str, ...]
    layouts: tuple[TensorLayout, ...]


def sent_values(stages: Sequence[Stage], placement: Sequence[int]) -> dict[tuple[int, Kind], list[SentValues]]:
    """By stage and kind of the action, what it sends in a microbatch of these stages; targets ascend."""
    needs: dict[tuple[int, Kind], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))  # -> by target stage
    for stage in stages:
        for name in dict.fromkeys(name for kind in (Kind.F, Kind.B, Kind.W) for name in stage.phases[kind].values):
            source, kind = stage.origins[name]
            if placement[source] != placement[stage.index]:
                needs[source, kind][stage.index].append(name)
    return {
        maker: [
            SentValues(target, tuple(names), tuple(layout_of(stages[target].examples[name]) for name in names))
            for target, names in targets.items()
        ]
        for maker, targets in needs.items()
    }


def messages_of(stages: Sequence[Stage], schedule: Schedule) -> list[Message]:
    """Every message of a step whose microbatches are alike, each sender's in the order in which it sends them."""
    return messages_among(Forms.alike(stages, schedule.microbatches), schedule)


def messages_among(forms: Forms, schedule: Schedule) -> list[Message]:
    """Every message of a step, each sender's in the order in which it sends them."""
    placement = schedule.costs.placement
    sent = [sent_values(stages, placement) for stages in forms.stages]
    turn = {part: k for order in schedule.ranks for k, action in enumerate(order) for part in parts(action)}
    messages = []
    for rank, order in enumerate(schedule.ranks):
        for producer in (part for action in order for part in parts(action)):
            wanted = sent[forms.of[producer.microbatch]].get((producer.stage, producer.kind), ())
            readers = {waiting_action(producer, values.target): values for values in wanted}
            for reader, values in once_for_each_rank(readers, placement, turn).items():
                ends = producer, reader, rank, placement[reader.stage]
                messages.append(Message(f"{producer}>{reader.stage}", *ends, values.names, values.layouts))
    return messages


def waiting_action(producer: Action, stage: int) -> Action:
    """The action of a stage that waits for what `producer` makes."""
    kind = Kind.F if producer.kind is Kind.F and producer.stage < stage else Kind.B
    return Action(kind, stage, producer.microbatch)


def once_for_each_rank(
    readers: Mapping[Action, SentValues], placement: Sequence[int], turn: Mapping[Action, int]
) -> Mapping[Action, SentValues]:
    """What each of the readers is sent. A value that several actions of a rank read travels once, for that which the
    rank runs first; `turn` has their places in its order."""
    if len({placement[reader.stage] for reader in readers}) == len(readers):
        return readers
    arrived: set[tuple[int, str]] = set()
    first: dict[Action, SentValues] = {}
    for reader in sorted(readers, key=turn.__getitem__):
        target, names, layouts = readers[reader]
        kept = [k for k, name in enumerate(names) if (placement[target], name) not in arrived]
        first[reader] = SentValues(target, tuple(names[k] for k in kept), tuple(layouts[k] for k in kept))
        arrived.update((placement[target], name) for name in names)
    return {reader: first[reader] for reader in readers if first[reader].names}


def layout_of(example: Tensor) -> TensorLayout:
    return TensorLayout(tuple(example.shape), dense_stride(example), example.dtype)


def parameter_holders(stages: Sequence[Stage], placement: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The ranks that read each parameter or give it a gradient."""
    holders: dict[str, set[int]] = defaultdict(set)
    for stage in stages:
        for name in (name for phase in stage.phases.values() for name in phase.parameters):
            holders[name].add(placement[stage.index])
    return {name: tuple(sorted(found)) for name, found in holders.items()}


def buffer_holders(stages: Sequence[Stage], placement: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The ranks that read or write each buffer."""
    holders: dict[str, set[int]] = defaultdict(set)
    for stage in stages:
        for name in (name for phase in stage.phases.values() for name in phase.port_names(Role.BUFFER)):
            holders[name].add(placement[stage.index])
    return {name: tuple(sorted(found)) for name, found in holders.items()}


def shared_gradients(stages: Sequence[Stage], placement: Sequence[int]) -> tuple[SharedGradient, ...]:
    contributors: dict[str, set[int]] = defaultdict(set)
    layouts: dict[str, TensorLayout] = {}
    for stage in stages:
        for phase in stage.phases.values():
            layouts |= {name: layout_of(example) for name, example in phase.sums.items()}
            for name in phase.gradients:
                contributors[name].add(stage.index)
    holders = parameter_holders(stages, placement)
    return tuple(
        SharedGradient(name, tuple(sorted(found)), holders[name], layouts[name])
        for name, found in contributors.items()
        if len(found) > 1 or len(holders[name]) > 1
    )


def post_positions(
    incoming: Sequence[Message], order: Sequence[Action], needed_at: Mapping[str, int], not_before: Mapping[str, int]
) -> dict[int, list[Message]]:
    """Before which action each receive is posted: early enough for itself, and for all later ones on its channel, which
    arrive in the order of sending. By key, `needed_at` replaces the place of the consumer, `not_before` is the first
    allowed."""
    places = {action: position for position, action in enumerate(order)}
    channels: dict[int, list[Message]] = defaultdict(list)
    for message in incoming:
        channels[message.source].append(message)
    posts: dict[int, list[Message]] = defaultdict(list)
    for channel in channels.values():
        earliest = len(order)
        positions = []
        for message in reversed(channel):
            needed = needed_at[message.key] if message.key in needed_at else places[message.ends[1]]
            earliest = min(earliest, max(0, needed - POST_AHEAD))
            positions.append(max(earliest, not_before.get(message.key, 0)))
        for message, position in zip(channel, reversed(positions), strict=True):
            posts[position].append(message)
    return posts


def release_positions(
    outgoing: Sequence[Message], order: Sequence[Action], start_s: Mapping[Action, float]
) -> dict[int, list[Message]]:
    """Before which action of the rank's unfused order each sent message is let go: the first that starts, in the
    simulated timeline, once its consumer has started. Waiting there for the send to end costs nothing if the plan
    holds, and cannot deadlock: what the consumer waits for starts before it, and so before the action that waits.
    Messages for which no action is late enough are absent."""
    starts = [start_s[action] for action in order]
    positions = {action: position for position, action in enumerate(order)}
    releases: dict[int, list[Message]] = defaultdict(list)
    for message in outgoing:
        producer, consumer = message.ends
        position = max(positions[producer] + 1, bisect_left(starts, start_s[consumer]))
        if position < len(order):
            releases[position].append(message)
    return releases
