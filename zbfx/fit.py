"""Stages -> the fastest plan within the memory limit: by order, by recomputation, by placement.

A limit in bytes is a promise. What a plan holds is what its programs hold (`zbfx.memory.predict`), and no plan that
holds more than the limit is returned. Candidates are planned under caps on activations, a fixed set of them: what fits
a limit fits a larger one too, so that time never rises with the limit. A limit as a multiple ("1x") bounds M_B and M_W
alone.

Recomputation is raised rung by rung, half of the stages at a time, those where most is held first. A rung is skipped
when even its lower bound is longer than the best plan found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

from zbfx.comm.together import from_rank
from zbfx.costs.estimate import Costed
from zbfx.errors import NoFeasibleSchedule, OverLimit, ZbfxError
from zbfx.graphs import Stage
from zbfx.memory.predict import RankMemory, Static, timed
from zbfx.passes.recompute import LEVELS, Level
from zbfx.plan import Action, CostTable, Kind
from zbfx.program.codegen import Program, generate
from zbfx.schedule import build, plan
from zbfx.schedule.beside import run_beside
from zbfx.schedule.bounds.certificate import Certificate
from zbfx.schedule.orders.registry import is_searched
from zbfx.schedule.schedule import Schedule
from zbfx.timing.limits import limit_per_rank, one_x, static_bytes

CAPS = (1, 1.5, 2, 2.5, 3, 4, 6, inf)  # what a rank may hold in a pipeline of 4 ranks, in M_B
CANDIDATE_S = 0.5  # for planning under one cap
RUNGS = 2  # steps from one level to the next
ROUNDS = 1  # of search; these end before the time does on all but large problems, and take the same way every time

Levels = tuple[Level, ...]  # one per stage
MemoryOf = Callable[[Sequence[Program]], tuple[RankMemory, ...]]


@dataclass(frozen=True)
class Forms:
    """The stages of one placement at every level of recomputation, and what they cost: made when asked for. `notes`
    hold for all levels."""

    make: Callable[[Level], Costed]
    notes: tuple[str, ...] = ()
    made: dict[Level, Costed] = field(default_factory=dict)

    def whole(self, level: Level) -> Costed:
        if level not in self.made:
            self.made[level] = self.make(level)
        return self.made[level]

    def at(self, levels: Levels) -> tuple[tuple[Stage, ...], CostTable]:
        """Every stage at its own level: recomputation stays within a stage."""
        stages = tuple(self.whole(level).stages[index] for index, level in enumerate(levels))
        costs = tuple(self.whole(level).costs.stages[index] for index, level in enumerate(levels))
        return stages, replace(self.whole(levels[0]).costs, stages=costs)

    def notes_at(self, levels: Levels) -> tuple[str, ...]:
        return (*self.notes, *(n for index, level in enumerate(levels) for n in self.whole(level).notes.get(index, ())))


@dataclass(frozen=True)
class Fitted:
    """A plan with everything that runs it. `schedule` has the memory of the programs."""

    stages: tuple[Stage, ...]
    levels: Levels
    notes: tuple[str, ...]  # of what the stages were made
    schedule: Schedule
    programs: tuple[Program, ...]
    memory: tuple[RankMemory, ...]
    time_s: float  # iteration time with all actions one after the other

    def fits(self, limits: Sequence[float] | None) -> bool:
        peaks = (memory.peak_bytes for memory in self.memory)
        return limits is None or all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))

    @property
    def summary(self) -> str:
        names = " ".join(self.levels) if len(set(self.levels)) > 1 else self.levels[0]
        placement = " ".join(map(str, self.schedule.costs.placement))
        peak = max(memory.peak_bytes for memory in self.memory)
        return f"{self.schedule.name}, recompute {names}, placement {placement}: {self.time_s:.6g} s, {peak:,} bytes"


@dataclass(frozen=True)
class Request:
    """What `compile` was asked for. `overlap`: Ws may run beside Bs."""

    microbatches: int
    schedule: Any
    mem_limit: Any
    overlap: bool

    @property
    def is_searched(self) -> bool:
        return is_searched(self.schedule)


@dataclass
class Fitting:
    """One search for a plan. `smallest` is the least that any candidate holds, by its largest rank."""

    request: Request
    memory_of: MemoryOf
    best: Fitted | None = None
    smallest: Fitted | None = None
    compared: list[str] = field(default_factory=list)

    def offer(self, forms: Forms, levels: Levels, schedule: Schedule, limits: Sequence[float] | None) -> None:
        """Take a schedule of these stages if it fits and is the fastest so far; with Ws beside Bs if that fits too."""
        stages, _ = forms.at(levels)
        if limits is not None:
            schedule = replace(schedule, mem_limit=tuple(limits))
        found = self.fitted(forms, levels, schedule, schedule.iteration_s)
        if self.smallest is None or need(found, limits) < need(self.smallest, limits):
            self.smallest = found
        self.compared.append(f"compared: {found.summary}{'' if found.fits(limits) else ', over the limit'}")
        if not found.fits(limits) or self.beats(found.time_s):
            return
        self.best = found
        beside = frozenset(stage.index for stage in stages if stage.runs_beside)
        if self.request.overlap and beside:
            moved = run_beside(schedule, beside, move=self.request.is_searched)
            wider = self.fitted(forms, levels, moved, found.time_s)
            self.best = wider if wider.fits(limits) else found

    def fitted(self, forms: Forms, levels: Levels, schedule: Schedule, time_s: float) -> Fitted:
        stages, _ = forms.at(levels)
        programs = generate(stages, schedule)
        memory = self.memory_of(programs)
        return Fitted(stages, levels, forms.notes_at(levels), timed(schedule, memory), programs, memory, time_s)

    def planned(
        self, costs: CostTable, limits: Sequence[float] | None, budget_s: float = 5.0, rounds: int | None = None
    ) -> Schedule:
        """The order for these costs; rank 0's on every rank."""
        found = plan(
            costs,
            self.request.microbatches,
            schedule=self.request.schedule,
            mem_limit=limits,
            budget_s=budget_s,
            rounds=rounds,
        )
        shared: Schedule = from_rank(0, "compile (the plan)", found)
        return shared

    def beats(self, bound_s: float) -> bool:
        """Whether the best plan is as fast as anything with this lower bound."""
        return self.best is not None and self.best.time_s <= bound_s


def need(found: Fitted, limits: Sequence[float] | None) -> float:
    """What decides whether a plan fits: its largest peak, or how far it is over limits that differ."""
    peaks = [memory.peak_bytes for memory in found.memory]
    if limits is None or len(set(limits)) == 1:
        return max(peaks)
    return max(peak - limit for peak, limit in zip(peaks, limits, strict=True))


def fit(
    placements: Sequence[Callable[[], Forms]], allowed: Sequence[Level], request: Request, memory_of: MemoryOf
) -> Fitted:
    """The fastest plan of these placements (later ones only for limits in bytes) and levels within the limit.

    Raises `NoFeasibleSchedule` with the smallest limit that has a plan; other `ZbfxError`s as `zbfx.schedule.plan`.
    """
    fitting, mem_limit = Fitting(request, memory_of), request.mem_limit
    relative = isinstance(mem_limit, str) and mem_limit.strip().lower().endswith("x")
    if mem_limit is None or relative:
        fit_activations(fitting, placements[0](), allowed, mem_limit)
    else:
        fit_bytes(fitting, placements, allowed, mem_limit)
    best = fitting.best
    assert best is not None, "an error says why there is no plan"
    chosen = (f"chosen: {best.summary}",) if len(fitting.compared) > 1 else ()
    notes = (*best.schedule.notes, *chosen, *fitting.compared[1:], *best.notes)
    return replace(best, schedule=replace(best.schedule, notes=tuple(dict.fromkeys(notes))))


def fit_activations(fitting: Fitting, forms: Forms, allowed: Sequence[Level], mem_limit: str | None) -> None:
    """No limit, or a multiple of what 1F1B's activations need without recomputation, by the planner's own count."""
    base = forms.whole(allowed[0]).costs
    limit_per_rank(base, mem_limit)
    multiple = inf if mem_limit is None else float(mem_limit.strip().lower()[:-1])
    refusal: ZbfxError | None = None
    for levels in rungs(forms, allowed):
        _, table = forms.at(levels)
        if fitting.best and (multiple >= 1 or fitting.beats(bound_of(table, fitting.request.microbatches))):
            break
        held = [multiple * float(one_x(base))] * table.rank_count
        try:
            schedule = fitting.planned(table, None if mem_limit is None else with_static(table, held))
        except NoFeasibleSchedule as error:
            refusal = refusal or error
            continue
        except OverLimit as error:
            raise OverLimit(
                f"{error}\nmem_limit={mem_limit!r} allows {multiple:g} times what the activations of 1F1B need, beside "
                "what is static. Raise it, or leave the order to schedule='auto'"
            ) from error
        fitting.offer(forms, levels, schedule, None)
    if fitting.best is None and refusal is not None:
        raise refusal


def fit_bytes(
    fitting: Fitting, placements: Sequence[Callable[[], Forms]], allowed: Sequence[Level], mem_limit: Any
) -> None:
    """A limit on everything that a rank holds."""
    first = placements[0]()
    base = first.whole(allowed[0]).costs
    limits = [float(limit) for limit in limit_per_rank(base, mem_limit) or ()]
    shared_s = fitting.request.microbatches * sum(float(stage.work_s) for stage in base.stages) / base.rank_count
    refusals: list[ZbfxError] = []
    for index, make in enumerate(placements):
        if fitting.beats(shared_s):
            break
        try:
            forms = make() if index else first
        except ZbfxError as error:  # the model cannot be cut into that many stages
            refusals.append(error)
            continue
        least_s = bound_of(forms.whole(allowed[0]).costs, fitting.request.microbatches)
        for levels in rungs(forms, allowed):
            if fitting.beats(least_s):
                break
            fit_stages(fitting, forms, levels, limits, refusals)
    if fitting.best is None:
        if fitting.smallest is None:
            raise refusals[0]
        raise infeasible(fitting, limits, allowed)


def fit_stages(
    fitting: Fitting, forms: Forms, levels: Levels, limits: Sequence[float], refusals: list[ZbfxError]
) -> None:
    """Plans of stages at these levels, under every cap that the limit has room for."""
    _, table = forms.at(levels)
    bound_s = bound_of(table, fitting.request.microbatches)
    searched = fitting.request.is_searched
    if searched and not fitting.beats(bound_s):
        fitting.offer(forms, levels, one_by_one(table, fitting.request.microbatches), limits)
    for cap in caps(table, limits) if searched else (inf,):
        if fitting.beats(bound_s):
            return
        held = [cap * activations(table, rank) for rank in range(table.rank_count)]
        try:
            schedule = fitting.planned(table, None if cap == inf else with_static(table, held), CANDIDATE_S, ROUNDS)
        except ZbfxError as error:
            refusals.append(error)
            continue
        fitting.offer(forms, levels, schedule, limits)
        bound_s = max(bound_s, schedule.lower_bound_s)  # caps fall: what bounds this one bounds the next ones


def rungs(forms: Forms, allowed: Sequence[Level]) -> list[Levels]:
    """From the least level for all stages to the highest, one stage after the other: first those that hold most in
    1F1B. Of many stages, several at a time."""
    base = forms.whole(allowed[0]).costs
    count = len(base.stages)

    def most_first(stage: int) -> float:
        rank = base.placement[stage]
        return -float(static_bytes(base, rank)) - (base.rank_count - rank) * activations(base, rank)

    order = sorted(range(count), key=most_first)
    steps = sorted({round(k * count / RUNGS) for k in range(1, RUNGS + 1)} - {0})
    found: list[Levels] = [(allowed[0],) * count]
    for lower, higher in pairwise(allowed):
        for raised in steps:
            first = set(order[:raised])
            found.append(tuple(higher if stage in first else lower for stage in range(count)))
    return found


def caps(costs: CostTable, limits: Sequence[float]) -> list[float]:
    """Caps on a rank's activations, in its M_B, largest first: those that the limit leaves room for, and the next."""
    scale = costs.rank_count / 4
    scaled = list(dict.fromkeys(max(1.0, cap * scale) for cap in CAPS))
    rooms = [
        (limit - sum(float(costs.stages[s].static_bytes) for s in costs.stages_of(rank)))
        / (activations(costs, rank) or 1)
        for rank, limit in enumerate(limits)
    ]
    fitting = sum(cap <= min(rooms) for cap in scaled)
    return scaled[: fitting + 1][::-1]


def activations(costs: CostTable, rank: int) -> float:
    """The most that a microbatch holds in all stages of a rank, before its Bs (M_B) or after them (M_W)."""
    stages = [costs.stages[stage] for stage in costs.stages_of(rank)]
    return sum(max(float(stage.saved_bytes), float(stage.weight_saved_bytes)) for stage in stages)


def with_static(costs: CostTable, held: Sequence[float]) -> list[float]:
    return [room + float(static_bytes(costs, rank)) for rank, room in enumerate(held)]


def bound_of(costs: CostTable, microbatches: int) -> float:
    """Seconds that no schedule of these stages goes below, whatever the limit."""
    return float(Certificate(costs, microbatches, None).seconds)


def one_by_one(costs: CostTable, microbatches: int) -> Schedule:
    """The order that holds least: one microbatch after the other, each backward fused."""
    orders = []
    for rank in range(costs.rank_count):
        stages = costs.stages_of(rank)
        kinds = [(Kind.F, stage) for stage in stages] + [(Kind.BW, stage) for stage in reversed(stages)]
        orders.append(tuple(Action(kind, stage, k) for k in range(microbatches) for kind, stage in kinds))
    return build("one by one", costs, microbatches, tuple(orders))


def infeasible(fitting: Fitting, limits: Sequence[float], allowed: Sequence[Level]) -> NoFeasibleSchedule:
    """Names the smallest limit that has a plan, and what sets it."""
    assert fitting.smallest is not None, "there was a candidate"
    smallest = fitting.smallest
    over = max(smallest.memory, key=lambda memory: memory.peak_bytes - limits[memory.rank])
    uniform = len(set(limits)) == 1
    least = max(memory.peak_bytes for memory in smallest.memory) if uniform else over.peak_bytes
    parts = [(name, getattr(over.static, name)) for name in Static.__dataclass_fields__] + list(over.live)
    shown = ", ".join(f"{size:,} {name}" for name, size in parts if size)
    more = "" if len(allowed) == len(LEVELS) else "allow recompute='auto', "
    return NoFeasibleSchedule(
        f"no plan fits in {limits[over.rank]:,.0f} bytes on rank {over.rank}. The smallest feasible limit is "
        f"{least:,} bytes, set by rank {over.rank} in {over.highest.action} ({smallest.summary}): {shown}. "
        f"Raise the limit, {more}use smaller microbatches, or cut the model into more stages.",
        float(least),
    )
