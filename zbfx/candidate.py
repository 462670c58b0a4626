"""One way to run a model as a pipeline, from its graph to the bytes that its ranks hold.
A search (`zbfx.fit`) proposes choices and compares candidates. Steps that candidates share come from a memo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zbfx.between import divided, extracted, followed
from zbfx.comm.together import from_rank
from zbfx.compiled import Compiled, Traced
from zbfx.costs.clock import SHORT_WARM_S, WARM_S
from zbfx.costs.estimate import Costed, hardware_of
from zbfx.costs.fused import Seconds
from zbfx.costs.measure import cost_table, node_timer
from zbfx.graphs import Placed, Split, Stage
from zbfx.memo import Memo
from zbfx.memory.predict import RankMemory, predict, timed
from zbfx.options import Options
from zbfx.passes.partition import partition
from zbfx.passes.recompute import Level, recompute
from zbfx.passes.split import unsplit_notes
from zbfx.plan import Action, CostTable, Kind
from zbfx.program.boxed import Compiler
from zbfx.progress import announce
from zbfx.schedule import build, plan
from zbfx.schedule.beside import run_beside
from zbfx.schedule.schedule import Schedule

CANDIDATE_S = 0.5  # for planning under one cap of several
ROUNDS = 1  # of search; these end before the time does on all but large problems, and take the same way every time

Levels = tuple[Level, ...]  # one per stage


class Staged(NamedTuple):
    """Stages, their costs, and notes of what they are made of."""

    stages: tuple[Stage, ...]
    costs: CostTable
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """What a search decides. `cap`: the bytes that the order may hold, per rank, static ones included; None: any.
    `one_by_one`: microbatch after microbatch, the order that holds least. `beside`: Ws run beside Bs where they can.
    `prologues`: what no microbatch changes is computed once a step, and held."""

    placement: tuple[int, ...]
    levels: Levels
    cap: tuple[float, ...] | None = None
    one_by_one: bool = False
    beside: bool = False
    prologues: bool = False


@dataclass(frozen=True)
class Candidate:
    """A pipeline, what its ranks hold, and its iteration time with all actions one after the other."""

    choice: Choice
    compiled: Compiled
    memory: tuple[RankMemory, ...]
    notes: tuple[str, ...]  # of what the stages were made
    time_s: float

    def fits(self, limits: Sequence[float] | None) -> bool:
        return limits is None or all(m.peak_bytes <= limit for m, limit in zip(self.memory, limits, strict=True))

    @property
    def summary(self) -> str:
        levels, placement = self.choice.levels, " ".join(map(str, self.choice.placement))
        names = " ".join(levels) if len(set(levels)) > 1 else levels[0]
        peak = max(memory.peak_bytes for memory in self.memory)
        name = self.compiled.schedule.name
        return f"{name}, recompute {names}, placement {placement}: {self.time_s:.6g} s, {peak:,} bytes"


def candidate(traced: Traced, choice: Choice, options: Options, memo: Memo) -> Candidate:
    """The pipeline of a choice: stages and costs, an order for each rank, its program, and what that holds."""
    stages, costs, notes = staged(traced, choice, options, memo)
    alone = memo(ordered, costs, choice.cap, choice.one_by_one, options)
    schedule = with_pairs(alone, stages, options) if choice.beside else alone
    found = traced.signature, traced.examples, traced.reduction, traced.raw
    compiled = Compiled(options, *found, stages, schedule, choice.levels)
    memory = predict(compiled.programs, traced.raw, traced.signature, options, memo)
    return Candidate(choice, compiled.described(timed(schedule, memory)), memory, notes, alone.planned_s)


def staged(traced: Traced, choice: Choice, options: Options, memo: Memo) -> Staged:
    """The stages of a placement, each at its own level, and what they cost."""
    placement, prologues = choice.placement, choice.prologues
    seconds, speed = memo(node_timer, traced.joint, options), hardware_of(options.device).link_bytes_per_s
    announce(f"cutting the graph into {len(placement)} stages")
    placed = memo(
        followed, partition, traced.joint, options, placement, seconds=seconds, bytes_per_s=speed, cuts=options.cuts
    )
    if options.rebalance:
        placed = memo(rebalanced, placed, placement, prologues, seconds, options, memo)
    forms = [costed(placed, placement, prologues, level, options, memo) for level in choice.levels]
    return mixed(forms, memo(divided, placed, options, prologues))


def costed(
    placed: Placed, placement: Sequence[int], prologues: bool, level: Level, options: Options, memo: Memo
) -> Costed:
    """The phases of all stages at one level of recomputation, and what they cost."""
    levels, random = (level,) * len(placement), not options.runs.captures
    split = memo(divided, placed, options, prologues)
    whole = memo(followed, recompute, split, options, levels, in_flight=options.stages, random=random)
    compiler, warm_s = memo(Compiler, options.runs.compiles), WARM_S if level is options.levels[0] else SHORT_WARM_S
    return memo(cost_table, memo(extracted, whole, options), placement, options, compiler, warm_s)


def mixed(forms: Sequence[Costed], divided: Split) -> Staged:
    """Stage i of the i-th form: recomputation stays within a stage."""
    stages = tuple(form.stages[index] for index, form in enumerate(forms))
    costs = tuple(form.costs.stages[index] for index, form in enumerate(forms))
    own = (note for index, form in enumerate(forms) for note in form.notes.get(index, ()))
    notes = (*divided.placed.joint.notes, *unsplit_notes(divided), *own)
    return Staged(stages, replace(forms[0].costs, stages=costs), notes)


def rebalanced(
    placed: Placed, placement: Sequence[int], prologues: bool, node_s: Seconds, options: Options, memo: Memo
) -> Placed:
    """Stages cut again by what the first ones cost, where that is less on the rank that takes longest."""

    def costs(cut: Placed) -> CostTable:
        return costed(cut, placement, prologues, options.levels[0], options, memo).costs

    seconds, speed = corrected(node_s, placed, costs(placed)), hardware_of(options.device).link_bytes_per_s
    again = followed(partition, placed.joint, options, placement, seconds=seconds, bytes_per_s=speed)
    return min(placed, again, key=lambda cut: heaviest_s(costs(cut)))


def corrected(node_s: Seconds, placed: Placed, costs: CostTable) -> Seconds:
    """Seconds of the nodes of which those of a stage add up to what the stage takes: how fast its rank's device is, and
    what its compiled phases save, is in them."""
    stage_of = {node.name: stage for node, stage in placed.stage_of.items()}
    sums: dict[int, float] = defaultdict(float)
    for node, stage in placed.stage_of.items():
        sums[stage] += node_s(node)
    factors = {stage: stage_s(costs, stage) / total for stage, total in sums.items() if total > 0}
    return lambda node: node_s(node) * factors.get(stage_of.get(node.name, -1), 1.0)


def stage_s(costs: CostTable, stage: int) -> float:
    return float(sum(costs.stages[stage].seconds(kind) for kind in (Kind.F, Kind.B, Kind.W)))


def heaviest_s(costs: CostTable) -> float:
    """Seconds of a microbatch on the rank that takes longest."""
    loads: dict[int, float] = defaultdict(float)
    for stage, rank in enumerate(costs.placement):
        loads[rank] += stage_s(costs, stage)
    return max(loads.values())


def ordered(costs: CostTable, cap: tuple[float, ...] | None, one_by_one: bool, options: Options) -> Schedule:
    """An order of actions for these costs; rank 0's on every rank."""
    if one_by_one:
        return serial(costs, options.microbatches)
    announce("planning an order of actions")
    # Under a limit in bytes many orders are compared, each after one round of search.
    budget: dict[str, Any] = {"budget_s": CANDIDATE_S, "rounds": ROUNDS} if options.limits_bytes else {}
    found = plan(costs, options.microbatches, schedule=options.schedule, mem_limit=cap, **budget)
    return from_rank(0, "compile (the plan)", found)


def serial(costs: CostTable, microbatches: int) -> Schedule:
    """The order that holds least: one microbatch after the other, each backward fused."""
    orders = []
    for rank in range(costs.rank_count):
        stages = costs.stages_of(rank)
        kinds = [(Kind.F, stage) for stage in stages] + [(Kind.BW, stage) for stage in reversed(stages)]
        orders.append(tuple(Action(kind, stage, k) for k in range(microbatches) for kind, stage in kinds))
    return build("one by one", costs, microbatches, tuple(orders))


def with_pairs(schedule: Schedule, stages: Sequence[Stage], options: Options) -> Schedule:
    """The schedule with Ws beside Bs of other microbatches, on a second stream."""
    apart = frozenset(stage.index for stage in stages if stage.runs_beside)
    return run_beside(schedule, apart, move=options.is_searched)
