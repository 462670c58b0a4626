"""A cost table in whole numbers, actions as small integers, and longest paths through them: what the planner computes.

Takes   a cost table and a number of microbatches.
Gives   an `Instance`: times in ticks, sizes in units, actions as codes. Sums of floats would break the questions "does
        this F still fit?" and "is the bound met?". A float stands for the decimal number that it prints.
Raises  `ZbfxError` for less than one microbatch; `InvalidSchedule` for other ranks or actions in orders. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, lcm
from typing import TypeGuard, cast

from zbfx.errors import InvalidSchedule, ZbfxError
from zbfx.plan import Action, CostTable, Kind, Number, StageCost, plain_number
from zbfx.timing.views import KINDS, ActionView

F, B, W, BW = range(4)  # the kind part of a code
KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}
COMMON_TICKS, MOST_TICKS_OF_ACTION = 1 << 30, 1 << 32  # ticks of the longest action, rounded and as it is

Dependency = tuple[int, int]  # (group whose output is needed, ticks that it travels)


def exact(value: Number) -> Fraction:
    """The number as a fraction. The float 0.1 is one tenth, not the binary number next to it."""
    value = plain_number(value)
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def exact_seconds(stage: StageCost, kind: Kind) -> Fraction:
    if kind is Kind.BW and stage.backward_s is None:
        return exact(stage.backward_input_s) + exact(stage.backward_weight_s)  # summed as floats they would round
    return exact(stage.seconds(kind))


def _scaled(columns: Sequence[Sequence[Number]]) -> tuple[list[list[int]], int]:
    fractions = [[exact(value) for value in column] for column in columns]
    scale = lcm(1, *(value.denominator for column in fractions for value in column))
    return [[int(value * scale) for value in column] for column in fractions], scale


def on_common_tick(costs: CostTable) -> CostTable:
    """The costs with all times rounded down to multiples of one tick, a billionth of the longest action; as they are
    where their own ticks are no finer. No schedule costs more under the result. Measured seconds of 17 digits would
    make numbers so large that bounds give up, and sums that ought to be equal unequal."""
    times = [exact_seconds(stage, kind) for stage in costs.stages for kind in (*KINDS, Kind.P)]
    lags = [exact(lag) for edge in costs.edges for lag in (edge.forward_s, edge.backward_s) if lag is not None]
    longest = max(times)
    if longest * lcm(1, *(time.denominator for time in (*times, *lags))) <= MOST_TICKS_OF_ACTION:
        return costs
    per_s = ceil(COMMON_TICKS / longest)

    def down(time: Number | None) -> Fraction | None:
        return None if time is None else Fraction(int(exact(time) * per_s), per_s)

    def stage_down(stage: StageCost) -> StageCost:
        whole = exact_seconds(stage, Kind.BW)
        names = ("forward_s", "backward_input_s", "backward_weight_s", "prologue_s")
        apart = {name: cast(Fraction, down(getattr(stage, name))) for name in names}
        return replace(stage, **apart, backward_s=None if stage.backward_s is None else down(whole))

    edges = tuple(replace(e, forward_s=down(e.forward_s), backward_s=down(e.backward_s)) for e in costs.edges)
    return replace(costs, stages=tuple(map(stage_down, costs.stages)), edges=edges)


@dataclass(frozen=True)
class Instance:
    """One planning problem in integers; `S` stages, `m` microbatches, `p` ranks. The group of an action is
    `kind * S + stage`, its code `group * m + microbatch`. `ticks[group]` is how long it takes, `grows[group]` what it
    adds to its rank's memory, `sources[group]` whose outputs it waits for. Others find its result under
    `output[group]`: its own group, but for a fused backward BW that of its B. `prologue[rank]` is how many ticks the
    prologues of a rank's stages take."""

    stage_count: int
    rank_count: int
    microbatches: int
    placement: tuple[int, ...]
    ticks: tuple[int, ...]
    grows: tuple[int, ...]
    sources: tuple[tuple[Dependency, ...], ...]
    output: tuple[int, ...]
    static: tuple[int, ...]  # memory units per rank, through the whole step; room for one action's transients included
    ticks_per_s: int
    units_per_byte: int
    prologue: tuple[int, ...]

    def seconds(self, ticks: int) -> float:
        return ticks / self.ticks_per_s

    def bytes(self, units: int) -> float:
        return units / self.units_per_byte

    def code(self, action: Action) -> int:
        return (KIND_INDEX[action.kind] * self.stage_count + action.stage) * self.microbatches + action.microbatch

    def action(self, code: int) -> Action:
        group, microbatch = divmod(code, self.microbatches)
        kind, stage = divmod(group, self.stage_count)
        return Action(KINDS[kind], stage, microbatch)

    def encode(self, ranks: Sequence[Sequence[Action]]) -> list[list[int]]:
        count = self.stage_count
        if len(ranks) != self.rank_count:
            raise InvalidSchedule(
                f"the placement has {self.rank_count} ranks; the schedule gives orders for {len(ranks)}"
            )
        bases = {kind: index * count for kind, index in KIND_INDEX.items()}
        return [
            order.codes.tolist() if self.has_coded(order) else self._encoded(rank, order, bases)
            for rank, order in enumerate(ranks)
        ]

    def has_coded(self, order: Sequence[Action]) -> TypeGuard[ActionView]:
        """Whether an order has codes of this problem."""
        shape = self.stage_count, self.microbatches
        return isinstance(order, ActionView) and (order.stage_count, order.microbatches) == shape

    def _encoded(self, rank: int, order: Sequence[Action], bases: Mapping[Kind, int]) -> list[int]:
        count, m = self.stage_count, self.microbatches
        for action in order:
            if not (0 <= action.stage < count and 0 <= action.microbatch < m):
                raise InvalidSchedule(
                    f"rank {rank} runs {action}; there are stages 0 to {count - 1} and microbatches 0 to {m - 1}"
                )
        return [(bases[a.kind] + a.stage) * m + a.microbatch for a in order]

    def decode(self, orders: Iterable[Sequence[int]]) -> tuple[ActionView, ...]:
        return tuple(ActionView(order, self.stage_count, self.microbatches) for order in orders)

    def units(self, limit: Sequence[Number] | None) -> list[int] | None:
        """Units that activations may take under a limit in bytes per rank. Rounding down is exact: sizes are whole."""
        if limit is None:
            return None
        return [
            int(exact(value) * self.units_per_byte // 1) - held for value, held in zip(limit, self.static, strict=True)
        ]


def instance(costs: CostTable, microbatches: int) -> Instance:
    if microbatches < 1:
        raise ZbfxError(f"a step has at least one microbatch; found {microbatches}")
    stages = costs.stages
    count = len(stages)
    times = [[exact_seconds(stage, kind) for stage in stages] for kind in KINDS]
    forward = [0 if edge.forward_s is None else edge.forward_s for edge in costs.edges]
    backward = [0 if edge.backward_s is None else edge.backward_s for edge in costs.edges]
    once = [stage.prologue_s for stage in stages]
    (*kinds, once_ticks, forward_ticks, backward_ticks), ticks_per_s = _scaled([*times, once, forward, backward])
    sizes = ("saved_bytes", "weight_saved_bytes", "static_bytes", "transient_bytes")
    columns = [[getattr(stage, name) for stage in stages] for name in sizes]
    (saved, weight_saved, static, transient), units_per_byte = _scaled(columns)
    sources: list[list[Dependency]] = [[] for _ in range(4 * count)]
    for stage in range(count):
        sources[B * count + stage].append((F * count + stage, 0))
        sources[W * count + stage].append((B * count + stage, 0))
        sources[BW * count + stage].append((F * count + stage, 0))
    for edge, there, back in zip(costs.edges, forward_ticks, backward_ticks, strict=True):
        local = costs.placement[edge.source] == costs.placement[edge.target]
        if edge.forward_s is not None:
            sources[F * count + edge.target].append((F * count + edge.source, 0 if local else there))
        if edge.backward_s is not None:
            for kind in (B, BW):
                sources[kind * count + edge.source].append((B * count + edge.target, 0 if local else back))
    return Instance(
        stage_count=count,
        rank_count=costs.rank_count,
        microbatches=microbatches,
        placement=costs.placement,
        ticks=tuple(ticks for column in kinds for ticks in column),
        grows=(
            *saved,
            *(after - before for before, after in zip(saved, weight_saved, strict=True)),
            *(-size for size in weight_saved),
            *(-size for size in saved),
        ),
        sources=tuple(tuple(needed) for needed in sources),
        output=(*range(3 * count), *range(B * count, (B + 1) * count)),
        static=tuple(
            sum(static[stage] for stage in own) + max(transient[stage] for stage in own)
            for own in map(costs.stages_of, range(costs.rank_count))
        ),
        ticks_per_s=ticks_per_s,
        units_per_byte=units_per_byte,
        prologue=tuple(sum(once_ticks[s] for s in costs.stages_of(rank)) for rank in range(costs.rank_count)),
    )


@dataclass(frozen=True)
class LongestPaths:
    """Start ticks per rank and position, how many of its actions each rank reached, and whether all were."""

    starts: tuple[tuple[int, ...], ...]
    reached: tuple[int, ...]
    complete: bool


def longest_paths(problem: Instance, orders: Sequence[Sequence[int]]) -> LongestPaths:
    """When the actions of coded orders start. Ranks that wait for one another for ever stay where they stand."""
    m = problem.microbatches
    ticks, output = problem.ticks, problem.output
    sources = [[(group * m, lag) for group, lag in needed] for needed in problem.sources]
    ends = [-1] * (3 * problem.stage_count * m)
    starts: list[list[int]] = [[] for _ in orders]
    clocks = [0] * len(orders)
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order, begun, clock = orders[rank], starts[rank], clocks[rank]
        for position in range(len(begun), len(order)):
            group, microbatch = divmod(order[position], m)
            start = clock
            for base, lag in sources[group]:
                end = ends[base + microbatch]
                if end < 0:
                    waiting.setdefault(base + microbatch, []).append(rank)
                    start = -1
                    break
                if end + lag > start:
                    start = end + lag
            if start < 0:
                break
            begun.append(start)
            clock = start + ticks[group]
            produced = output[group] * m + microbatch
            ends[produced] = clock
            if produced in waiting:
                runnable.extend(waiting.pop(produced))
        clocks[rank] = clock
    reached = tuple(map(len, starts))
    return LongestPaths(tuple(map(tuple, starts)), reached, reached == tuple(map(len, orders)))


def iteration_ticks(problem: Instance, orders: Sequence[Sequence[int]], starts: Sequence[Sequence[int]]) -> int:
    """The paper's cost: the longest rank's time from its first start to its last end."""
    m, ticks = problem.microbatches, problem.ticks
    return max(
        (begun[-1] + ticks[order[-1] // m] - begun[0] for order, begun in zip(orders, starts, strict=True) if order),
        default=0,
    )


def peak_units(problem: Instance, order: Sequence[int]) -> int:
    """The most that one rank's order ever holds, without what it holds throughout."""
    m, grows = problem.microbatches, problem.grows
    held = peak = 0
    for code in order:
        held += grows[code // m]
        if held > peak:
            peak = held
    return peak
