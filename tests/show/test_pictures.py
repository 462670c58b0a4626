"""SVG, HTML and Chrome trace of a tiny schedule, by value."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zbfx.plan import CostTable, Span, StageCost
from zbfx.runtime.timeline import Profile
from zbfx.schedule import plan
from zbfx.schedule.schedule import Schedule
from zbfx.show.chrome_trace import chrome_trace
from zbfx.show.svg import FILLS, LEFT_PX, MEMORY_PX, busy_s

NAMESPACE = "{http://www.w3.org/2000/svg}"
STAGE = StageCost(2, 3, 5, saved_bytes=4, weight_saved_bytes=1)


@pytest.fixture
def tiny() -> Schedule:
    orders = ["F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 B1.0 F1.1 B1.1 W1.0 W1.1"]
    return plan(CostTable.chain([STAGE, STAGE], 7), 2, schedule=orders)


def test_svg_places_every_action_to_scale(tiny: Schedule) -> None:
    root = ElementTree.fromstring(tiny.svg())
    rects = {
        title.text: rect
        for rect in root.iter(f"{NAMESPACE}rect")
        for title in rect.iter(f"{NAMESPACE}title")
        if rect.get("class") == "action"
    }
    assert len(rects) == 12
    per_second = (1400 - LEFT_PX - 8) / 37
    rect = rects["B1.1: 16 to 19"]
    assert float(rect.get("x", "")) == pytest.approx(LEFT_PX + 16 * per_second, abs=0.01)
    assert float(rect.get("width", "")) == pytest.approx(3 * per_second, abs=0.01)
    assert rect.get("fill") == next(fill for kind, fill in FILLS.items() if kind.value == "B")


def test_svg_memory_strip_peaks_where_the_rank_holds_most(tiny: Schedule) -> None:
    strips = [e for e in ElementTree.fromstring(tiny.svg()).iter(f"{NAMESPACE}polygon") if e.get("class") == "memory"]
    heights = []
    for strip in strips:
        levels = [float(point.split(",")[1]) for point in strip.get("points", "").split()]
        heights.append(max(levels) - min(levels))
    assert heights == pytest.approx([MEMORY_PX - 2, (MEMORY_PX - 2) * 5 / 8], abs=0.02)


def test_html_is_one_file_that_names_every_action(tiny: Schedule) -> None:
    page = tiny.html()
    assert page.count('class="action"') == 12
    assert "<title>W0.1: 32 to 37</title>" in page
    assert "src=" not in page
    assert "href=" not in page
    assert busy_s(tiny, 0) == 20


def test_html_escapes_the_name() -> None:
    schedule = plan(CostTable.chain([STAGE]), 1, schedule=["F0.0 BW0.0"])
    object.__setattr__(schedule, "name", "<b>")
    assert "<b>" not in schedule.html()
    assert "&lt;b&gt;" in schedule.html()


def test_trace_has_times_in_microseconds(tiny: Schedule, tmp_path: Path) -> None:
    tiny.trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    actions = {event["name"]: event for event in events if event["ph"] == "X"}
    assert len(actions) == 12
    assert (actions["B1.1"]["ts"], actions["B1.1"]["dur"], actions["B1.1"]["tid"]) == (16e6, 3e6, 1)
    assert actions["B1.1"]["args"] == {"stage": 1, "microbatch": 1}


def test_trace_counts_memory(tiny: Schedule) -> None:
    events = json.loads(chrome_trace(tiny))["traceEvents"]
    held = [(e["ts"] / 1e6, e["args"]["bytes"]) for e in events if e["ph"] == "C" and e["name"].endswith("rank 0")]
    assert held == [(0, 0), (0, 4), (2, 8), (24, 5), (29, 4), (32, 1), (37, 0)]


def test_a_measured_step_lies_below_its_plan_on_one_scale(tiny: Schedule) -> None:
    late = tuple(tuple(Span(span.action, span.start_s + 1, span.end_s + 1.5) for span in spans) for spans in tiny.spans)
    root = ElementTree.fromstring(Profile(tiny, late).svg())
    assert [text.text for text in root.iter(f"{NAMESPACE}text") if text.get("x") == "4"][1:] == [
        "plan 0",
        "step 0",
        "plan 1",
        "step 1",
    ]
    rects = {title.text: rect for rect in root.iter(f"{NAMESPACE}rect") for title in rect.iter(f"{NAMESPACE}title")}
    assert len(rects) == 24
    per_second = (1400 - LEFT_PX - 8) / 38.5
    planned, measured = rects["B1.1: 16 to 19"], rects["B1.1: 17 to 20.5"]
    assert float(planned.get("x", "")) == pytest.approx(LEFT_PX + 16 * per_second, abs=0.01)
    assert float(measured.get("x", "")) == pytest.approx(LEFT_PX + 17 * per_second, abs=0.01)
    assert float(measured.get("width", "")) == pytest.approx(3.5 * per_second, abs=0.01)
    assert float(measured.get("y", "")) > float(planned.get("y", ""))
