"""Page and playground in headless Chromium: no error, hover and zoom work, labels have room, much pans smoothly.

Needs playwright and chromium, which zbfx does not install: pip install playwright, and a chromium on the path.
pytest tests/show/test_browser.py
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest

from zbfx.plan import CostTable, StageCost
from zbfx.playground import LOOPBACK, server
from zbfx.schedule import plan
from zbfx.show.page import Subject, page

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

OPENED_S, FRAMES_PER_S = 3.0, 30.0
DRAWN = "() => views[0].visible && !waiting"
PAN = """async scale => {
  const times = [];
  for (let i = 0, last = performance.now(); i < 60; i++) {
    moved(d3.zoomIdentity.translate(-(scale - 1) * views[0].width * (0.2 + 0.01 * i), 0).scale(scale));
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  return times;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, path: Path, width: int) -> tuple[Any, list[str]]:
    """The page, drawn, and a list that grows with its errors."""
    tab, errors = new_tab(browser, width)
    tab.goto(path.as_uri())
    tab.wait_for_function(DRAWN)
    return tab, errors


def new_tab(browser: Any, width: int) -> tuple[Any, list[str]]:
    """A tab, and a list that grows with its errors."""
    errors: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    return tab, errors


@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_shows_zooms_and_answers(browser: Any, tmp_path: Path, width: int) -> None:
    costs = CostTable.chain([StageCost(2, 3, 5, 4, 1)] * 4, 7)
    schedule = plan(costs, 8, schedule="zb-h1", mem_limit="1x")
    others = (plan(costs, 8, schedule="1f1b"),)
    path = tmp_path / "page.html"
    path.write_text(page(Subject(schedule, programs=("rank 0's", "rank 1's", "2", "3"), compared=others)))
    tab, errors = opened(browser, path, width)
    box = tab.query_selector("#view-plan canvas").bounding_box()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls down alone"

    span = schedule.spans[1][0]
    at = tab.evaluate(f"[scaleOf(views[0])({span.start_s + 1}), views[0].lanes[1].top + 9]")
    tab.mouse.move(box["x"] + at[0], box["y"] + at[1])
    tab.wait_for_function("document.getElementById('tip').style.display === 'block'")
    assert tab.inner_text("#tip").splitlines()[:2] == ["F1.0 on rank 1", "9 to 11 (2)"]

    tab.keyboard.down("Control")
    for _ in range(3):
        tab.mouse.wheel(0, -300)
    tab.keyboard.up("Control")
    tab.wait_for_function("transform.k > 2")
    before = tab.evaluate("scaleOf(views[1]).domain()")
    tab.mouse.down()
    tab.mouse.move(box["x"] + at[0] - 40, box["y"] + at[1], steps=4)
    tab.mouse.up()
    after = tab.evaluate("scaleOf(views[1]).domain()")
    assert after[0] > before[0], "what is dragged to the left shows what comes later, in all timelines"
    assert tab.evaluate("parseFloat(getComputedStyle(document.querySelector('.tick text')).fontSize)") >= 10
    tab.click("[data-zoom='0']")
    assert tab.evaluate("transform.k") == 1
    tab.mouse.click(box["x"] + at[0], box["y"] + at[1])
    assert tab.inner_text("#program") == "rank 1's"
    tab.check("#messages")
    tab.wait_for_function(DRAWN)
    assert errors == []


def test_24576_actions_open_and_pan_smoothly(browser: Any, tmp_path: Path) -> None:
    schedule = plan(CostTable.chain([StageCost(1.1, 1.3, 1.7, 2, 1)] * 32, 0.37), 256, schedule="zb-h1")
    path = tmp_path / "page.html"
    path.write_text(page(Subject(schedule)))
    begun = perf_counter()
    tab, errors = opened(browser, path, 1280)
    assert perf_counter() - begun < OPENED_S
    for scale in (4, 32):
        frames = tab.evaluate(PAN, scale)
        assert 1000 / median(frames) >= FRAMES_PER_S, scale
    assert errors == []


@pytest.mark.parametrize("width", [1280, 390])
def test_sliders_of_the_playground_are_answered(browser: Any, width: int) -> None:
    tab, errors = new_tab(browser, width)
    with server(0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        tab.goto(f"http://{LOOPBACK}:{serving.server_address[1]}/")
        inside = tab.frame_locator("#page")
        inside.get_by_text("iteration time 27").first.wait_for()
        tab.get_by_label("microbatches m").fill("16")
        inside.get_by_text("iteration time 51").first.wait_for()
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        tab.close()
        serving.shutdown()
        thread.join()
    assert errors == []
