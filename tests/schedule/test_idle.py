"""Why ranks idle: against the definitions of docs/report.md, moment by moment, and by hand."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbfx.plan import Action, CostTable, Kind, Span, StageCost, parts
from zbfx.schedule import plan
from zbfx.schedule.schedule import Schedule
from zbfx.timing.critical import critical_path, longest_rank
from zbfx.timing.idle import Cause, idle_of, idle_times

STAGE = StageCost(2, 3, 5, saved_bytes=4, weight_saved_bytes=1)
EVEN = CostTable.chain([STAGE] * 4, 7)
UNEVEN = CostTable.chain([STAGE, StageCost(4, 6, 10, 4, 1), STAGE, StageCost(1, 2, 2, 4, 1)], [7, 1, 0])
V = CostTable.chain([STAGE] * 8, 1, placement=[0, 1, 2, 3, 3, 2, 1, 0])


class Why(NamedTuple):
    cause: Cause
    because: Action | None


class Moments:
    """The definitions, for one moment of a rank's idle time after the other."""

    def __init__(self, costs: CostTable, spans: Sequence[Sequence[Span]]) -> None:
        self.costs, self.spans = costs, spans
        self.place = {part: (rank, s) for rank, row in enumerate(spans) for s in row for part in parts(s.action)}
        lengths: dict[Kind, list[float]] = {}
        for span in (span for row in spans for span in row):
            lengths.setdefault(span.action.kind, []).append(span.end_s - span.start_s)
        self.mean_s = {kind: sum(found) / len(found) for kind, found in lengths.items()}

    def inputs(self, action: Action) -> list[tuple[float, Span]]:
        first, found = parts(action)[0], []
        if first.kind is not Kind.F:
            own = Action(Kind.F if first.kind is Kind.B else Kind.B, first.stage, first.microbatch)
            found.append((self.place[own][1].end_s, self.place[own][1]))
        for edge in self.costs.edges:
            near, far = (edge.target, edge.source) if first.kind is Kind.F else (edge.source, edge.target)
            if near == first.stage and first.kind is not Kind.W:
                _, made = self.place[Action(first.kind, far, first.microbatch)]
                lag = edge.forward_s if first.kind is Kind.F else edge.backward_s
                same = self.costs.placement[near] == self.costs.placement[far]
                found.append((made.end_s + (0 if same else float(lag or 0)), made))
        return found

    def why(self, action: Action, at_s: float) -> Why:
        found = self.inputs(action)
        if found:
            arrival_s, made = max(found, key=lambda one: one[0])
            if at_s < made.start_s:
                return self.why(made.action, at_s)
            if at_s < made.end_s:
                return self.runs(made, at_s)
            if at_s < arrival_s:
                return Why(Cause.MESSAGE, made.action)
        row = self.spans[self.place[parts(action)[0]][0]]
        running = next((span for span in row if span.start_s <= at_s < span.end_s), None)
        if running is not None:
            return self.runs(running, at_s)
        following = next(span.action for span in row if span.start_s > at_s)
        return Why(Cause.LAUNCH, action) if following == action else self.why(following, at_s)

    def runs(self, span: Span, at_s: float) -> Why:
        long = at_s > span.start_s + self.mean_s[span.action.kind]
        return Why(Cause.IMBALANCE if long else Cause.DEPENDENCY, span.action)


FILLED = (Cause.ORDER, Cause.MEMORY)


@pytest.mark.parametrize("costs", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_causes_are_those_of_the_definitions_at_each_moment(costs: CostTable, name: str) -> None:
    schedule = plan(costs, 8, schedule=name)
    truth, seen = Moments(costs, schedule.spans), Counter[Cause]()
    by_a_filled_rank = {(p.rank, p.start_s, p.end_s) for row in idle_of(schedule) for p in row if p.cause in FILLED}
    for row in idle_of(schedule):
        for piece in (piece for piece in row if piece.cause not in FILLED and piece.before is not None):
            at_s = (piece.start_s + piece.end_s) / 2
            found = truth.why(piece.before, at_s) if piece.before else None
            assert found == (piece.cause, piece.because), (piece, found)
            seen[piece.cause] += 1
    assert by_a_filled_rank or name == "gpipe"
    assert seen[Cause.DEPENDENCY]
    assert seen[Cause.MESSAGE]
    assert bool(seen[Cause.IMBALANCE]) == (costs is UNEVEN)


def assert_adds_up(schedule: Schedule) -> None:
    """Every second of a rank from its first start for an iteration time is in one action or one piece."""
    for spans, idle in zip(schedule.spans, idle_of(schedule), strict=True):
        pieces = sorted([(s.start_s, s.end_s) for s in spans] + [(p.start_s, p.end_s) for p in idle])
        times = [time for piece in pieces if piece[1] > piece[0] for time in piece]
        assert times[1:-1:2] == times[2::2], "each begins where the one before ends"
        assert times[0] == spans[0].start_s
        assert times[-1] == pytest.approx(spans[0].start_s + schedule.iteration_s, rel=1e-12)


@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2"]),
    st.lists(st.tuples(*[st.integers(1, 9)] * 3, st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(1, 7),
    st.sampled_from([None, "1x", "2x"]),
)
@settings(max_examples=60, deadline=None)
def test_causes_add_up_to_the_idle_time(
    name: str, rows: list[tuple[int, int, int, int]], microbatches: int, limit: str | None
) -> None:
    stages = [StageCost(f / 7, b / 7, w / 7, 2, 1) for f, b, w, _ in rows]
    costs = CostTable.chain(stages, [comm / 7 for *_, comm in rows[1:]])
    schedule = plan(costs, microbatches, schedule=name)
    assert_adds_up(schedule)
    if limit:
        object.__setattr__(schedule, "mem_limit", tuple(schedule.peak_bytes))
        assert_adds_up(schedule)


def by_cause(schedule: Schedule, rank: int) -> dict[Cause, float]:
    found: dict[Cause, float] = defaultdict(float)
    for piece in idle_of(schedule)[rank]:
        found[piece.cause] += piece.idle_s
    return dict(found)


def test_causes_by_hand() -> None:
    """1F1B on two ranks: rank 0 waits from 4 to 12 for BW1.0, when F0.2 and F0.3 might have run, and from 40 to 42 for
    BW1.3; rank 1 only for its inputs at the start, before which its step does not begin."""
    costs = CostTable.chain([STAGE] * 2)
    schedule = plan(costs, 4, schedule="1f1b")
    assert by_cause(schedule, 0) == {Cause.ORDER: 4, Cause.DEPENDENCY: 4 + 2}
    assert by_cause(schedule, 1) == {Cause.NEXT: 50 - 40}


def test_a_limit_is_a_cause_where_something_would_fit_without_it() -> None:
    costs = CostTable.chain([StageCost(1, 1, 1, saved_bytes=2, weight_saved_bytes=1)] * 4)
    limited = plan(costs, 8, schedule="zb-h1", mem_limit="1x")
    assert by_cause(limited, 0) == {Cause.MEMORY: 3}
    assert {piece.because for piece in idle_of(limited)[0]} == {Action(Kind.F, 0, k) for k in (4, 5, 6)}
    assert by_cause(plan(costs, 8, schedule="zb-h1"), 0) == {Cause.ORDER: 3}
    assert by_cause(plan(costs, 8, schedule="zb-h2"), 0) == {}


def test_a_measured_rank_that_has_its_inputs_waits_for_its_launch() -> None:
    schedule = plan(CostTable.chain([STAGE]), 1, schedule="zb-h1")
    late = [[Span(span.action, span.start_s + k, span.end_s + k) for k, span in enumerate(schedule.spans[0])]]
    pieces = idle_times(schedule.costs, late)[0]
    assert [(piece.start_s, piece.end_s, piece.cause, str(piece.before)) for piece in pieces] == [
        (2, 3, Cause.LAUNCH, "B0.0"),
        (6, 7, Cause.LAUNCH, "W0.0"),
    ]


def test_clocks_that_disagree_still_add_up() -> None:
    """A receiver that begins before its sender has ended, by the clock of another device."""
    schedule = plan(EVEN, 3, schedule="zb-h1")
    skewed = [
        [Span(span.action, span.start_s - 9.5 * rank, span.end_s - 9.5 * rank) for span in spans]
        for rank, spans in enumerate(schedule.spans)
    ]
    for spans, idle in zip(skewed, idle_times(EVEN, skewed), strict=True):
        busy_s = sum(span.end_s - span.start_s for span in spans)
        assert sum(piece.idle_s for piece in idle) == pytest.approx(schedule.iteration_s - busy_s)


@pytest.mark.parametrize("costs", [EVEN, UNEVEN, V], ids=["even", "uneven", "v"])
def test_the_critical_path_has_no_slack(costs: CostTable) -> None:
    """From the first action to the end, it is made of actions and messages alone."""
    schedule = plan(costs, 8, schedule="zb-v-order" if costs is V else "zb-h1")
    path = critical_path(costs, schedule.spans)
    rank = longest_rank(schedule.spans)
    assert path[0].start_s == 0
    assert path[-1].end_s == schedule.spans[rank][-1].end_s
    lags = {7, 1, 0}
    assert {later.start_s - sooner.end_s for sooner, later in pairwise(path)} <= lags


def test_an_action_that_is_free_takes_no_time_to_explain() -> None:
    free = CostTable.chain([StageCost(0, 0, 0)] * 2)
    assert idle_of(plan(free, 2, schedule="1f1b")) == ((), ())
