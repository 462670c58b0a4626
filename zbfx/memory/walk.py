"""A program walked node by node as the runtime runs it (`zbfx.runtime.runner`), on storages in place of tensors. A
storage counts once, from the op that makes it until nothing holds it: values of the program, posted receives, sent
messages that are not released, and, inside a phase, values that its ops still read."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from zbfx.memory.lifetimes import Effect, Lifetimes, Slot, call_effect, rounded
from zbfx.plan import Action
from zbfx.program import ops, streams
from zbfx.program.boxed import dying_values
from zbfx.program.calls import Bound, BoundTensor, PhaseCall, Summary
from zbfx.program.codegen import Program

# Modules that read and write gradients alone, or, for the optimizer, a few numbers.
STATIC = (BoundTensor, Bound)


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes beside the static ones up to the end of an action: the most since the action before, at the op `node` ("":
    between phases), and what is left. The last moment of a step has no action."""

    action: Action | None
    peak_bytes: int
    left_bytes: int
    node: str


@dataclass(slots=True, eq=False)
class Storage:
    """A storage while a program is walked: what made it, and how many values hold it."""

    size: int
    maker: str
    holders: int = 0


Storages = Storage | tuple["Storages", ...] | None  # None: nothing that counts


@dataclass(slots=True)
class Walk:
    """One pass over a program. `values` is what its nodes hold, `held` the bytes of it all."""

    program: Program
    phases: Mapping[str, Lifetimes]
    effects: dict[tuple[Any, ...], Effect]
    strides: Mapping[str, tuple[int, ...]]
    granule: int
    values: dict[fx.Node, Storages] = field(default_factory=dict)
    posted: dict[str, Storages] = field(default_factory=dict)
    sent: dict[str, Storages] = field(default_factory=dict)
    held: int = 0
    peak: int = 0
    node: str = ""
    moments: list[Moment] = field(default_factory=list)

    def run(self, until: int | None = None) -> None:
        """Walk the nodes. With `until`, stop before the call that ends the moment of this index."""
        nodes = list(self.program.module.graph.nodes)
        dying = dying_values(nodes)
        for node, dead in zip(nodes, dying, strict=True):
            if node.op == "output":
                break
            if node.op == "call_module":
                if until is not None and len(self.moments) == until and "action" in node.meta:
                    return
                self.call(node, dead)
            else:
                self.keep(node, self.other(node))
            for name in dead:
                self.drop(self.values.pop(name, None))
        for key in list(self.sent):
            self.drop(self.sent.pop(key))
        self.moments.append(Moment(None, self.peak, self.held, ""))

    def other(self, node: fx.Node) -> Storages:
        """What a node that computes nothing holds."""
        if node.op == "placeholder":
            return None
        key = str(node.args[1])
        if node.target is ops.post:
            layouts = self.program.messages[key].layouts
            self.posted[key] = tuple(self.new(layout.size_bytes, "receives") for layout in layouts)
            hold(self.posted[key])
        elif node.target is ops.receive:
            received = self.posted.pop(key)
            let_go(received)  # the caller holds it
            return received
        elif node.target is ops.send:
            self.sent[key] = self.on_its_way(key, node.args[2])  # type: ignore[arg-type]
            hold(self.sent[key])
        elif node.target is ops.release:
            self.drop(self.sent.pop(key))
        elif node.target in (ops.reduce, ops.reduced, ops.gather, ops.gathered, streams.join):
            return None  # in place, on gradients; a join is the last reader of what a call beside others reads
        else:
            assert node.target is operator.getitem, f"no rule for the memory of {node.format_node()}"
            whole = self.values[node.args[0]]  # type: ignore[index]
            return whole[node.args[1]] if isinstance(whole, tuple) else None  # type: ignore[index]
        return None

    def on_its_way(self, key: str, sources: Sequence[fx.Node]) -> Storages:
        """What a sent message holds: the values, or copies of those that do not fill their memory."""
        found: list[Storages] = []
        message = self.program.messages[key]
        for source, name, layout in zip(sources, message.names, message.layouts, strict=True):
            if name in self.strides and self.strides[name] != layout.stride:
                found.append(self.new(layout.size_bytes, "sends"))
            else:
                found.append(self.values[source])
        return tuple(found)

    def call(self, node: fx.Node, dead: Sequence[fx.Node]) -> None:
        module = inner_call(self.program.module.get_submodule(str(node.target)))
        if not isinstance(module, PhaseCall):
            assert isinstance(module, STATIC), f"no rule for the memory of {node.format_node()}"
            return self.keep(node, self.summary(len(node.args)) if isinstance(module, Summary) else None)
        arguments = [self.values[source] for source in node.args[1:]]  # type: ignore[index]
        found: list[Any] = [arguments[i] if k is None else arguments[i][k] for i, k in module.places]  # type: ignore[index]
        read = [value or Storage(0, "", holders=1) for value in found]  # a view of what is static counts nothing
        for name in dead:
            let_go(self.values.pop(name, None))
        first: dict[int, Slot] = {}
        groups = tuple(first.setdefault(id(storage), slot) for slot, storage in enumerate(read))
        owned = tuple(slot for slot in first.values() if not read[slot].holders)
        effect = self.effect(str(node.target), groups, owned, {slot: read[slot].size for slot in first.values()})
        most = self.held + module.phase.most_bytes(effect.peak)
        if most > self.peak:
            self.peak, self.node = most, effect.node
        self.held += effect.remains
        storages: dict[Slot | None, Storages] = dict(enumerate(read)) | {None: None}
        storages |= {slot: Storage(size, module.phase.name) for slot, size in effect.made.items()}
        results = [storages[slot] for slot in self.phases[str(node.target)].results]
        value = tuple(results[p] if isinstance(p, int) else tuple(results[i] for i in p) for p in module.packing)
        self.values[node] = value
        hold(value)
        if "action" in node.meta:
            self.moments.append(Moment(node.meta["action"], self.peak, self.held, self.node))
            self.peak, self.node = self.held, ""
        return None

    def summary(self, terms: int) -> tuple[Storages, ...]:
        """The loss of the batch and its metrics, from those of its microbatches, stacked."""
        sizes = [layout.size_bytes for _, layout in self.program.chain.summary]
        stacked = self.new(terms // len(sizes) * sum(sizes), "loss")
        found = tuple(self.new(size, "loss") for size in sizes)
        self.held -= stacked.size
        return found

    def effect(
        self, phase: str, groups: tuple[Slot, ...], owned: tuple[Slot, ...], sizes: Mapping[Slot, int]
    ) -> Effect:
        """What a call does to memory. All microbatches whose values are shared and held alike have one effect."""
        key = (phase, groups, owned)
        if key not in self.effects:
            self.effects[key] = call_effect(self.phases[phase], groups, owned, sizes)
        return self.effects[key]

    def new(self, size: int, maker: str) -> Storage:
        size = rounded(size, self.granule)
        self.held += size
        if self.held > self.peak:
            self.peak, self.node = self.held, ""
        return Storage(size, maker)

    def keep(self, node: fx.Node, value: Storages) -> None:
        self.values[node] = value
        hold(value)

    def drop(self, value: Storages) -> None:
        self.held -= sum(storage.size for storage in let_go(value))


def hold(value: Storages) -> None:
    """One holder more for every storage of a value."""
    if isinstance(value, Storage):
        value.holders += 1
    for entry in value if isinstance(value, tuple) else ():
        hold(entry)


def let_go(value: Storages) -> list[Storage]:
    """One holder less; the storages that have none left."""
    if isinstance(value, Storage):
        value.holders -= 1
        return [] if value.holders else [value]
    return [storage for entry in value for storage in let_go(entry)] if isinstance(value, tuple) else []


def storages_in(values: Collection[Storages]) -> set[Storage]:
    found: set[Storage] = set()
    for value in values:
        if isinstance(value, Storage):
            found.add(value)
        elif value is not None:
            found |= storages_in(value)
    return found


def inner_call(module: nn.Module) -> nn.Module:
    """The call that a module makes, on whichever stream."""
    return module.call if isinstance(module, streams.Beside) else module


def strides_of(program: Program) -> dict[str, tuple[int, ...]]:
    """The strides of what the rank's phases return, by name."""
    phases = [module.phase for module in program.module.modules() if isinstance(module, PhaseCall)]
    return {
        name: node.meta["val"].stride()
        for phase in phases
        for name, node in zip(phase.results, phase.module.graph.output_node().args[0], strict=False)  # type: ignore[arg-type]
    }


def live_at(whole: Walk, moments: Sequence[Moment], index: int) -> tuple[tuple[str, int], ...]:
    """What is held as an action begins, by what made it; and what the action itself adds at its worst."""
    walk = Walk(whole.program, whole.phases, whole.effects, whole.strides, whole.granule)
    walk.run(until=index)
    makers: dict[str, list[int]] = defaultdict(list)
    for storage in storages_in([*walk.values.values(), *walk.posted.values(), *walk.sent.values()]):
        makers[storage.maker].append(storage.size)
    parts = [(f"from {maker} ({len(sizes)} tensors)", sum(sizes)) for maker, sizes in sorted(makers.items())]
    moment = moments[index]
    inside = moment.peak_bytes - sum(size for _, size in parts)
    place = f"inside {moment.action}, at {moment.node}" if moment.node else "before it"
    return (*parts, (place, inside)) if inside else tuple(parts)
