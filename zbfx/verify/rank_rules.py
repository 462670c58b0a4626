"""The rules of what the programs of all ranks do together: messages pair up, and no rank waits for another in a circle.

A transfer ends only when both its ranks have come to it, and after those before it on its channel (from one rank to
another), as rendezvous sends of NCCL and copies into an inbox do. What holds then holds for sends into buffers too.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from zbfx.graphs import Role
from zbfx.program import ops
from zbfx.program.calls import AddToGradient, Gradient, PartialSum
from zbfx.verify.flow import CallNode, Flow, called_by, sent
from zbfx.verify.problems import Problem, Problems, RuleTable, alike, equal

Flows = Sequence[Flow]
Sum = tuple[str, int | None]  # a gradient, and the stage whose sum over the microbatches it is


def messages_pair_up(flows: Flows) -> Problems:
    """A message is in the programs of its source and its target, which describe it alike."""
    ends = defaultdict[str, list[Flow]](list)
    for flow in flows:
        for key in flow.program.messages:
            ends[key].append(flow)
    for key, found in ends.items():
        first = found[0].program.messages[key]
        yield from alike(f"the ranks of {key}", (first.source, first.target), (flow.program.rank for flow in found))
        for flow in found:
            yield from equal(f"{key} on rank {flow.program.rank}", first, flow.program.messages[key])


def channels_are_in_order(flows: Flows) -> Problems:
    """A rank posts what another one sends to it in the order of sending."""
    sent, posted = defaultdict[Any, list[str]](list), defaultdict[Any, list[str]](list)
    for flow in flows:
        for node, key in moves(flow):
            message = flow.program.messages[key]
            if node.target in (ops.send, ops.post):
                (sent if node.target is ops.send else posted)[message.source, message.target].append(key)
    for channel in sent.keys() | posted.keys():
        for k, (due, found) in enumerate(zip(sent[channel], posted[channel], strict=True)):
            yield from equal(f"message {k} from rank {channel[0]} to rank {channel[1]}", due, found)


def moves(flow: Flow) -> Iterator[tuple[fx.Node, str]]:
    """The nodes that post, receive, send and release messages, in order, with the message's key."""
    nodes = sorted((node for nodes in flow.messages.values() for node in nodes), key=flow.place.__getitem__)
    return ((node, str(node.args[1])) for node in nodes)


def no_rank_waits_in_a_circle(flows: Flows) -> Problems:
    """Each rank comes to the end of its program, and all that it has sent has left by then."""
    for rank, step in Waits.of(flows).stuck():
        yield Problem(f"rank {rank}", "the end of its program", f"ranks that wait for each other, this one in {step}")


@dataclass
class Waits:
    """Runs the messages of all programs: a rank goes on until it has to wait for a transfer. `begun` says at how many
    of its two ends a transfer has begun, `lines` what a channel has to carry yet, the next one last."""

    steps: Mapping[int, list[tuple[Any, str]]]  # by rank, the next one last
    lines: Mapping[tuple[int, int], list[str]]
    channel: Mapping[str, tuple[int, int]]
    begun: Counter[str] = field(default_factory=Counter)
    ended: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, flows: Flows) -> Waits:
        steps = dict[int, list[tuple[Any, str]]]()
        lines, channel = defaultdict[tuple[int, int], list[str]](list), dict[str, tuple[int, int]]()
        for flow in flows:
            own = [(node.target, key) for node, key in moves(flow)]
            released = {key for function, key in own if function is ops.release}
            own += [(ops.release, key) for function, key in own if function is ops.send and key not in released]
            steps[flow.program.rank] = own[::-1]
            for key in (key for function, key in own[::-1] if function is ops.send):
                message = flow.program.messages[key]
                channel[key] = message.source, message.target
                lines[channel[key]].append(key)
        return cls(steps, lines, channel)

    def stuck(self) -> Iterator[tuple[int, str]]:
        """The ranks that never end, and where each of them waits."""
        while any(self.advance(rank) for rank in self.steps):
            pass
        return ((rank, f"{left[-1][0].__name__} {left[-1][1]}") for rank, left in self.steps.items() if left)

    def advance(self, rank: int) -> bool:
        """Run a rank until it has to wait; whether it came further."""
        steps, before = self.steps[rank], len(self.steps[rank])
        while steps and (steps[-1][0] in (ops.post, ops.send) or steps[-1][1] in self.ended):
            function, key = steps.pop()
            if function in (ops.post, ops.send):
                self.begun[key] += 1
                line = self.lines[self.channel[key]]
                while line and self.begun[line[-1]] == 2:
                    self.ended.add(line.pop())
        return len(steps) < before


def shared_gradients_are_whole(flows: Flows) -> Problems:
    """Each rank that holds a shared parameter adds up the sums of all stages that contribute, once, in their order."""
    given = defaultdict[str, set[int]](set)
    held = defaultdict[str, set[int]](set)
    for flow in flows:
        for phase in {call.phase.name: call.phase for call in flow.calls}.values():
            for name in phase.parameters:
                held[name].add(flow.program.rank)
            for name in phase.gradients:
                given[name].add(phase.stage)
    for flow in flows:
        added = dict(additions(flows, flow))
        shared = [name for name in given if flow.program.rank in held[name] and len(held[name]) + len(given[name]) > 2]
        yield from alike(f"the shared gradients of rank {flow.program.rank}", shared, added)
        for name in set(shared) & added.keys():
            due = [(name, stage) for stage in sorted(given[name])]
            yield from equal(f"the gradient of {name} on rank {flow.program.rank}", due, added[name])


def additions(flows: Flows, flow: Flow) -> Iterator[tuple[str, list[Sum]]]:
    """The shared gradients that a rank adds up, each with the sums that it is made of."""
    for node in flow.place:
        if node.op == "call_module" and isinstance(module := called_by(node), AddToGradient):
            yield module.name, [part for value in node.args for part in made_of(flows, flow, value)]


def made_of(flows: Flows, flow: Flow, value: Any) -> list[Sum]:
    """The stages' sums in a value that ranks exchange: one of them, or what another rank has added up. Any other value
    is of no stage."""
    other: list[Sum] = [(str(value), None)]
    if value.target is operator.getitem:
        (origin, index), messages = value.args, flow.program.messages
        message = messages.get(str(origin.args[1])) if origin.target is ops.receive else None
        if message is None or not 0 <= index < len(message.names):
            return other
        source = flows[message.source]
        return made_of(flows, source, sent(source.messages[message.key][0])[index])
    module = called_by(value) if value.op == "call_module" else None
    if isinstance(module, PartialSum):
        return [(module.name, module.stage)]
    return dict(additions(flows, flow)).get(module.name, other) if isinstance(module, Gradient) else other


def calls_beside_do_not_meet(flows: Flows) -> Problems:
    """No call writes a gradient or a buffer that a call which runs at the same time writes or reads."""
    for flow in flows:
        for guest in (call for call in flow.calls if call.end > call.start):
            for call in flow.calls:
                if guest.start < call.start < guest.end:
                    yield from alike(f"what {guest.node} and {call.node} touch", (), touched_by_both(guest, call))


def touched_by_both(*calls: CallNode) -> set[str]:
    """The gradients that both calls add to, and the buffers that one writes and the other reads or writes."""
    one, other = (call.phase for call in calls)
    written, read = ({*one.updates}, {*other.updates}), [{*phase.port_names(Role.BUFFER)} for phase in (one, other)]
    return {*one.gradients} & {*other.gradients} | written[0] & (written[1] | read[1]) | written[1] & read[0]


ALL_RANKS: RuleTable = (
    messages_pair_up,
    channels_are_in_order,
    no_rank_waits_in_a_circle,
    shared_gradients_are_whole,
    calls_beside_do_not_meet,
)
