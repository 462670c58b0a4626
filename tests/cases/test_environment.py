"""Compilers, checkpoints, solvers, packaging. (Cases 70 and 74 run over processes.)"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases.common import TOLERANCE, WIDTH, layers
from tests.support.models import Problem, numbers, squares
from tests.support.reference import assert_same, compiled, reference, stepped
from zbfx import NoFeasibleSchedule, ZbfxError
from zbfx.plan import CostTable, Edge, StageCost
from zbfx.runtime.step import Step
from zbfx.schedule import check, plan


def problem_of(model: nn.Module) -> Problem:
    return Problem(model, squares, (numbers(6, WIDTH),))


def test_case_69_compiled_module_is_refused_and_phases_are_compiled_instead() -> None:
    model = layers(3)
    wrapped: Any = torch.compile(model, backend="aot_eager")
    wrapped(numbers(2, WIDTH)).sum().backward()  # a full backward first
    model.zero_grad()
    with pytest.raises(ZbfxError, match="backend='inductor'"):
        compiled(problem_of(wrapped), 2, 3)
    assert_same(
        stepped(problem_of(model), compiled(problem_of(model), 2, 3)), reference(problem_of(model), 3), TOLERANCE
    )


def test_case_71_parameters_do_not_depend_on_the_number_of_ranks() -> None:
    """Each stage trains the parameters of the model that was given, under its names."""
    expected = {name: p.detach().clone() for name, p in layers(4).named_parameters()}
    for ranks in (1, 2, 4):
        problem = problem_of(layers(4))
        step = compiled(problem, ranks, 3).run_local()
        held = {name: p for runner in step.engine.runners for name, p in runner.parameters.items()}
        assert held.keys() == expected.keys()
        assert all(torch.equal(parameter, expected[name]) for name, parameter in held.items())
        assert len({p.detach().numpy().tobytes() for p in held.values()}) == len(held)  # no two alike


def optimizers(step: Step) -> list[dict[str, Any]]:
    """One AdamW per rank, over the rank's parameters by name."""
    return [
        {"names": list(runner.parameters), "adam": torch.optim.AdamW(runner.parameters.values(), lr=1e-2)}
        for runner in step.engine.runners
    ]


def train(step: Step, ranks: list[dict[str, Any]], problem: Problem, steps: range) -> list[Tensor]:
    losses = []
    for count in steps:
        for rank in ranks:
            rank["adam"].zero_grad()
        losses.append(step(problem.inputs[0].roll(count, 0)))
        for rank in ranks:
            rank["adam"].step()
    return losses


@pytest.mark.parametrize("later", [1, 4])
def test_case_73_resume_with_another_number_of_ranks(later: int) -> None:
    """Three steps on two ranks, saved by name, three more on `later`: the losses of six on two."""
    problem = problem_of(layers(4))
    step = compiled(problem, 2, 3).run_local()
    ranks = optimizers(step)
    train(step, ranks, problem, range(3))
    saved = copy.deepcopy(problem.model.state_dict())
    moments = {
        name: copy.deepcopy(rank["adam"].state_dict()["state"][k])
        for rank in ranks
        for k, name in enumerate(rank["names"])
    }
    expected = train(step, ranks, problem, range(3, 6))

    resumed = problem_of(layers(4))
    resumed.model.load_state_dict(saved)
    step = compiled(resumed, later, 3, cuts=["2", "4", "6"][: later - 1]).run_local()
    ranks = optimizers(step)
    for rank in ranks:
        state = {k: moments[name] for k, name in enumerate(rank["names"])}
        rank["adam"].load_state_dict({**rank["adam"].state_dict(), "state": state})
    assert torch.equal(torch.stack(train(step, ranks, resumed, range(3, 6))), torch.stack(expected))


def table(ranks: int) -> CostTable:
    stages = tuple(StageCost(2, 3, 5, 4, 1) for _ in range(ranks))
    return CostTable(stages, tuple(Edge(k, k + 1, 7, 7) for k in range(ranks - 1)), tuple(range(ranks)))


def test_case_76_solver_is_bounded_and_never_believed() -> None:
    costs = table(8)
    begun = time.monotonic()
    found = plan(costs, 32, schedule="ilp", budget_s=1.0)
    assert time.monotonic() - begun < 15.0
    assert found.search_s < 15.0
    again = check(costs, 32, found.ranks, None)
    assert found.spans == again.spans
    assert 32 * 10 <= found.lower_bound_s <= found.iteration_s <= plan(costs, 32, schedule="1f1b").iteration_s
    with pytest.raises(NoFeasibleSchedule) as caught:
        plan(costs, 32, schedule="ilp", mem_limit=3, budget_s=1.0)
    assert caught.value.smallest_limit == 4
    assert plan(costs, 2, schedule="auto", mem_limit=4, budget_s=1.0).peak_bytes == (4.0,) * 8


def test_case_77_plans_without_python_mip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mip", None)
    problem = problem_of(layers(3))
    assert_same(stepped(problem, compiled(problem, 2, 3, schedule="auto")), reference(problem, 3), TOLERANCE)
