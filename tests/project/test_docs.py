"""The Python of docs/schedules.md and docs/optimizer.md runs; a family is as short as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import blocks
from zbfx.schedule import names
from zbfx.schedule.orders.registry import GENERATORS, SHAPES

PAGE = "docs/schedules.md"


def test_a_family_in_thirty_lines_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(PAGE, "python")
    assert len(code.splitlines()) <= 30
    before = names()
    try:
        exec(compile(code, PAGE, "exec"), {})
        assert set(names()) - set(before) == {"v-eager"}
    finally:
        GENERATORS.pop("v-eager", None)
        SHAPES.pop("v-eager", None)
    rate, peak, limit = re.match(r"(\S+) in (\S+) of (\S+),", capsys.readouterr().out).groups()  # type: ignore[union-attr]
    assert 0 < float(rate) < 0.35
    assert float(peak) <= float(limit) == 16


def test_averages_and_several_optimizers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks("docs/optimizer.md", "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/optimizer.md", "exec"), {})
    assert capsys.readouterr().out.startswith("5 gradient norm 0.")
    assert (tmp_path / "run" / "step-5").is_dir()
