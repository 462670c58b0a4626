"""torch.profiler sees a range for each action of a step, and costs nothing while it is off."""

from __future__ import annotations

from timeit import timeit

import pytest
import torch
from torch import nn

import zbfx
from zbfx.plan import Action, Kind, parts
from zbfx.runtime.runner import NO_RANGE, named_range

INPUTS, TARGETS = torch.randn(12, 8), torch.randn(12, 8)
CHEAP_S = 5e-6  # a launch of an operator takes about as long


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_ranges_are_the_actions_of_the_programs(schedule: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipe = zbfx.compile(
        model, stages=2, microbatches=6, schedule=schedule, loss_fn=nn.functional.mse_loss,
        example_inputs=(INPUTS[:2],), example_targets=TARGETS[:2],
    )  # fmt: skip
    step = pipe.run_local()
    step(INPUTS, TARGETS)
    with torch.profiler.profile(acc_events=True) as profile:
        step(INPUTS, TARGETS)
    names = {str(part) for order in pipe.schedule.ranks for action in order for part in parts(action)}
    ranges = sorted((e for e in profile.events() if e.name in names), key=lambda e: e.time_range.start)
    for rank, order in enumerate(pipe.schedule.ranks):
        found = [Action.parse(e.name) for e in ranges if pipe.costs.placement[Action.parse(e.name).stage] == rank]
        assert found == [part for action in order for part in parts(action)]


def test_no_range_is_made_while_nothing_records() -> None:
    action = Action(Kind.F, 1, 3)
    assert named_range(action) is NO_RANGE
    assert timeit(lambda: named_range(action), number=1000) / 1000 < CHEAP_S
    with torch.profiler.profile(acc_events=True):
        assert named_range(action) is not NO_RANGE
        assert named_range(None) is NO_RANGE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranges_are_those_of_nvtx() -> None:
    with torch.autograd.profiler.emit_nvtx():
        assert named_range(Action(Kind.F, 1, 3)) is not NO_RANGE
