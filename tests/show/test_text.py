"""The text grid of tiny schedules, character by character."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from zbfx.plan import CostTable, Kind, StageCost
from zbfx.schedule import plan
from zbfx.schedule.schedule import Schedule
from zbfx.show.explain import Account
from zbfx.show.text import Columns, coloured_grid, column_maxima, grid, time_cell
from zbfx.show.units import amount, ticks

STAGE = StageCost(2, 3, 5, saved_bytes=4, weight_saved_bytes=1)
COSTS = CostTable.chain([STAGE, STAGE], 7)


@pytest.fixture
def tiny() -> Schedule:
    orders = ["F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 B1.0 F1.1 B1.1 W1.0 W1.1"]
    return replace(plan(COSTS, 2, schedule=orders), lower_bound_s=36.0)


def test_time_grid_draws_one_character_per_second(tiny: Schedule) -> None:
    assert grid(tiny, width=60).splitlines() == [
        "rank 0 |F0F1.................B0-W0---B1-W1---|",
        "rank 1 |.........F0B0-F1B1-W0---W1---........|",
        "time   |0         10        20        30",
        "memory held, a full bar is the peak: 8 on rank 0",
        "rank 0 |▄▄██████████████████████▅▅▅▅▅▄▄▄▁▁▁▁▁|",
        "rank 1 |         ▄▄▄▄▄▅▅▅▅▅▂▂▂▂▂▁▁▁▁▁        |",
        "46% idle: messages take 3.5 x as long as F; larger microbatches or fewer ranks make it a smaller share",
        "custom: 2 ranks, 2 microbatches, iteration time 37, bubble rate 0.4595, lower bound 36 (gap 2.78%)",
    ]


def test_step_grid_gives_every_action_one_cell(tiny: Schedule) -> None:
    assert grid(tiny, width=60, columns="step").splitlines()[:2] == [
        "rank 0 |F0 F1 .  B0 W0 B1 W1 |",
        "rank 1 |.  F0 B0 F1 B1 W0 W1 |",
    ]


def test_step_grid_wraps_at_the_width(tiny: Schedule) -> None:
    assert grid(tiny, width=21, columns="step").splitlines()[:5] == [
        "rank 0 |F0 F1 .  B0 |",
        "rank 1 |.  F0 B0 F1 |",
        "",
        "rank 0 |W0 B1 W1 |",
        "rank 1 |B1 W0 W1 |",
    ]


def test_letters_only_where_an_action_has_no_room(tiny: Schedule) -> None:
    assert grid(tiny, width=28).splitlines()[:2] == [
        "rank 0 |FF.........BW0-BW1-|",
        "rank 1 |.....FBFB1W0W1-....|",
    ]


def test_fused_backward_ends_in_equals_signs() -> None:
    schedule = plan(COSTS, 1, schedule=["F0.0 BW0.0", "F1.0 B1.0 W1.0"])
    assert grid(schedule, width=40).splitlines()[:2] == [
        "rank 0 |F0...................BW0=====|",
        "rank 1 |.........F0B0-W0---..........|",
    ]
    assert time_cell("BW0", Kind.BW, 3) == "B=="
    assert time_cell("B0", Kind.B, 2) == "B0"


def test_ranks_with_two_stages_name_the_stage() -> None:
    costs = CostTable.chain([STAGE] * 4, 7, placement=[0, 1, 1, 0])
    orders = ["F0.0 F3.0 B3.0 W3.0 BW0.0", "F1.0 F2.0 B2.0 B1.0 W1.0 W2.0"]
    assert grid(plan(costs, 1, schedule=orders), width=90, columns="step").splitlines()[:2] == [
        "rank 0 |F0.0  .     .     F3.0  B3.0  W3.0  .     BW0.0 .     |",
        "rank 1 |.     F1.0  F2.0  .     .     B2.0  B1.0  W1.0  W2.0  |",
    ]


@pytest.mark.parametrize("width", [30, 80, 120, 200])
@pytest.mark.parametrize("columns", ["time", "step"])
def test_rows_fit_the_width(width: int, columns: Columns) -> None:
    schedule = plan(CostTable.chain([STAGE] * 8, 7), 24, schedule="zb-h1")
    rows = [line for line in grid(schedule, width, columns).splitlines() if "|" in line]
    assert len(rows) >= 8
    assert max(map(len, rows)) <= width


def test_colour_changes_no_character(tiny: Schedule) -> None:
    coloured = coloured_grid(tiny, width=60)
    assert [line.rstrip() for line in coloured.plain.splitlines()] == grid(tiny, width=60).splitlines()
    styles = {coloured.plain[span.start : span.end]: span.style for span in coloured.spans}
    assert styles["B0-"] == "#000000 on #e69f00"
    console = Console(force_terminal=True, width=130, color_system="truecolor")
    with console.capture() as capture:
        console.print(coloured)
    assert "\x1b[38;2;0;0;0;48;2;230;159;0m" in capture.get()


def test_str_is_the_grid_as_wide_as_the_terminal(tiny: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert str(tiny) == grid(tiny, width=50)


def test_schedule_without_time_still_draws() -> None:
    free = CostTable.chain([StageCost(0, 0, 0)] * 2)
    assert grid(plan(free, 1, schedule="1f1b")).splitlines()[:2] == ["rank 0 ||", "rank 1 ||"]


def test_column_maxima_take_the_largest_value_of_each_column() -> None:
    assert column_maxima([(0.0, 1.0), (3.0, 5.0), (4.0, 2.0)], 3, 0.5) == [1.0, 5.0, 2.0]


def test_amounts_of_memory() -> None:
    assert [amount(1.5), amount(3 * 2**20), amount(2.5 * 2**30)] == ["1.5", "3.00 MiB", "2.50 GiB"]


def test_the_grid_fills_the_window_where_whole_columns_would_leave_much_of_it() -> None:
    schedule = plan(COSTS, 1, schedule=["F0.0 BW0.0", "F1.0 B1.0 W1.0"])  # 29 seconds
    assert [len(grid(schedule, width).splitlines()[0]) for width in (40, 60, 70)] == [38, 60, 67]


@pytest.mark.parametrize(
    ("most", "count", "expected"),
    [(37, 3, [0, 10, 20, 30]), (1, 4, [0, 0.5, 1]), (0, 5, [0]), (7, 0, [0])],
)
def test_ticks_are_round(most: float, count: int, expected: list[float]) -> None:
    assert ticks(most, count) == expected


FAST = StageCost(1, 1, 1, saved_bytes=2, weight_saved_bytes=1)


@pytest.mark.parametrize(
    ("stages", "comm", "name", "limit", "expected"),
    [
        ([FAST] * 4, 0, "zb-h2", None, "no idle time worth the name: every rank works through the whole step"),
        (
            [FAST] * 4, 0, "1f1b", None,
            "27% idle: rank 0 waits mostly for BWs of rank 1; backwards split into B and W fill such time",
        ),
        (
            [FAST] * 4, 0, "zb-h1", "1x",
            "11% idle: the memory limit keeps rank 0 from running F0.4 earlier; raise it, or recompute more",
        ),
        (
            [FAST] * 4, 0, "zb-h1", None,
            "11% idle: rank 0 could run F0.4 earlier; schedule='auto' searches for a better order",
        ),
        (
            [FAST] * 4, 9, "zb-h1", None,
            "86% idle: messages take 9 x as long as F; this model is too small to gain from a pipeline",
        ),
        (
            [FAST, StageCost(3, 3, 3)], 0, "1f1b", None,
            "36% idle: rank 1 has 1.5 x the mean work; cut the stages elsewhere",
        ),
    ],
)  # fmt: skip
def test_one_line_says_what_limits_a_schedule(
    stages: list[StageCost], comm: float, name: str, limit: str | None, expected: str
) -> None:
    schedule = plan(CostTable.chain(stages, comm), 8, schedule=name, mem_limit=limit)
    assert str(Account.of_plan(schedule)) == expected
    assert grid(schedule).splitlines()[-2] == expected
