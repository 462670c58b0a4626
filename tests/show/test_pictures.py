"""SVG, page and Chrome trace: each has the actions and times of its schedule, to the last digit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from zbfx.plan import Action, CostTable, Span, StageCost
from zbfx.runtime.timeline import Profile
from zbfx.schedule import plan
from zbfx.schedule.schedule import Schedule
from zbfx.show.chrome_trace import as_measured, chrome_trace
from zbfx.show.explain import Account
from zbfx.show.page import CutEdge, Subject, page
from zbfx.show.palette import FILLS
from zbfx.show.svg import LEFT_PX, MEMORY_PX, RIGHT_PX
from zbfx.show.text import characters_per_second, grid
from zbfx.timing.idle import Cause, idle_of, idle_times

NAMESPACE = "{http://www.w3.org/2000/svg}"
STAGE = StageCost(2, 3, 5, saved_bytes=4, weight_saved_bytes=1)
ODD = StageCost(2.1 / 7, 3.3 / 7, 5.7 / 7, saved_bytes=4, weight_saved_bytes=1)
V = CostTable.chain([ODD] * 8, 0.77, placement=[0, 1, 2, 3, 3, 2, 1, 0])
Times = dict[Action, tuple[float, float]]


@pytest.fixture
def tiny() -> Schedule:
    orders = ["F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 B1.0 F1.1 B1.1 W1.0 W1.1"]
    return plan(CostTable.chain([STAGE, STAGE], 7), 2, schedule=orders)


def schedules() -> Iterator[Schedule]:
    chain = CostTable.chain([ODD] * 4, 0.77)
    yield from (plan(chain, 6, schedule=name) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"))
    yield plan(chain, 12, schedule="zb-h1", mem_limit="1x")
    yield plan(V, 6, schedule="zb-v-order")


def times_of(ranks: Sequence[Sequence[Span]]) -> list[Times]:
    return [{span.action: (span.start_s, span.end_s) for span in spans} for spans in ranks]


def shapes(svg: str, kind: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(svg).iter() if e.get("class") == kind]


def times_in_svg(svg: str) -> list[Times]:
    rects = shapes(svg, "action")
    tops = sorted({float(rect.get("y", "")) for rect in rects})
    found: list[Times] = [{} for _ in tops]
    for rect in rects:
        times = float(rect.get("data-start", "")), float(rect.get("data-end", ""))
        found[tops.index(float(rect.get("y", "")))][Action.parse(rect.get("data-action", ""))] = times
    return found


def data_of(text: str) -> Any:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def times_in_page(view: Any, clock: int = 0) -> list[Times]:
    lanes = [lane for lane in view["lanes"] if lane["clock"] == clock]
    return [
        {
            Action.parse(action): (view["times"][start], view["times"][end])
            for action, start, end in zip(lane["actions"].split(), lane["start"], lane["end"], strict=True)
        }
        for lane in lanes
    ]


def times_in_trace(text: str, pid: int = 0) -> list[Times]:
    events = [e for e in json.loads(text)["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]
    found: list[Times] = [{} for _ in {e["tid"] for e in events}]
    for event in events:
        found[event["tid"]][Action.parse(event["name"])] = (event["args"]["start_s"], event["args"]["end_s"])
        assert event["ts"] == pytest.approx(event["args"]["start_s"] * 1e6)
        assert event["ts"] + event["dur"] == pytest.approx(event["args"]["end_s"] * 1e6)
    return found


@pytest.mark.parametrize("schedule", [*schedules()], ids=lambda schedule: schedule.name)
def test_all_pictures_parse_back_to_the_schedule(schedule: Schedule) -> None:
    truth = times_of(schedule.spans)
    assert times_in_svg(schedule.svg()) == truth
    assert times_in_page(data_of(schedule.html())["views"][0]) == truth
    assert times_in_trace(chrome_trace(schedule)) == truth


@pytest.mark.parametrize("schedule", [*schedules()], ids=lambda schedule: schedule.name)
def test_the_text_grid_parses_back_to_one_column(schedule: Schedule) -> None:
    width = 2000  # where every label has room
    scale = characters_per_second(schedule, width)
    rows = [row.split("|")[1] for row in grid(schedule, width).splitlines()[: len(schedule.ranks)]]
    one_each = schedule.costs.rank_count == len(schedule.costs.stages)
    for rank, (row, truth) in enumerate(zip(rows, times_of(schedule.spans), strict=True)):
        found: Times = {}
        for match in re.finditer(r"(BW|F|B|W)((?:\d+\.)?\d+)[-=]*", row):
            action = Action.parse(f"{match[1]}{rank}.{match[2]}" if one_each else match[1] + match[2])
            found[action] = match.start() / scale, match.end() / scale
        assert found.keys() == truth.keys()
        for action, times in found.items():
            assert times == pytest.approx(truth[action], abs=1 / scale)


def test_idle_times_of_picture_and_page_are_those_of_the_schedule(tiny: Schedule) -> None:
    truth = [(p.cause.value, p.start_s, p.end_s) for row in idle_of(tiny) for p in row]
    rects = shapes(tiny.svg(), "idle")
    assert [(r.get("data-cause"), float(r.get("data-start", "")), float(r.get("data-end", ""))) for r in rects] == truth
    data = data_of(tiny.html())
    view, names = data["views"][0], [cause["name"] for cause in data["causes"]]
    assert [
        (names[cause], view["times"][start], view["times"][end])
        for lane in view["lanes"]
        for cause, start, end in zip(*(lane["idle"][key] for key in ("cause", "start", "end")), strict=True)
    ] == truth
    assert names == list(Cause)


def test_svg_draws_to_scale_with_an_axis(tiny: Schedule) -> None:
    per_second = (1400 - LEFT_PX - RIGHT_PX) / 37
    (rect,) = (r for r in shapes(tiny.svg(), "action") if r.get("data-action") == "B1.1")
    assert float(rect.get("x", "")) == pytest.approx(LEFT_PX + 16 * per_second, abs=0.01)
    assert float(rect.get("width", "")) == pytest.approx(3 * per_second, abs=0.01)
    assert rect.get("fill") == next(fill for kind, fill in FILLS.items() if kind.value == "B")
    root = ElementTree.fromstring(tiny.svg())
    ticks = {e.text: float(e.get("x", "")) for e in root.iter(f"{NAMESPACE}text") if e.get("text-anchor") == "middle"}
    assert ticks["10"] == pytest.approx(LEFT_PX + 10 * per_second, abs=0.01)


def test_svg_labels_stay_from_microbatch_10_on() -> None:
    schedule = plan(CostTable.chain([StageCost(1, 1, 1, 2, 1)] * 4), 24, schedule="zb-h1")
    texts = [e.text for e in ElementTree.fromstring(schedule.svg()).iter(f"{NAMESPACE}text")]
    assert texts.count("23") == 3 * 4, "F, B and W of the last microbatch on each rank"


def test_svg_memory_strip_peaks_where_the_rank_holds_most(tiny: Schedule) -> None:
    heights = []
    for strip in shapes(tiny.svg(), "memory"):
        levels = [float(point.split(",")[1]) for point in strip.get("points", "").split()]
        heights.append(max(levels) - min(levels))
    assert heights == pytest.approx([MEMORY_PX - 2, (MEMORY_PX - 2) * 5 / 8], abs=0.02)


def test_the_limit_is_drawn(tiny: Schedule) -> None:
    assert shapes(tiny.svg(), "limit") == []
    limited = plan(tiny.costs, 2, schedule=tiny.ranks, mem_limit=[16, 8])
    strip, line = shapes(limited.svg(), "memory")[0], shapes(limited.svg(), "limit")[0]
    bottom = max(float(point.split(",")[1]) for point in strip.get("points", "").split())
    assert bottom - float(line.get("y1", "")) == pytest.approx(MEMORY_PX - 2), "the largest limit fills the strip"
    assert "peak 8, limit 16" in limited.svg()


def test_a_page_is_one_file_without_a_network(tiny: Schedule) -> None:
    text = tiny.html()
    for outside in ("src=", "href=", "@import", "url(", "fetch("):
        assert outside not in re.sub(r"<script>// https://d3js.org.*?</script>", "", text, flags=re.DOTALL)
    assert "d3js.org" in text


def test_a_page_says_what_a_reader_looks_for(tiny: Schedule) -> None:
    other = plan(tiny.costs, 2, schedule="1f1b")
    edge = CutEdge(0, 1, 1024, 512, ("relu",))
    text = page(Subject(tiny, None, (edge,), ("def forward(a < b)", "rank 1's"), (other,)))
    assert str(Account.of_plan(tiny)) in text
    assert "def forward(a &lt; b)" in text
    assert "<td>1,024</td><td>512</td><td>relu</td>" in text
    assert f"<td>1f1b</td><td>{other.iteration_s:g}</td>" in text
    data = data_of(text)
    assert data["programs"][1] == "rank 1's"
    assert times_in_page(data["views"][1]) == times_of(other.spans)
    assert data["views"][0]["lanes"][0]["memory"]["held"] == [4, 8, 5, 4, 1, 0]


def test_a_page_escapes_what_it_is_given() -> None:
    schedule = replace(plan(CostTable.chain([STAGE]), 1, schedule=["F0.0 BW0.0"]), name="</script><b>")
    text = page(Subject(schedule, programs=("</script>",)))
    assert text.count("</script>") == 3
    assert "<b>" not in text
    assert data_of(text)["programs"] == ["</script>"]


@pytest.mark.slow
def test_a_page_of_24576_actions_is_small() -> None:
    schedule = plan(CostTable.chain([StageCost(1.1 / 7, 1.3 / 7, 1.7 / 7, 2, 1)] * 32, 0.37), 256, schedule="zb-h1")
    others = tuple(plan(schedule.costs, 256, schedule=name) for name in ("gpipe", "1f1b", "zb-h2"))
    text = page(Subject(schedule, programs=("x" * 99_999,) * 32, compared=others))
    assert len(text.encode()) < 5e6
    data = data_of(text)
    assert sum(map(len, times_in_page(data["views"][0]))) == 24_576
    assert len(data["views"]) == 3, "the others are in the table alone"
    assert data["programs"][0].startswith("F0.0 F0.1 ")


def test_a_trace_has_an_arrow_for_each_message() -> None:
    for schedule in schedules():
        events = json.loads(chrome_trace(schedule))["traceEvents"]
        slices = {(e["tid"], Action.parse(e["name"])): e for e in events if e["ph"] == "X"}
        ends: dict[int, list[Action]] = {}
        for event in (e for e in events if e["ph"] in "sf"):
            (inside,) = (
                action
                for (tid, action), e in slices.items()
                if tid == event["tid"] and e["ts"] < event["ts"] < e["ts"] + e["dur"]
            )
            ends.setdefault(event["id"], []).append(inside)
        placement = schedule.costs.placement
        due = [
            (f"{kind}{a}.{k}", f"{kind}{b}.{k}")
            for stage in range(len(placement) - 1)
            for kind, a, b in (("F", stage, stage + 1), ("B", stage + 1, stage))
            for k in range(schedule.microbatches)
            if placement[a] != placement[b]
        ]
        assert sorted((str(a).replace("W", ""), str(b).replace("W", "")) for a, b in ends.values()) == sorted(due)


def test_trace_counts_memory(tiny: Schedule) -> None:
    events = json.loads(chrome_trace(tiny))["traceEvents"]
    held = [(e["ts"] / 1e6, e["args"]["bytes"]) for e in events if e["ph"] == "C" and e["name"].endswith("rank 0")]
    assert held == [(0, 0), (0, 4), (2, 8), (24, 5), (29, 4), (32, 1), (37, 0)]


@pytest.fixture
def late(tiny: Schedule) -> Profile:
    """A step in which every action begins 1 late and takes half a second longer."""
    return Profile(tiny, tuple(tuple(Span(s.action, s.start_s + 1, s.end_s + 1.5) for s in row) for row in tiny.spans))


def test_a_measured_step_lies_below_its_plan_on_one_scale(tiny: Schedule, late: Profile) -> None:
    assert times_in_svg(late.svg()) == [
        lane for pair in zip(times_of(tiny.spans), times_of(late.spans), strict=True) for lane in pair
    ]
    per_second = (1400 - LEFT_PX - RIGHT_PX - 4) / 38.5
    planned, measured = (rect for rect in shapes(late.svg(), "action") if rect.get("data-action") == "B1.1")
    assert float(planned.get("x", "")) == pytest.approx(LEFT_PX + 16 * per_second, abs=0.01)
    assert float(measured.get("x", "")) == pytest.approx(LEFT_PX + 17 * per_second, abs=0.01)
    assert float(measured.get("width", "")) == pytest.approx(3.5 * per_second, abs=0.01)
    view = data_of(page(Subject(tiny, late.spans)))["views"][0]
    assert times_in_page(view, 0) == times_of(tiny.spans)
    assert times_in_page(view, 1) == times_of(late.spans)
    assert view["clocks"] == [38.5, 38.5]


def test_a_measured_step_that_takes_thrice_as_long_has_its_own_scale(tiny: Schedule) -> None:
    slow = tuple(tuple(Span(s.action, 3 * s.start_s, 3 * s.end_s) for s in row) for row in tiny.spans)
    planned, measured = (r for r in shapes(Profile(tiny, slow).svg(), "action") if r.get("data-action") == "B1.1")
    assert (planned.get("x"), planned.get("width")) == (measured.get("x"), measured.get("width"))
    assert "each on its own scale" in Profile(tiny, slow).svg()
    text = page(Subject(tiny, slow))
    assert "each on its own scale" in text
    assert data_of(text)["views"][0]["clocks"] == [37, 111]


def test_a_trace_has_the_measured_step_with_its_memory(tiny: Schedule, late: Profile, tmp_path: Path) -> None:
    late.trace(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    assert times_in_trace(text, 0) == times_of(tiny.spans)
    assert times_in_trace(text, 1) == times_of(late.spans)
    events = json.loads(text)["traceEvents"]
    assert len({e["id"] for e in events if e["ph"] == "s" and e["pid"] == 1}) == 4
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1 and e["name"].endswith("rank 0")]
    assert max(held) == 8
    moved = as_measured([(0, 1), (3, 2), (29, 3), (37, 4)], tiny.spans[0], late.spans[0])
    assert moved == [(0, 1), (4.5, 2), (30.5, 3), (38.5, 4)]


def test_a_measured_step_may_lack_actions_that_compute_nothing(tiny: Schedule) -> None:
    lacking = tuple(tuple(span for span in row if str(span.action) != "W1.1") for row in tiny.spans)
    assert times_in_trace(chrome_trace(tiny, lacking), 1) == times_of(lacking)
    assert times_in_page(data_of(page(Subject(tiny, lacking)))["views"][0], 1) == times_of(lacking)
    assert "W1.1" in Profile(tiny, lacking).svg()


def test_the_idle_time_of_a_measured_step(late: Profile) -> None:
    assert late.idle == idle_times(late.schedule.costs, late.spans)
    for spans, idle in zip(late.spans, late.idle, strict=True):
        busy_s = sum(span.end_s - span.start_s for span in spans) - 0.5 * sum(
            a.end_s > b.start_s for a, b in pairwise(spans)
        )
        assert sum(piece.idle_s for piece in idle) + busy_s == pytest.approx(37.5)


def test_notebooks_show_the_picture(tiny: Schedule, late: Profile) -> None:
    assert tiny._repr_svg_() == tiny.svg()
    assert late._repr_svg_() == late.svg()
