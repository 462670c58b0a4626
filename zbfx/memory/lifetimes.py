"""Phase -> the storages that it reads and makes, and when each comes and goes. A storage lives while any value in it
does; a view, or the result of an in-place op, is in its input's storage. A value dies after the statement that reads it
last, as in the generated code (`x = None`), one that nobody reads at once."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from zbfx._torch.operators import aten, schema_of
from zbfx._torch.tensors import same_storage
from zbfx.graphs import Phase, Stage
from zbfx.passes.canonicalize import OVERSIZED
from zbfx.passes.nodes import is_view, storage_bytes, tensors, value_bytes
from zbfx.plan import Kind
from zbfx.rng import seeded

CUDA_GRANULE = 512  # PyTorch's allocator on CUDA gives out multiples of it

# Views where the strides allow it, copies elsewhere.
PERHAPS_VIEWS = {aten.reshape.default, aten.contiguous.default}

Slot = int  # a storage inside a phase: the k-th value that it reads for k < len(phase.values), later ones are made here


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """What happens to memory inside a phase, op by op. `steps` are the ops at which anything changes: (node, slots made
    there with their bytes, slots that nothing reads after it). Parameters, buffers, inputs of the microbatch and
    accumulators are left out. `results[k]` is the slot of the phase's k-th result, None if that has no slot."""

    steps: tuple[tuple[str, tuple[tuple[Slot, int], ...], tuple[Slot, ...]], ...]
    results: tuple[Slot | None, ...]


Slots = Slot | tuple["Slots", ...] | None


def lifetimes(phase: Phase, granule: int = 1) -> Lifetimes:
    """The storages of a phase, from the fake values and the operators' schemas; sizes are multiples of `granule`."""
    nodes = list(phase.module.graph.nodes)
    values: dict[fx.Node, Slots] = {}
    born: dict[int, list[tuple[Slot, int]]] = {}
    own = len(phase.values)
    first = len(phase.ports)
    for index, node in enumerate(nodes):
        if node.op == "placeholder":
            values[node] = index - first if first <= index < first + len(phase.values) else None
        elif node.op == "call_function":
            shared = inherited(node, values)
            if shared is not NEW:
                values[node] = shared
                continue
            terms: Any = node.args[0]
            is_oversized = node.target in OVERSIZED
            made = [value_bytes(terms)] if is_oversized else [storage_bytes(tensor) for tensor in tensors(fake(node))]
            sizes = [rounded(size, granule) for size in made]
            slots = tuple(range(own, own + len(sizes)))
            own += len(sizes)
            born[index] = list(zip(slots, sizes, strict=True))
            values[node] = placed_like(node.meta["val"], slots)
        else:
            assert node.op == "output", f"a phase has no node like {node.format_node()}"
    last = last_uses(nodes)
    death: dict[Slot, int] = {}
    for node, value in values.items():
        for slot in slots_of(value):
            death[slot] = max(death.get(slot, -1), last[node])
    returned = tuple(values[node] for node in nodes[-1].args[0])
    kept = {slot for value in returned for slot in slots_of(value)}
    dying: dict[int, list[Slot]] = {}
    for slot, index in death.items():
        if slot not in kept:
            dying.setdefault(index, []).append(slot)
    steps = tuple(
        (node.name, tuple(born.get(index, ())), tuple(dying.get(index, ())))
        for index, node in enumerate(nodes)
        if index in born or index in dying
    )
    return Lifetimes(steps, tuple(one_slot(value) for value in returned))


NEW = object()  # says that a node makes storages of its own


def inherited(node: fx.Node, values: Mapping[fx.Node, Slots]) -> Any:
    """The storages of a node's value if it makes none itself; `NEW` if it does."""
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and not is_view(node):
        whole, position = values[source], node.args[1]
        assert isinstance(position, int), node
        return whole[position] if isinstance(whole, tuple) else whole
    if node.target is seeded:
        return NEW
    if node.target in PERHAPS_VIEWS:
        if same_storage(fake(node), fake(source)):
            return values[source]
        result = node.target(*fx.map_arg(node.args, fake), **fx.map_arg(node.kwargs, fake))
        return values[source] if same_storage(result, fake(source)) else NEW
    if is_view(node) or writes_first(node):
        return values[source]
    return NEW if any(True for _ in tensors(node.meta.get("val"))) else None


def fake(node: Any) -> Any:
    return node.meta["val"]


def writes_first(node: fx.Node) -> bool:
    """Whether the op writes into its first argument, and returns it."""
    schema = schema_of(node.target)
    return bool(schema and schema.arguments and schema.arguments[0].is_write)


def rounded(size: int, granule: int) -> int:
    """The next multiple: what an allocator sets aside."""
    return -(-size // granule) * granule


def placed_like(value: Any, slots: Sequence[Slot]) -> Slots:
    """The slots in the structure of a value: one, or a tuple with None where there is no tensor."""
    if isinstance(value, Tensor):
        return slots[0]
    remaining = iter(slots)
    return tuple(next(remaining) if isinstance(entry, Tensor) else None for entry in value)


def slots_of(value: Slots) -> Sequence[Slot]:
    if value is None:
        return ()
    if isinstance(value, tuple):
        return [slot for entry in value for slot in slots_of(entry)]
    return (value,)


def one_slot(value: Slots) -> Slot | None:
    assert not isinstance(value, tuple), "a result is one tensor"
    return value


def last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The position of each node's last reader; its own if it has none (a placeholder then lives to the end)."""
    last = {node: (len(nodes) if node.op == "placeholder" else index) for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[source] = index
    return last


@dataclass(frozen=True, slots=True)
class Effect:
    """What a call does to memory, in bytes above what was held before it: the `peak` and its op, and what `remains`
    afterwards. `made` are the storages that it leaves behind."""

    peak: int
    node: str
    made: Mapping[Slot, int]
    remains: int


def call_effect(
    inside: Lifetimes, groups: Sequence[Slot], owned: Collection[Slot], sizes: Mapping[Slot, int]
) -> Effect:
    """Walk a phase. `groups[k]` is the first value that shares the storage of value k, and stands for the storage;
    `sizes` are the bytes of storages. Those in `owned` are held by nothing else, and die inside."""
    holders = Counter(groups)
    for group in sizes:
        holders[group] += group not in owned
    known = dict(sizes)
    held, peak, where = 0, 0, ""
    made: dict[Slot, int] = {}
    for node, born, dying in inside.steps:
        for slot, size in born:
            made[slot] = known[slot] = size
            holders[slot] = 1
            held += size
        if held > peak:
            peak, where = held, node
        for slot in dying:
            group = groups[slot] if slot < len(groups) else slot
            holders[group] -= 1
            if not holders[group]:
                held -= known[group]
                made.pop(group, None)
    return Effect(peak, where, made, held)


def kept_storages(stage: Stage, kind: Kind) -> set[str]:
    """The storages that phases of the stage read after this one, those that its prologue keeps included."""
    later = {Kind.P: (), Kind.F: (Kind.B, Kind.W), Kind.B: (Kind.W,), Kind.W: ()}[kind]
    names = stage.kept.union(*(stage.phases[after].values for after in later))
    return {stage.storages[name][0] for name in names}


@dataclass(frozen=True, slots=True)
class Reading:
    """The storages behind the values that a phase reads: `groups`, `sizes` and `owned` of `call_effect`. A step leaves
    a storage to the call if no later phase of the stage reads it."""

    groups: tuple[Slot, ...]
    sizes: Mapping[Slot, int]
    owned: frozenset[Slot]


def reading(stage: Stage, kind: Kind, granule: int = 1) -> Reading:
    """What a phase reads, where F, B and W of a microbatch run one after the other."""
    kept = kept_storages(stage, kind)
    owners = [stage.storages[name] for name in stage.phases[kind].values]
    first: dict[str, Slot] = {}
    groups = tuple(first.setdefault(owner, slot) for slot, (owner, _) in enumerate(owners))
    sizes = {slot: rounded(owners[slot][1], granule) for slot in first.values()}
    return Reading(groups, sizes, frozenset(slot for owner, slot in first.items() if owner not in kept))


def transient_bytes(stage: Stage) -> int:
    """The most bytes that one action of a stage, or its fused backward, needs beside M_B of its microbatch. This is an
    upper bound: all messages of the stage count as if they were on their way at once. A prologue has no microbatch yet,
    and what it keeps is held throughout."""
    live: set[str] = set()
    excess = [0]
    for kind, phase in stage.phases.items():
        live |= set(phase.values) - stage.kept
        kept = kept_storages(stage, kind)
        read = reading(stage, kind)
        effect = call_effect(lifetimes(phase), read.groups, read.owned, read.sizes)
        if kind is Kind.P:
            excess.append(phase.most_bytes(effect.peak) - stage.kept_bytes)
            continue
        excess.append(stage.stored_bytes(live) + phase.most_bytes(effect.peak) - stage.saved_bytes)
        live |= set(phase.results)
        live = {name for name in live if stage.storages[name][0] in kept}
    received = {
        name for phase in stage.phases.values() for name in phase.values if stage.origins[name][0] != stage.index
    }
    sent = {name for phase in stage.phases.values() for name in phase.results if stage.is_sent(name)}
    return max(excess) + stage.stored_bytes(received) + stage.stored_bytes(sent)
