"""A traced model -> the fastest pipeline within the memory limit: by order, by recomputation, by placement.
A limit in bytes is a promise. What a plan holds is what its programs hold (`zbfx.memory.predict`), and no plan that
holds more than the limit is returned. Candidates are planned under caps on activations, a fixed set of them: what fits
a limit fits a larger one too, so that time never rises with the limit. A limit as a multiple ("1x") bounds M_B and M_W
alone.
Recomputation is raised rung by rung, half of the stages at a time, those where most is held first. A rung is skipped
when even its lower bound is longer than the best plan found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from zbfx.candidate import Candidate, Choice, Levels, candidate, staged
from zbfx.compiled import Compiled, Traced
from zbfx.errors import NoFeasibleSchedule, OverLimit, ZbfxError
from zbfx.memo import Memo
from zbfx.memory.predict import Static
from zbfx.options import Options
from zbfx.passes.nodes import is_random
from zbfx.passes.recompute import Level
from zbfx.plan import CostTable
from zbfx.schedule.bounds.certificate import Certificate
from zbfx.timing.limits import limit_per_rank, one_x, rank_static_bytes
from zbfx.verify import verify

CAPS = (1, 1.5, 2, 2.5, 3, 4, 6, inf)  # what a rank may hold in a pipeline of 4 ranks, in M_B
RUNGS = 2  # steps from one level to the next

Limits = Sequence[float] | None


def fit(traced: Traced, options: Options, memo: Memo) -> Compiled:
    """The fastest pipeline of the options' placements (later ones only for limits in bytes) and levels in the limit.
    Raises `NoFeasibleSchedule` with the smallest limit that has a plan; other `ZbfxError`s as `zbfx.schedule.plan`."""
    search, limits = searched(traced, from_least_level(traced, options), memo)
    best = search.best
    assert best is not None, "an error says why there is no plan"
    verify(best.compiled.programs, after="generate", given=best.compiled.schedule)
    chosen = (f"chosen: {best.summary}",) if len(search.compared) > 1 else ()
    schedule = best.compiled.schedule
    unlike = ("without prologues: under the memory limit, plans that hold their values are slower or impossible",)
    without = unlike if options.prologue and not best.choice.prologues else ()
    notes = tuple(dict.fromkeys((*schedule.notes, *chosen, *without, *search.compared[1:], *best.notes)))
    limit = schedule.mem_limit if limits is None else tuple(limits)
    return best.compiled.described(replace(schedule, notes=notes, mem_limit=limit))


def searched(traced: Traced, options: Options, memo: Memo) -> tuple[Search, Limits]:
    """The search that has found a plan, and the limits that it keeps. Where a limit in bytes makes plans slower, plans
    without prologues are compared, which hold less throughout."""
    search = Search(traced, options, memo, options.prologue)
    if not options.limits_bytes:
        return search, search.within_activations()
    try:
        limits = search.within_bytes()
    except ZbfxError:
        if not options.prologue:
            raise
    else:
        if not search.is_slowed:
            return search, limits
    other = Search(traced, options, memo, prologues=False, best=search.best, compared=search.compared)
    return other, other.within_bytes()


def from_least_level(traced: Traced, options: Options) -> Options:
    """The options with the level that saves bytes for nothing: kernels of compiled phases make elementwise values again
    as they read what these are made of. Phases with random numbers are not compiled."""
    fused = options.runs.compiles and not any(map(is_random, traced.joint.graph.nodes))
    return replace(options, least=Level.CHEAP if fused else Level.NONE)


@dataclass
class Search:
    """One search for a plan, with or without prologues. `smallest` is the candidate that holds least, by its largest
    rank."""

    traced: Traced
    options: Options
    memo: Memo
    prologues: bool
    best: Candidate | None = None
    smallest: Candidate | None = None
    compared: list[str] = field(default_factory=list)
    refusals: list[ZbfxError] = field(default_factory=list)

    def offer(self, choice: Choice, limits: Limits) -> Candidate:
        """Take the candidate if it fits and is the fastest so far; with Ws beside Bs if that fits too."""
        choice = replace(choice, prologues=self.prologues)
        found = candidate(self.traced, choice, self.options, self.memo)
        if self.smallest is None or need(found, limits) < need(self.smallest, limits):
            self.smallest = found
        self.compared.append(f"compared: {found.summary}{'' if found.fits(limits) else ', over the limit'}")
        if not found.fits(limits) or self.beats(found.time_s):
            return found
        self.best = found
        if self.options.overlap and any(stage.runs_beside for stage in found.compiled.stages):
            wider = candidate(self.traced, replace(choice, beside=True), self.options, self.memo)
            self.best = wider if wider.fits(limits) else found
        return found

    def costs(self, placement: tuple[int, ...], levels: Levels) -> CostTable:
        choice = Choice(placement, levels, prologues=self.prologues)
        return staged(self.traced, choice, self.options, self.memo).costs

    def least(self, placement: tuple[int, ...]) -> CostTable:
        return self.costs(placement, (self.options.levels[0],) * len(placement))

    @property
    def is_slowed(self) -> bool:
        """Whether the best plan would be another one if it had to hold nothing throughout for its prologues."""
        assert self.best is not None, "found"
        choice, first = self.best.choice, self.options.placements[0]
        plain = Choice(first, (self.options.levels[0],) * len(first), prologues=self.prologues)
        return self.best.compiled.has_prologues and replace(choice, beside=False) != plain

    def beats(self, bound_s: float) -> bool:
        """Whether the best plan is as fast as anything with this lower bound."""
        return self.best is not None and self.best.time_s <= bound_s

    def bound_s(self, costs: CostTable) -> float:
        """Seconds that no schedule of these stages goes below, whatever the limit."""
        return float(Certificate(costs, self.options.microbatches, None).seconds) + least_prologue_s(costs)

    def within_activations(self) -> Limits:
        """No limit, or a multiple of what 1F1B's activations need without recomputation, by the planner's count."""
        placement, mem_limit = self.options.placements[0], self.options.mem_limit
        base = self.least(placement)
        limit_per_rank(base, mem_limit)
        multiple = self.options.multiple or inf
        for levels in self.rungs(placement):
            table = self.costs(placement, levels)
            if self.best and (multiple >= 1 or self.beats(self.bound_s(table))):
                break
            held = [multiple * float(one_x(base))] * table.rank_count
            try:
                self.offer(Choice(placement, levels, None if mem_limit is None else with_static(table, held)), None)
            except NoFeasibleSchedule as error:
                self.refusals.append(error)
            except OverLimit as error:
                raise OverLimit(
                    f"{error}\nmem_limit={mem_limit!r} allows {multiple:g} times what the activations of 1F1B need, "
                    "beside what is static. Raise it, or leave the order to schedule='auto'"
                ) from error
        if self.best is None:
            raise self.refusals[0]
        return None

    def within_bytes(self) -> Limits:
        """A limit on everything that a rank holds."""
        first, *others = self.options.placements
        base = self.least(first)
        limits = [float(limit) for limit in limit_per_rank(base, self.options.mem_limit) or ()]
        shared_s = self.options.microbatches * sum(float(stage.work_s) for stage in base.stages) / base.rank_count
        for placement in (first, *others):
            if self.beats(shared_s):
                break
            try:
                least_s = self.bound_s(self.least(placement))
            except ZbfxError as error:  # the model cannot be cut into that many stages
                self.refusals.append(error)
                continue
            for levels in self.rungs(placement):
                if self.beats(least_s):
                    break
                self.fit_stages(placement, levels, limits)
        if self.best is None:
            raise self.refusals[0] if self.smallest is None else infeasible(self.smallest, limits, self.options)
        return limits

    def fit_stages(self, placement: tuple[int, ...], levels: Levels, limits: Sequence[float]) -> None:
        """Plans of stages at these levels, under every cap that the limit has room for."""
        table, is_searched = self.costs(placement, levels), self.options.is_searched
        bound_s = self.bound_s(table)
        if is_searched and not self.beats(bound_s):
            self.offer(Choice(placement, levels, one_by_one=True), limits)
        for cap in caps(table, limits) if is_searched else (inf,):
            if self.beats(bound_s):
                return
            held = [cap * activations(table, rank) for rank in range(table.rank_count)]
            try:
                found = self.offer(Choice(placement, levels, None if cap == inf else with_static(table, held)), limits)
            except ZbfxError as error:
                self.refusals.append(error)
                continue
            # Caps fall: what bounds this plan bounds the next ones.
            bound_s = max(bound_s, found.compiled.schedule.lower_bound_s + least_prologue_s(table))

    def rungs(self, placement: tuple[int, ...]) -> list[Levels]:
        """From the least level for all stages to the highest, one stage after the other: first those that hold most in
        1F1B. Of many stages, several at a time."""
        base, allowed = self.least(placement), self.options.levels
        count = len(base.stages)

        def most_first(stage: int) -> float:
            rank = base.placement[stage]
            return -float(rank_static_bytes(base, rank)) - (base.rank_count - rank) * activations(base, rank)

        order = sorted(range(count), key=most_first)
        steps = sorted({round(k * count / RUNGS) for k in range(1, RUNGS + 1)} - {0})
        found: list[Levels] = [(allowed[0],) * count]
        for lower, higher in pairwise(allowed):
            for raised in steps:
                first = set(order[:raised])
                found.append(tuple(higher if stage in first else lower for stage in range(count)))
        return found


def need(found: Candidate, limits: Limits) -> float:
    """What decides whether a plan fits: its largest peak, or how far it is over limits that differ."""
    peaks = [memory.peak_bytes for memory in found.memory]
    if limits is None or len(set(limits)) == 1:
        return max(peaks)
    return max(peak - limit for peak, limit in zip(peaks, limits, strict=True))


def least_prologue_s(costs: CostTable) -> float:
    """Seconds that every rank's prologues add to what bounds its actions."""
    return min(map(costs.prologue_s, range(costs.rank_count)))


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


def with_static(costs: CostTable, held: Sequence[float]) -> tuple[float, ...]:
    return tuple(room + float(rank_static_bytes(costs, rank)) for rank, room in enumerate(held))


def infeasible(smallest: Candidate, limits: Sequence[float], options: Options) -> NoFeasibleSchedule:
    """Names the smallest limit that has a plan, and what sets it."""
    over = max(smallest.memory, key=lambda memory: memory.peak_bytes - limits[memory.rank])
    uniform = len(set(limits)) == 1
    least = max(memory.peak_bytes for memory in smallest.memory) if uniform else over.peak_bytes
    parts = [(name, getattr(over.static, name)) for name in Static.__dataclass_fields__] + list(over.live)
    shown = ", ".join(f"{size:,} {name}" for name, size in parts if size)
    more = "" if len(options.levels) > 1 else "allow recompute='auto', "
    return NoFeasibleSchedule(
        f"no plan fits in {limits[over.rank]:,.0f} bytes on rank {over.rank}. The smallest feasible limit is "
        f"{least:,} bytes, set by rank {over.rank} in {over.highest.action} ({smallest.summary}): {shown}. "
        f"Raise the limit, {more}use smaller microbatches, or cut the model into more stages.",
        float(least),
    )
