"""Program -> the bytes that its rank holds, at every action of a step: the prediction that `mem_limit` is kept by.
In: `Program`s, and the options that they run with. Out: a `RankMemory` for each rank. Static bytes are counted from the
graphs; bytes that come and go are found by a walk of the program (`zbfx.memory.walk`)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch

from zbfx.comm.together import exchange
from zbfx.graphs import Joint, Phase, Role
from zbfx.memo import Memo
from zbfx.memory.lifetimes import CUDA_GRANULE, Lifetimes, lifetimes, rounded
from zbfx.memory.walk import Moment, Walk, inner_call, live_at, strides_of
from zbfx.options import Options
from zbfx.passes.nodes import value_bytes
from zbfx.plan import Action, Kind, parts
from zbfx.program import streams
from zbfx.program.calls import AddToGradient, Gradient, PartialSum, PhaseCall
from zbfx.program.codegen import Program
from zbfx.schedule.schedule import Schedule
from zbfx.timing.prologues import prologue_spans
from zbfx.trace.signature import Signature

CONNECTIONS_BYTES = 2**28  # of a GPU, for inboxes and NCCL's buffers, which come after the plan
ADAM_SLOTS = 2.0  # tensors of its size that Adam keeps for each parameter


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


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds in a step, found by `walk`."""

    rank: int
    static: Static
    moments: tuple[Moment, ...]
    walk: Walk = field(compare=False, repr=False)

    @cached_property
    def live(self) -> tuple[tuple[str, int], ...]:
        """What the rank holds at the peak, beside what is static: (what, bytes). Takes a second walk."""
        return live_at(self.walk, self.moments, self.moments.index(self.highest))

    @property
    def highest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.static.total + self.highest.peak_bytes


def predict(
    programs: Sequence[Program], joint: Joint, signature: Signature, options: Options, memo: Memo
) -> tuple[RankMemory, ...]:
    """What each rank holds in a step. Programs share the lifetimes in their phases, through `memo`. A compiled phase
    counts with the lifetimes in its ops; what it was measured to hold beyond them is in `Phase.most_bytes`."""
    microbatches = len(programs[0].module.graph.find_nodes(op="placeholder")) - 1  # the first one is the transport
    batch = [Rows(joint, signature, microbatches)]
    return tuple(rank_memory(program, batch, options, lambda *phase: memo(lifetimes, *phase)) for program in programs)


class Rows(NamedTuple):
    """So many microbatches of a shape, whose graph and tensors these are."""

    joint: Joint
    signature: Signature
    microbatches: int


def rank_memory(
    program: Program, batch: Sequence[Rows], options: Options, of_phase: Callable[[Phase, int], Lifetimes]
) -> RankMemory:
    """Walk a program that runs such a batch; `of_phase` is `lifetimes`."""
    granule = CUDA_GRANULE if options.device.type == "cuda" else 1
    named = [(name, inner_call(module)) for name, module in program.module.named_children()]
    phases = {name: of_phase(call.phase, granule) for name, call in named if isinstance(call, PhaseCall)}
    walk = Walk(program, phases, {}, strides_of(program), granule)
    walk.run()
    static = replace(
        static_of(program, batch, options.optimizer_slots or 0.0, granule),
        workspace=streams_of(program, options) * workspace_bytes(options.device),
    )
    return RankMemory(program.rank, static, tuple(walk.moments), walk)


def streams_of(program: Program, options: Options) -> int:
    """How many streams multiply matrices: the current one, that of captures, and the one for Ws beside Bs."""
    captures = options.measures or options.runs.captures
    beside = any(isinstance(module, streams.Beside) for module in program.module.modules())
    return 1 + captures + (beside or (options.measures and options.overlap))


def resolved(options: Options) -> Options:
    """The options with the limit "auto" in bytes, with room for the state of Adam unless they say what to keep.
    Collective over all processes."""
    if not options.limits_to_free:
        return options
    slots = ADAM_SLOTS if options.optimizer_slots is None else options.optimizer_slots
    return replace(options, mem_limit=free_bytes(options.device, options.stages), optimizer_slots=slots)


def free_bytes(device: torch.device, ranks: int) -> list[float]:
    """What each rank's device can give: a GPU's free memory less that of connections, an equal share of a host's."""
    if device.type == "cuda":
        own = float(torch.cuda.mem_get_info(device)[0]) - CONNECTIONS_BYTES
    else:
        own = available_bytes() / ranks
        assert own < inf, "Linux says how much memory is available"
    found = exchange("compile (free memory)", own)
    return found if len(found) == ranks else [own] * ranks


def available_bytes() -> float:
    """Free memory of the host; infinite where the system does not say."""
    path = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", path.read_text()) if path.exists() else None
    return float(found[1]) * 1024 if found else inf


def workspace_bytes(device: torch.device) -> int:
    """What cuBLAS takes from PyTorch's allocator for each stream that multiplies matrices. It never gives it back."""
    if device.type != "cuda":
        return 0
    asked = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if asked:
        return sum(int(kib) * int(times) for kib, times in asked) * 1024
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= 9
    return 32 * 2**20 if hopper else (2 * 4096 + 8 * 16) * 1024


def input_bytes(joint: Joint, granule: int) -> dict[str, int]:
    """The bytes of the tensors of a microbatch, by name."""
    ports = joint.input_ports().items()
    return {port.name: rounded(value_bytes(node), granule) for node, port in ports if port.role is Role.INPUT}


def static_of(program: Program, batch: Sequence[Rows], slots: float, granule: int) -> Static:
    """The static bytes of a rank. The optimizer keeps `slots` tensors of the size of each parameter that it trains."""
    joint = batch[0].joint
    sizes = {port.name: rounded(value_bytes(node), granule) for node, port in joint.input_ports().items()}
    summed = {
        port.name: rounded(value_bytes(node) // value.element_size() * dtype.itemsize, granule)
        for node, port in joint.input_ports().items()
        for value in [node.meta["val"]]
        for dtype in [joint.grad_dtypes.get(port.name, value.dtype)]
    }
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
        gradients=sum(summed[name] for name in (*trained, *partial)),
        buffers=sum(sizes[name] for name in buffers),
        batch=sum(
            read[name] * (1 if name in whole else rows.microbatches)
            for rows in batch
            for whole in [{spec.name for spec in rows.signature.tensors if spec.batch_dim is None}]
            for read in [input_bytes(rows.joint, granule)]
            for name in inputs
        ),
        optimizer=round(slots * sum(sizes[name] for name in trained)),
    )


@dataclass(frozen=True, slots=True)
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
    rank, start_s = memory.rank, min((span.start_s for span in schedule.spans[memory.rank][:1]), default=0.0)
    spans_s = {Action(Kind.P, stage, 0): (start_s, start_s) for stage in schedule.costs.stages_of(rank)}
    spans_s |= {span.action: (span.start_s, span.end_s) for span in prologue_spans(schedule, rank)}
    for span in schedule.spans[rank]:
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
