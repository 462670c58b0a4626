"""Program -> the bytes that its rank holds, at every action of a step: the prediction that `mem_limit` is kept by.

A program is walked node by node as the runtime runs it (`zbfx.run`), on storages in place of tensors: a storage counts
once, from the op that makes it until nothing holds it any more. Held by values of the program, by receives that are
posted, by what was sent and has not been let go, and inside phases by what their ops still read (`zbfx.lifetimes`).
"""

from __future__ import annotations

import operator
import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from zbfx import comm, streams
from zbfx.batch import Signature
from zbfx.codegen import AddToGradient, Gradient, GradientBucket, PartialSum, PhaseCall, Program
from zbfx.graphs import Joint, Role
from zbfx.lifetimes import Effect, Lifetimes, Slot, call_effect, lifetimes, rounded
from zbfx.passes.nodes import value_bytes
from zbfx.plan import Action, Kind, Schedule, parts
from zbfx.relays import Bound
from zbfx.run import dying_values

# Modules that read and write gradients alone, or, for the optimizer, a few numbers.
STATIC = (PartialSum, AddToGradient, Gradient, GradientBucket, Bound)
ADAM_SLOTS = 2.0
CUDA_GRANULE = 512  # PyTorch's allocator on CUDA gives out multiples of it


@dataclass(frozen=True, slots=True)
class Static:
    """Bytes that a rank holds through the whole step. `batch` are the tensors of all microbatches that it reads."""

    parameters: int = 0
    gradients: int = 0
    buffers: int = 0  # and constants
    batch: int = 0
    optimizer: int = 0
    workspace: int = 0  # of the device's libraries

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.buffers + self.batch + self.optimizer + self.workspace


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes beside the static ones up to the end of an action: the most since the action before, and what is left.

    `node` is the op of the phase at which the most was held; "" if that was between phases. The last moment of a step
    has no action.
    """

    action: Action | None
    peak_bytes: int
    left_bytes: int
    node: str


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds in a step. `live` says what makes up the most, beside what is static: (what, bytes)."""

    rank: int
    static: Static
    moments: tuple[Moment, ...]
    live: tuple[tuple[str, int], ...]

    @property
    def highest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.static.total + self.highest.peak_bytes


@dataclass(slots=True, eq=False)
class Storage:
    """A storage while a program is walked: what made it, and how many values hold it."""

    size: int
    maker: str
    holders: int = 0


Value = Storage | tuple["Value", ...] | None  # None: nothing that counts


@dataclass
class Walk:
    """One pass over a program. `values` is what its nodes hold, `held` the bytes of it all."""

    program: Program
    phases: Mapping[str, Lifetimes]
    effects: dict[tuple[Any, ...], Effect]
    strides: Mapping[str, tuple[int, ...]]
    granule: int
    values: dict[fx.Node, Value] = field(default_factory=dict)
    posted: dict[str, Value] = field(default_factory=dict)
    sent: dict[str, Value] = field(default_factory=dict)
    held: int = 0
    peak: int = 0
    node: str = ""
    moments: list[Moment] = field(default_factory=list)

    def run(self, until: int | None = None) -> None:
        """Walk the nodes, or the first `until` moments and the nodes before the call that ends the next one."""
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

    def other(self, node: fx.Node) -> Value:
        """What a node that computes nothing holds."""
        if node.op == "placeholder":
            return None
        key = str(node.args[1])
        if node.target is comm.post:
            sizes = [layout_bytes(layout) for layout in self.program.messages[key].layouts]
            self.posted[key] = tuple(self.new(size, "receives") for size in sizes)
            self.hold(self.posted[key])
        elif node.target is comm.receive:
            received = self.posted.pop(key)
            release(received)  # what calls this holds it
            return received
        elif node.target is comm.send:
            self.sent[key] = self.on_its_way(key, node.args[2])  # type: ignore[arg-type]
            self.hold(self.sent[key])
        elif node.target is comm.release:
            self.drop(self.sent.pop(key))
        elif node.target in (comm.reduce, comm.reduced, comm.gather, comm.gathered, streams.join):
            return None  # in place, on gradients; what a call on another stream reads is held until here
        else:
            assert node.target is operator.getitem, f"no rule for the memory of {node.format_node()}"
            whole = self.values[node.args[0]]  # type: ignore[index]
            return whole[node.args[1]] if isinstance(whole, tuple) else None  # type: ignore[index]
        return None

    def on_its_way(self, key: str, sources: Sequence[fx.Node]) -> Value:
        """What a sent message holds: the values, or copies of those that do not fill their memory."""
        found: list[Value] = []
        message = self.program.messages[key]
        for source, name, layout in zip(sources, message.names, message.layouts, strict=True):
            if name in self.strides and self.strides[name] != layout.stride:
                found.append(self.new(layout_bytes(layout), "sends"))
            else:
                found.append(self.values[source])
        return tuple(found)

    def call(self, node: fx.Node, dead: Sequence[fx.Node]) -> None:
        module = called(self.program.module.get_submodule(str(node.target)))
        if not isinstance(module, PhaseCall):
            assert isinstance(module, STATIC), f"no rule for the memory of {node.format_node()}"
            return self.keep(node, None)
        arguments = [self.values[source] for source in node.args[1:]]  # type: ignore[index]
        found: list[Any] = [arguments[i] if k is None else arguments[i][k] for i, k in module.places]  # type: ignore[index]
        read = [value or Storage(0, "", holders=1) for value in found]  # a view of what is static counts nothing
        for name in dead:
            release(self.values.pop(name, None))
        first: dict[int, Slot] = {}
        groups = tuple(first.setdefault(id(storage), slot) for slot, storage in enumerate(read))
        owned = tuple(slot for slot in first.values() if not read[slot].holders)
        effect = self.effect(str(node.target), groups, owned, {slot: read[slot].size for slot in first.values()})
        if self.held + effect.peak > self.peak:
            self.peak, self.node = self.held + effect.peak, effect.node
        self.held += effect.remains
        storages: dict[Slot | None, Value] = dict(enumerate(read)) | {None: None}
        storages |= {slot: Storage(size, module.phase.name) for slot, size in effect.made.items()}
        results = [storages[slot] for slot in self.phases[str(node.target)].results]
        value = tuple(results[p] if isinstance(p, int) else tuple(results[i] for i in p) for p in module.packing)
        self.values[node] = value
        count(value)
        if "action" in node.meta:
            self.moments.append(Moment(node.meta["action"], self.peak, self.held, self.node))
            self.peak, self.node = self.held, ""
        return None

    def effect(
        self, phase: str, groups: tuple[Slot, ...], owned: tuple[Slot, ...], sizes: Mapping[Slot, int]
    ) -> Effect:
        """The same for every microbatch whose values are shared and held in the same way."""
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

    def keep(self, node: fx.Node, value: Value) -> None:
        self.values[node] = value
        self.hold(value)

    def hold(self, value: Value) -> None:
        count(value)

    def drop(self, value: Value) -> None:
        self.held -= sum(storage.size for storage in release(value))


def count(value: Value) -> None:
    """One holder more for every storage of a value."""
    if isinstance(value, Storage):
        value.holders += 1
    for entry in value if isinstance(value, tuple) else ():
        count(entry)


def release(value: Value) -> list[Storage]:
    """One holder less; the storages that have none left."""
    if isinstance(value, Storage):
        value.holders -= 1
        return [] if value.holders else [value]
    return [storage for entry in value for storage in release(entry)] if isinstance(value, tuple) else []


def storages_in(values: Collection[Value]) -> set[Storage]:
    found: set[Storage] = set()
    for value in values:
        if isinstance(value, Storage):
            found.add(value)
        elif value is not None:
            found |= storages_in(value)
    return found


def layout_bytes(layout: Any) -> int:
    size = layout.dtype.itemsize
    for length in layout.shape:
        size *= int(length)
    return size


def rank_memory(program: Program, static: Static, granule: int = 1, *, empties: bool = True) -> RankMemory:
    """Walk a program, with sizes in multiples of `granule`. `empties`: phases let go of what they read last."""
    named = [(name, called(module)) for name, module in program.module.named_children()]
    calls = {name: module for name, module in named if isinstance(module, PhaseCall)}
    phases = {name: lifetimes(call.phase, granule, empties=empties) for name, call in calls.items()}
    walk = Walk(program, phases, {}, strides_of(program), granule)
    walk.run()
    moments = tuple(walk.moments)
    highest = max(range(len(moments)), key=lambda k: moments[k].peak_bytes)
    return RankMemory(program.rank, static, moments, live_at(walk, moments, highest))


def called(module: nn.Module) -> nn.Module:
    """The call itself, on whatever stream."""
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


def memory_of(
    joint: Joint,
    signature: Signature,
    microbatches: int,
    device: torch.device,
    optimizer_slots: float,
    backend: str,
    programs: Sequence[Program],
) -> tuple[RankMemory, ...]:
    """What each rank holds in a step on such a device.

    Phases that are compiled hold their arguments to the end, and count with the storages of the ops they are made from.
    """
    granule = CUDA_GRANULE if device.type == "cuda" else 1
    whole = {spec.name for spec in signature.tensors if spec.batch_dim is None}
    return tuple(
        rank_memory(
            program,
            replace(
                static_of(program, joint, microbatches, whole, optimizer_slots, granule),
                workspace=workspace_bytes(device),
            ),
            granule,
            empties="inductor" not in backend,
        )
        for program in programs
    )


def free_bytes(device: torch.device, ranks: int) -> list[float]:
    """What each rank's device has to give: free memory, which processes on one host's CPU share equally."""
    if device.type == "cuda":
        own = float(torch.cuda.mem_get_info(device)[0])
    else:
        pages = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        assert pages is not None, "Linux says how much memory is available"
        own = float(pages[1]) * 1024 / ranks
    found: list[Any] = [own] * ranks
    if dist.is_initialized() and dist.get_world_size() == ranks:
        dist.all_gather_object(found, own)
    return found


def workspace_bytes(device: torch.device) -> int:
    """What cuBLAS gets from PyTorch's allocator for the stream that computes, once and for good."""
    if device.type != "cuda":
        return 0
    asked = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if asked:
        return sum(int(kib) * int(times) for kib, times in asked) * 1024
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= 9
    return 32 * 2**20 if hopper else (2 * 4096 + 8 * 16) * 1024


def static_of(
    program: Program, joint: Joint, microbatches: int, whole: Collection[str], slots: float, granule: int
) -> Static:
    """The static bytes of a rank. `whole` names the inputs that are not cut into microbatches; the optimizer keeps
    `slots` tensors of the size of each parameter that it trains."""
    sizes = {port.name: rounded(value_bytes(node), granule) for node, port in joint.input_ports().items()}
    modules = list(program.module.modules())
    phases = [module.phase for module in modules if isinstance(module, PhaseCall)]
    ports = {port for phase in phases for port in phase.ports}
    parameters = {name for phase in phases for name in phase.parameters}
    shared = {module.name for module in modules if isinstance(module, AddToGradient | Gradient)}
    trained = {name for phase in phases for name in phase.gradients} | shared
    partial = [module.name for module in modules if isinstance(module, PartialSum)]
    buffers = {port.name for port in ports if port.role in (Role.BUFFER, Role.CONSTANT)}
    inputs = {port.name for port in ports if port.role is Role.INPUT}
    return Static(
        parameters=sum(sizes[name] for name in parameters),
        gradients=sum(sizes[name] for name in (*trained, *partial)),
        buffers=sum(sizes[name] for name in buffers),
        batch=sum(sizes[name] * (1 if name in whole else microbatches) for name in inputs),
        optimizer=round(slots * sum(sizes[name] for name in trained)),
    )


@dataclass(frozen=True)
class MemoryReport:
    """What every rank holds in a step; prints as a table with what is live at the peak."""

    ranks: tuple[RankMemory, ...]
    mem_limit: tuple[float, ...] | None

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(rank.peak_bytes for rank in self.ranks)

    def __str__(self) -> str:
        lines = []
        for memory in self.ranks:
            limit = "" if self.mem_limit is None else f", limit {self.mem_limit[memory.rank]:,.0f}"
            place = memory.highest.action or "the end"
            lines.append(f"rank {memory.rank}: peak {memory.peak_bytes:,} bytes, in {place}{limit}")
            static = {name: getattr(memory.static, name) for name in Static.__dataclass_fields__}
            lines += [f"  {size:>18,}  {name}" for name, size in (*static.items(), *memory.live) if size]
        return "\n".join(lines)


def timed(schedule: Schedule, ranks: Sequence[RankMemory]) -> Schedule:
    """The schedule with its memory as the programs have it: peaks, and the curve over time."""
    peaks = tuple(float(memory.peak_bytes) for memory in ranks)
    return replace(schedule, peak_bytes=peaks, memory=tuple(curve(schedule, memory) for memory in ranks))


def curve(schedule: Schedule, memory: RankMemory) -> tuple[tuple[float, float], ...]:
    """(seconds, bytes held from then on): an action's most while it runs, what it leaves once it has ended."""
    spans_s: dict[Action, tuple[float, float]] = {}
    for span in schedule.spans[memory.rank]:
        begin_s, end_s = span.start_s, span.end_s
        for part in parts(span.action):
            cost = schedule.costs.stages[part.stage]
            whole_s = float(cost.backward_input_s + cost.backward_weight_s)
            share = float(cost.backward_input_s) / whole_s if span.action.kind is Kind.BW and whole_s else 1.0
            middle_s = span.start_s + share * (span.end_s - span.start_s)
            spans_s[part] = (begin_s, middle_s if part.kind is Kind.B else end_s)
            begin_s = middle_s
    always = memory.static.total
    points = [(0.0, float(always))]
    for moment in memory.moments:
        if moment.action is not None:
            begin_s, end_s = spans_s[moment.action]
            points += [(begin_s, float(always + moment.peak_bytes)), (end_s, float(always + moment.left_bytes))]
    return tuple(points)
