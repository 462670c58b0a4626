"""Grammar and frozen types of a plan, in plain Python.

    action    ::= kind stage "." microbatch        F0.3   B1.0   W2.7   BW0.3
    kind      ::= "F" | "B" | "W" | "BW"
    order     ::= action*                           what one rank does, first to last
    ranks     ::= order per rank
    Timetable =   CostTable + ranks + times + memory + certificate

Symbols are the paper's ("Zero Bubble Pipeline Parallelism", section 2.3): `T_F, T_B, T_W, T_comm` seconds,
`M_B` bytes held per microbatch from F until B, `M_W` bytes held from B until W. Nothing here knows torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from fractions import Fraction
from numbers import Real
from typing import Any

from zbfx.errors import ZbfxError

Number = int | float | Fraction
LARGEST_STEP = 2**25  # actions: beyond are numbers that somebody mistyped, and gigabytes before any check
LEAST, LARGEST = 1e-100, 1e100  # times and sizes other than 0: their whole numbers of ticks fit into a float


class Kind(StrEnum):
    """What an action computes. `BW` is the fused backward: B and W of one microbatch back to back. `P`, the prologue of
    a stage, makes what is the same for every microbatch, once a step: it stands in no order."""

    P = "P"
    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


ACTION_PATTERN = re.compile(r"(F|BW|B|W)(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One F, B, W or BW of one stage and one microbatch; `str(action)` is its text form and `parse` reads it back. A
    prologue is P of its stage and microbatch 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = ACTION_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ZbfxError(f"an action reads like F0.3 (kind F, B, W or BW, stage, microbatch); found {text!r}")
        return cls(Kind(match[1]), int(match[2]), int(match[3]))


def parts(action: Action) -> tuple[Action, ...]:
    """The unfused actions of an action: BW is B, then W."""
    if action.kind is Kind.BW:
        return tuple(Action(kind, action.stage, action.microbatch) for kind in (Kind.B, Kind.W))
    return (action,)


def plain_number(value: Any) -> Any:
    """A number of numpy, which would overflow or round, as one of Python; any other value as it is."""
    return value.item() if isinstance(value, Real) and hasattr(value, "item") else value


def set_plain(record: Any) -> None:
    """Make the fields of a frozen record that are numbers of numpy numbers of Python."""
    for found in fields(record):
        object.__setattr__(record, found.name, plain_number(getattr(record, found.name)))


def require_amount(expected: str, value: Any, where: str = "") -> None:
    """Raise `ZbfxError`, with `expected` and `where` in its text, unless `value` is 0 or from `LEAST` to `LARGEST`."""
    value = plain_number(value)
    is_number = isinstance(value, Real)
    if not is_number or not 0 <= value < math.inf:
        raise ZbfxError(f"{expected}; found {value!r}{where}")
    if value and not LEAST <= value <= LARGEST:
        raise ZbfxError(f"{expected}: 0, or from {LEAST:g} to {LARGEST:g}; found {value!r}{where}. Choose another unit")


def require_size(stages: int, microbatches: int) -> None:
    """Raise `ZbfxError` where a step has more Fs, Bs and Ws than a plan could hold."""
    actions = 3 * stages * microbatches
    if actions > LARGEST_STEP:
        raise ZbfxError(
            f"a step has {LARGEST_STEP:,} actions at most, an F, a B and a W of each stage and microbatch; found "
            f"{actions:,}, of {stages:,} x {microbatches:,}"
        )


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs per microbatch. Times in seconds, memory in bytes (any consistent unit works).

    `saved_bytes` is the paper's M_B, held from F until B; `weight_saved_bytes` its M_W, held from B until W.
    `backward_s` is the fused backward BW, by default B + W. `beside_s` is B with a W of the stage beside it, on a
    device with two streams; None: not measured. `static_bytes` is what the stage holds through the whole step: weights,
    gradients, optimizer state, buffers. `transient_bytes` is the most that an action of the stage needs on top of all
    these: a rank keeps room for the largest of its stages. `prologue_s` is what comes once a step, before the first
    F."""

    forward_s: Number
    backward_input_s: Number
    backward_weight_s: Number
    saved_bytes: Number = 1
    weight_saved_bytes: Number = 0
    static_bytes: Number = 0
    backward_s: Number | None = None
    beside_s: Number | None = None
    transient_bytes: Number = 0
    prologue_s: Number = 0

    def __post_init__(self) -> None:
        set_plain(self)
        times = ("forward_s", "backward_input_s", "backward_weight_s", "prologue_s")
        for name in (*times, "saved_bytes", "weight_saved_bytes", "static_bytes", "transient_bytes"):
            require_amount(f"a stage's {name} is a finite number >= 0", getattr(self, name))
        for name in ("backward_s", "beside_s"):
            if getattr(self, name) is not None:
                require_amount(f"a stage's {name} is a finite number >= 0, or None", getattr(self, name))

    def seconds(self, kind: Kind) -> Number:
        if kind is Kind.P:
            return self.prologue_s
        if kind is Kind.F:
            return self.forward_s
        if kind is Kind.B:
            return self.backward_input_s
        if kind is Kind.W:
            return self.backward_weight_s
        return self.backward_input_s + self.backward_weight_s if self.backward_s is None else self.backward_s

    @property
    def work_s(self) -> Number:
        """T_F + T_B + T_W of one microbatch."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, slots=True)
class Edge:
    """Values that stage `source` sends to stage `target` (`source < target`) and the gradients that come back.
    `forward_s` and `backward_s` are one way, in seconds, when the stages live on different ranks; stages of one rank
    exchange values at no cost. None means that nothing is sent that way: no dependency."""

    source: int
    target: int
    forward_s: Number | None
    backward_s: Number | None

    def __post_init__(self) -> None:
        set_plain(self)
        for value in (self.forward_s, self.backward_s):
            if value is not None:
                where = f" on edge {self.source} -> {self.target}"
                require_amount("communication takes a finite number of seconds >= 0", value, where)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs of every stage and edge, and where each stage lives. `placement[stage]` is the stage's rank. `edges` may
    skip stages; a plain pipeline has one per stage boundary (`CostTable.chain` builds that)."""

    stages: tuple[StageCost, ...]
    edges: tuple[Edge, ...]
    placement: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ZbfxError("a cost table needs at least one stage; found none")
        for stage in self.stages:
            if not isinstance(stage, StageCost):
                raise ZbfxError(f"the stages of a cost table are StageCosts; found {stage!r}"[:200])
        if len(self.placement) != len(self.stages):
            raise ZbfxError(
                f"placement names a rank for each of the {len(self.stages)} stages; found {len(self.placement)} entries"
            )
        object.__setattr__(self, "placement", tuple(map(plain_number, self.placement)))
        ranks = set(self.placement)
        if not all(isinstance(rank, int) for rank in ranks) or not ranks.issuperset(range(len(ranks))):
            raise ZbfxError(f"placement uses every rank from 0 up at least once; found {self.placement}")
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < len(self.stages):
                raise ZbfxError(
                    f"an edge goes from a stage to a later one of {len(self.stages)}; "
                    f"found {edge.source} -> {edge.target}"
                )

    @property
    def rank_count(self) -> int:
        return max(self.placement) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def prologue_s(self, rank: int) -> float:
        """Seconds of the prologues of a rank's stages."""
        return sum(float(self.stages[stage].prologue_s) for stage in self.stages_of(rank))

    @classmethod
    def chain(
        cls,
        stages: Sequence[StageCost],
        comm_s: Number | Sequence[Number] = 0,
        placement: Sequence[int] | None = None,
        backward_comm_s: Number | Sequence[Number] | None = None,
    ) -> CostTable:
        """A plain pipeline: every stage feeds the next. `comm_s` is one number, or one per boundary. It holds both ways
        unless `backward_comm_s` is given."""
        boundaries = max(0, len(stages) - 1)

        def per_boundary(value: Number | Sequence[Number]) -> list[Number]:
            values = list(value) if isinstance(value, Sequence) else [value] * boundaries
            if len(values) != boundaries:
                raise ZbfxError(
                    f"{len(stages)} stages have {boundaries} boundaries; found {len(values)} communication times"
                )
            return values

        forward = per_boundary(comm_s)
        backward = forward if backward_comm_s is None else per_boundary(backward_comm_s)
        edges = tuple(Edge(i, i + 1, forward[i], backward[i]) for i in range(boundaries))
        return cls(tuple(stages), edges, tuple(range(len(stages)) if placement is None else placement))


@dataclass(frozen=True, slots=True)
class Span:
    """When an action runs: `start_s` to `end_s` on the step's clock."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timetable:
    """Per rank an order of actions, timed, with a proven lower bound on the iteration time.

    `ranks[r]` is rank r's order, `spans[r]` its actions with times. `peak_bytes[r]` is the most memory that rank r
    holds, `static_bytes` of its stages included. `memory[r]` lists (time in seconds, bytes held from then on); None
    until a program is known, for costs alone do not tell. `lower_bound_s` holds for every schedule under these costs,
    placement and memory limit; `gap` 0 means proven optimal. Times count the actions of a rank one after the other.
    Where Ws run `beside` Bs, `expected_s` is the iteration time that follows."""

    name: str
    costs: CostTable
    microbatches: int
    ranks: tuple[Sequence[Action], ...]
    spans: tuple[Sequence[Span], ...]
    peak_bytes: tuple[float, ...]
    mem_limit: tuple[float, ...] | None = None  # bytes per rank; None: unlimited
    lower_bound_s: float = 0.0
    search_s: float = 0.0  # how long planning took
    memory: tuple[tuple[tuple[float, float], ...], ...] | None = None
    notes: tuple[str, ...] = field(default=())  # what was compared, what was not split, why the search stopped
    beside: tuple[tuple[Action, Action], ...] = ()  # each W that runs beside a B, and that B
    expected_s: float | None = None  # iteration time with those; None: there are none

    @property
    def iteration_s(self) -> float:
        """The paper's cost: the longest rank's time from the start of its first F to the end of its last W. Prologues
        come on top of it."""
        return max((spans[-1].end_s - spans[0].start_s for spans in self.spans if spans), default=0.0)

    @property
    def planned_s(self) -> float:
        """Seconds of a step as it is planned: of the rank that takes longest, its prologues and Ws beside Bs
        counted."""
        saved_s = 0.0 if self.expected_s is None else self.iteration_s - self.expected_s
        lasting = [
            spans[-1].end_s - spans[0].start_s + self.costs.prologue_s(rank)
            for rank, spans in enumerate(self.spans)
            if spans
        ]
        return max(lasting, default=0.0) - saved_s

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end over all ranks."""
        return max((spans[-1].end_s for spans in self.spans if spans), default=0.0)

    @property
    def bubble_rate(self) -> float:
        """(iteration time - work of the heaviest rank) / iteration time (section 5.3 of the paper)."""
        stages = self.costs.stages
        work = self.microbatches * max(
            sum(float(stages[stage].work_s) for stage in self.costs.stages_of(rank))
            for rank in range(self.costs.rank_count)
        )
        # Times are sums of rounded numbers: a schedule without bubbles has rate 0, not 1e-16.
        return 0.0 if math.isclose(self.iteration_s, work, rel_tol=1e-12) else 1.0 - work / self.iteration_s

    @property
    def gap(self) -> float:
        """(iteration time - lower bound) / lower bound; 0 is proven optimal."""
        return max(0.0, self.iteration_s / self.lower_bound_s - 1.0) if self.lower_bound_s else float("inf")
