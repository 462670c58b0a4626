"""One line that says what limits a schedule, from the causes of its idle time (`zbfx.timing.idle`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from zbfx.plan import Kind, Timetable, parts
from zbfx.timing.critical import Spans, longest_rank
from zbfx.timing.idle import Cause, Idle, idle_of, idle_times
from zbfx.timing.two_streams import as_they_run, iteration_s

NEGLIGIBLE = 0.005  # a share of the step


@dataclass(frozen=True)
class Account:
    """How a step's time was spent: `spans` as planned or as measured, and the idle time of each rank."""

    schedule: Timetable
    spans: Spans
    idle: Sequence[Sequence[Idle]]
    is_planned: bool

    @classmethod
    def of_plan(cls, schedule: Timetable) -> Account:
        return cls(schedule, as_they_run(schedule), idle_of(schedule), is_planned=True)

    @classmethod
    def of_step(cls, schedule: Timetable, spans: Spans) -> Account:
        """A step that was measured, whatever its plan held in memory."""
        return cls(schedule, spans, idle_times(schedule.costs, spans), is_planned=False)

    @cached_property
    def iteration_s(self) -> float:
        return iteration_s(self.spans)

    @cached_property
    def longest(self) -> int:
        return longest_rank(self.spans)

    def idle_s(self, rank: int) -> Mapping[Cause, float]:
        """The idle seconds of a rank by cause, in the order of causes; those of all causes, 0 too."""
        found = dict.fromkeys(Cause, 0.0)
        for piece in self.idle[rank]:
            found[piece.cause] += piece.idle_s
        return found

    @property
    def idle_share(self) -> float:
        """Of the time of all ranks, from 0 to 1."""
        whole_s = self.iteration_s * len(self.spans)
        return sum(piece.idle_s for row in self.idle for piece in row) / whole_s if whole_s else 0.0

    @property
    def work_s(self) -> tuple[float, ...]:
        """Planned seconds of each rank's actions."""
        costs = self.schedule.costs
        return tuple(
            sum(float(costs.stages[action.stage].seconds(action.kind)) for action in order)
            for order in self.schedule.ranks
        )

    def __str__(self) -> str:
        share = self.idle_share
        if share < NEGLIGIBLE:
            return "no idle time worth the name: every rank works through the whole step"
        reason, way_out = self.reason()
        if self.is_planned and len(self.spans) > 1 and self.iteration_s >= sum(self.work_s):
            way_out = "this model is too small to gain from a pipeline"
        return f"{share:.0%} idle: {reason}; {way_out}"

    def reason(self) -> tuple[str, str]:
        """What the longest rank waits for most, and what helps; or that the work is uneven, if that is more than half
        of all idle time."""
        work_s, found = self.work_s, self.idle_s(self.longest)
        heaviest, mean_s = max(range(len(work_s)), key=work_s.__getitem__), sum(work_s) / len(work_s)
        if work_s[heaviest] - mean_s > self.idle_share * self.iteration_s / 2:
            return f"rank {heaviest} has {work_s[heaviest] / mean_s:.2g} x the mean work", CUT
        cause = max(found, key=found.__getitem__)
        return REASONS[cause](self, self.longest, [piece for piece in self.idle[self.longest] if piece.cause is cause])


CUT = "cut the stages elsewhere"
Explanation = Callable[[Account, int, Sequence[Idle]], tuple[str, str]]


def of_dependencies(account: Account, rank: int, pieces: Sequence[Idle]) -> tuple[str, str]:
    seconds: dict[tuple[int, Kind], float] = defaultdict(float)
    for piece in pieces:
        if piece.because is not None:
            seconds[account.schedule.costs.placement[piece.because.stage], piece.because.kind] += piece.idle_s
    other, kind = max(seconds, key=lambda key: seconds[key])
    fused = any(len(parts(action)) > 1 for order in account.schedule.ranks for action in order)
    way_out = "backwards split into B and W fill such time" if fused else "more microbatches make it a smaller share"
    return f"rank {rank} waits mostly for {kind}s of rank {other}", way_out


def of_messages(account: Account, rank: int, pieces: Sequence[Idle]) -> tuple[str, str]:
    costs = account.schedule.costs
    lags = [
        float(lag_s or 0.0)
        for edge in costs.edges
        if costs.placement[edge.source] != costs.placement[edge.target]
        for lag_s in (edge.forward_s, edge.backward_s)
    ]
    forward_s = sum(float(stage.forward_s) for stage in costs.stages) / len(costs.stages)
    way_out = "larger microbatches or fewer ranks make it a smaller share"
    if not forward_s:
        return f"rank {rank} waits mostly for messages", way_out
    return f"messages take {max(lags, default=0.0) / forward_s:.2g} x as long as F", way_out


def of_the_limit(account: Account, rank: int, pieces: Sequence[Idle]) -> tuple[str, str]:
    return f"the memory limit keeps rank {rank} from running {first(pieces)} earlier", "raise it, or recompute more"


def of_the_order(account: Account, rank: int, pieces: Sequence[Idle]) -> tuple[str, str]:
    proven = account.is_planned and account.schedule.gap == 0
    way_out = "no order takes less in all (proven)" if proven else "schedule='auto' searches for a better order"
    return f"rank {rank} could run {first(pieces)} earlier", way_out


def of_launches(account: Account, rank: int, pieces: Sequence[Idle]) -> tuple[str, str]:
    return f"rank {rank} starts late what it could run", "launches take long, or messages longer than planned"


def of_imbalance(account: Account, rank: int, pieces: Sequence[Idle]) -> tuple[str, str]:
    return f"rank {rank} waits mostly for {first(pieces)}, longer than others of its kind", CUT


def of_the_end(account: Account, rank: int, pieces: Sequence[Idle]) -> tuple[str, str]:
    return f"ranks wait for rank {rank} to end its step", CUT


def first(pieces: Sequence[Idle]) -> str:
    return str(pieces[0].because)


REASONS: Mapping[Cause, Explanation] = {
    Cause.DEPENDENCY: of_dependencies,
    Cause.IMBALANCE: of_imbalance,
    Cause.MESSAGE: of_messages,
    Cause.MEMORY: of_the_limit,
    Cause.ORDER: of_the_order,
    Cause.LAUNCH: of_launches,
    Cause.NEXT: of_the_end,
}
