"""A program as its rules and proofs read it: who calls which phase, and what each node holds, sends or sums."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx, nn

from zbfx.graphs import Phase
from zbfx.plan import Action, Kind
from zbfx.program import ops
from zbfx.program.calls import GradientBucket, Item, PhaseCall, Summary
from zbfx.program.codegen import Program
from zbfx.program.streams import Beside, join

INCOMING, OUTGOING = [ops.post, ops.receive], [ops.send, ops.release]
SUMMED, COLLECTED = [ops.reduce, ops.reduced], [ops.gather, ops.gathered]


def called_by(node: fx.Node) -> nn.Module:
    """The module that a node calls, on whatever stream."""
    module = node.graph.owning_module.get_submodule(str(node.target))  # type: ignore[union-attr]
    return module.call if isinstance(module, Beside) else module


class CallNode(NamedTuple):
    """A call of a phase; the node that ends it is a later one where the call runs beside others."""

    node: fx.Node
    start: int
    end: int
    module: PhaseCall
    action: Action

    @property
    def phase(self) -> Phase:
        return self.module.phase


@dataclass(frozen=True)
class Flow:
    """A program as its rules read it: the calls of its phases, which value or bundle of which microbatch a node holds,
    and, by key and in order, what it does with messages and with buckets. `place` counts nodes. What a prologue keeps
    is of no microbatch: None."""

    program: Program
    place: Mapping[fx.Node, int]
    calls: tuple[CallNode, ...]
    holds: Mapping[Any, tuple[Item, int | None]]
    messages: Mapping[str, list[fx.Node]]
    buckets: Mapping[str, list[fx.Node]]
    transport: fx.Node
    microbatches: tuple[fx.Node, ...]

    @property
    def ordered(self) -> list[CallNode]:
        """The calls of phases that belong to a microbatch."""
        return [call for call in self.calls if call.action.kind is not Kind.P]

    def kept(self, stage: int) -> set[Item]:
        """What the prologue of a stage gives to all its other calls."""
        prologues = (call for call in self.calls if call.action.kind is Kind.P and call.action.stage == stage)
        return {item for call in prologues for item in call.module.returned}

    @classmethod
    def of(cls, program: Program) -> Flow:
        place = {node: k for k, node in enumerate(program.module.graph.nodes)}
        ends = {node.args[0]: k for node, k in place.items() if node.target is join}
        calls, gives = list[CallNode](), dict[Any, tuple[tuple[Item, ...], int | None]]()
        messages, buckets = defaultdict[str, list[fx.Node]](list), defaultdict[str, list[fx.Node]](list)
        for node, k in place.items():
            if node.op == "call_module" and isinstance(module := called_by(node), PhaseCall):
                calls.append(CallNode(node, k, ends.get(node, k), module, node.meta["action"]))
                action = node.meta["action"]
                gives[node] = module.returned, None if action.kind is Kind.P else action.microbatch
            elif node.target in SUMMED + COLLECTED:
                buckets[str(node.args[1])].append(node)
            elif node.target in INCOMING + OUTGOING:
                messages[str(node.args[1])].append(node)
                message = program.messages.get(str(node.args[1]))
                if node.target is ops.receive and message and message.producer:
                    gives[node] = message.names, message.producer.microbatch
        entries = (node for node in place if node.target is operator.getitem and node.args[0] in gives)
        holds = {node: held for node in entries for held in entry(*gives[node.args[0]], node.args[1])}
        inputs = tuple(node for node in place if node.op == "placeholder")
        return cls(program, place, tuple(calls), holds, messages, buckets, inputs[0], inputs[1:])


def entry(items: tuple[Item, ...], microbatch: int | None, index: Any) -> list[tuple[Item, int | None]]:
    """One of the values that a call or a message gives; none if it gives fewer."""
    return [(item, microbatch) for item in items[index : index + 1]]


def sent(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(node.args[2])  # type: ignore[arg-type]


def carried(flow: Flow, value: fx.Node) -> str | None:
    """The name of the gradient, or of the value of the chain, that a node holds. None: it holds neither."""
    if value.op == "call_module":
        return getattr(called_by(value), "name", None)
    if value.target is not operator.getitem:
        return None
    source, index = value.args
    if source.op == "call_module":  # type: ignore[union-attr]
        names = [name for name, _ in flow.program.chain.summary] if isinstance(called_by(source), Summary) else []  # type: ignore[arg-type]
    else:
        message = flow.program.messages.get(str(source.args[1])) if source.target is ops.receive else None  # type: ignore[union-attr]
        names = [*message.names] if message is not None and message.producer is None else []
    return names[index] if isinstance(index, int) and 0 <= index < len(names) else None


def nodes_that(flow: Flow, function: object, key: str) -> list[fx.Node]:
    return [node for node in flow.buckets.get(key, ()) if node.target is function]


def names_in(node: fx.Node) -> tuple[str, ...]:
    """The names in the bucket whose sum or collection a node begins."""
    module = called_by(node.args[2])  # type: ignore[arg-type]
    assert isinstance(module, GradientBucket), "a bucket's tensor"
    return module.bucket.names
