"""`pipe.report` of a small model: the cut, the programs, other schedules, a measured step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from zbfx.report import cut_edges

INPUTS, TARGETS = torch.randn(32, 16), torch.randint(10, (32,))


@pytest.fixture(scope="module")
def pipe() -> zbfx.Pipeline:
    layers = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    loss_fn = nn.functional.cross_entropy
    return zbfx.compile(
        nn.Sequential(*layers), stages=2, microbatches=8, schedule="zb-h1", loss_fn=loss_fn, cuts=["4"],
        example_inputs=(INPUTS[:4],), example_targets=TARGETS[:4],
    )  # fmt: skip


def data_of(path: Path) -> Any:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(data)


def test_a_report_has_the_cut_the_programs_and_other_schedules(pipe: zbfx.Pipeline, tmp_path: Path) -> None:
    pipe.report(tmp_path / "r.html")
    data = data_of(tmp_path / "r.html")
    assert data["programs"] == [program.code.strip() for program in pipe.programs]
    assert [view["name"] for view in data["views"]] == ["zb-h1", "gpipe", "1f1b", "zb-h2"]
    assert data["real"], "times are seconds, sizes bytes"
    sent = 4 * 64 * 4  # four rows of 64 float32, both ways
    assert [(e.source, e.target, e.forward_bytes, e.backward_bytes) for e in cut_edges(pipe.stages)] == [
        (0, 1, sent, sent)
    ]
    assert f"<td>{sent:,}</td><td>{sent:,}</td>" in (tmp_path / "r.html").read_text()


def test_a_report_compares_what_it_is_asked_to(pipe: zbfx.Pipeline, tmp_path: Path) -> None:
    pipe.report(tmp_path / "r.html", compare=["gpipe"])
    assert [view["name"] for view in data_of(tmp_path / "r.html")["views"]] == ["zb-h1", "gpipe"]
    with pytest.raises(zbfx.ZbfxError, match="gpip"):
        pipe.report(tmp_path / "r.html", compare=["gpip"])


def test_a_report_has_the_measured_step(pipe: zbfx.Pipeline, tmp_path: Path) -> None:
    profile = pipe.run_local().profile(INPUTS, TARGETS)
    pipe.report(tmp_path / "r.html", profile=profile, compare=[])
    (view,) = data_of(tmp_path / "r.html")["views"]
    assert [lane["name"] for lane in view["lanes"]] == ["plan 0", "step 0", "plan 1", "step 1"]
    assert view["lanes"][1]["actions"] == " ".join(str(span.action) for span in profile.spans[0])
    assert data_of(tmp_path / "r.html")["programs"] == [program.code.strip() for program in pipe.programs]


def test_costs_are_those_of_the_schedule(pipe: zbfx.Pipeline) -> None:
    assert pipe.costs is pipe.schedule.costs
    assert pipe.costs.placement == (0, 1)
