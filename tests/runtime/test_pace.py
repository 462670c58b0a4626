"""How long actions take, since when one takes longer, and an order for what they take now."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.models import mlp
from tests.support.reference import compiled, default_dtype
from zbfx.errors import ZbfxError
from zbfx.optim import PostValidated
from zbfx.plan import Action, Kind, Span
from zbfx.runtime.pace import LOADING_STEPS, RECENT, Drift, Pace
from zbfx.runtime.timeline import Profile
from zbfx.schedule.planner import build
from zbfx.variants import costs_of_seconds

SECONDS = {Kind.F: 2.0, Kind.B: 3.0, Kind.W: 5.0}


def after(pace: Pace, seconds: list[float], first: int = 1) -> list[Drift]:
    """The drifts that are found in steps in which B of stage 1 takes so long, in two pieces, and F 1 ms."""
    found = []
    for number, second in enumerate(seconds, first):
        pace.add(Action(Kind.F, 1, 0), 1e-3)
        for microbatch in range(2):
            pace.add(Action(Kind.B, 1, microbatch), second / 4)
            pace.add(Action(Kind.B, 1, microbatch), second * 3 / 4)
        found += pace.end_step(number)
    return found


def test_a_drift_is_found_once_with_its_first_step_and_forgotten_when_it_is_over() -> None:
    pace = Pace(1)
    assert after(pace, [9.0] * LOADING_STEPS + [1e-3] * (3 * RECENT - LOADING_STEPS)) == []
    assert pace.seconds == {(Kind.F, 1): 1e-3, (Kind.B, 1): 1e-3}
    first = 3 * RECENT + 1
    (drift,) = after(pace, [1e-3, *[2e-3] * (2 * RECENT - 1)], first)
    assert (drift.rank, drift.kind, drift.stage, drift.since_step) == (1, Kind.B, 1, first + 1)
    assert str(drift) == "B of stage 1 takes 2 ms since step 26, 1 ms before"
    assert list(pace.drifts.values()) == [drift]
    assert after(pace, [1e-3] * RECENT, first + 2 * RECENT) == []
    assert not pace.drifts


def test_single_slow_steps_and_microseconds_are_no_drift() -> None:
    assert after(Pace(0), [1e-3] * 3 * RECENT + [1e-3, *[5e-3] * (RECENT - 1)] * 2) == []
    assert after(Pace(0), [1e-5] * 3 * RECENT + [5e-5] * 2 * RECENT) == []


def measured(step: Any, factors: tuple[float, ...]) -> Profile:
    """A profile in which the actions of each stage take so many times `SECONDS`."""
    schedule = step.engine.pipe.schedule
    return Profile(
        schedule,
        tuple(
            tuple(Span(s.action, 0.0, SECONDS[s.action.kind] * factors[s.action.stage]) for s in spans)
            for spans in schedule.spans
        ),
    )


def test_replan_moves_the_order_to_measured_seconds_and_keeps_what_is_computed() -> None:
    with default_dtype(torch.float64):
        problem = mlp(6)
        batch = (*problem.inputs, *problem.targets)
        other = replace(problem, model=copy.deepcopy(problem.model))
        steps = [compiled(p, 3, 6, schedule="auto", check=False).run_local() for p in (problem, other)]
        optimizers = [PostValidated(torch.optim.AdamW(step.parameters(), lr=1e-2), step) for step in steps]
        losses: list[list[float]] = [[], []]
        for count in range(4):
            if count == 2:
                before = steps[1].engine.pipe.schedule
                found = measured(steps[1], (3.0, 1.0, 1.0))
                assert steps[1].replan(found)
                assert not steps[1].replan(found)
            for step, optimizer, own in zip(steps, optimizers, losses, strict=True):
                own.append(step(*batch).item())
                optimizer.step()
                optimizer.zero_grad()
        costs, ranks = costs_of_seconds(before.costs, found.seconds), steps[1].pipelines[0].schedule.ranks
        assert [stage.seconds(Kind.W) for stage in costs.stages] == [15.0, 5.0, 5.0]
        assert build("now", costs, 6, ranks).makespan_s < build("before", costs, 6, before.ranks).makespan_s
        assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-12, atol=0)


def test_an_order_that_is_as_fast_stays() -> None:
    problem = mlp(3)
    step = compiled(problem, 2, 3, schedule="zb-h1", check=False).run_local()
    with pytest.raises(ZbfxError, match="nothing has been measured: replan follows some training steps"):
        step.replan()
    before = step.engine
    for _ in range(LOADING_STEPS + 1):
        step(*problem.inputs, *problem.targets)
    assert not step.replan()
    assert step.engine is before
    assert set(step.pace[1].seconds) == {(kind, 1) for kind in (Kind.F, Kind.B, Kind.W)}
