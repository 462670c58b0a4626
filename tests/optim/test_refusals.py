"""What `PostValidated` refuses, and that it is an optimizer otherwise."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import zbfx
from tests.support.models import Problem, mlp
from tests.support.optimizers import adamw
from tests.support.reference import compiled
from zbfx.optim import PostValidated


@pytest.fixture(scope="module")
def pipe() -> tuple[Problem, zbfx.Pipeline]:
    problem = mlp(3)
    return problem, compiled(problem, 2, 3)


def test_copies(pipe: tuple[Problem, zbfx.Pipeline]) -> None:
    step = pipe[1].run_local()
    optimizer = PostValidated(adamw(step.parameters()), step)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(zbfx.ZbfxError, match=r"cannot be copied or pickled; save state_dict\(\)"):
            copied(optimizer)


def test_arguments(pipe: tuple[Problem, zbfx.Pipeline]) -> None:
    step = pipe[1].run_local()
    inner, refused = adamw(step.parameters()), pytest.raises
    with refused(zbfx.ZbfxError, match="wraps an optimizer of torch, or a list of them; found list"):
        PostValidated([], step)
    with refused(zbfx.ZbfxError, match=r"the step whose parameters are optimized.*found Sequential"):
        PostValidated(inner, pipe[0].model)  # type: ignore[arg-type]
    with refused(zbfx.ZbfxError, match="max_norm is a number above 0"):
        PostValidated(inner, step, max_norm=0.0)
    for wrong in ("1", -1, float("nan"), True, [1.0], torch.ones(2)):
        with refused(zbfx.ZbfxError, match="max_norm is a number above 0, or None to clip nothing; found"):
            PostValidated(inner, step, max_norm=wrong)  # type: ignore[arg-type]
    with refused(zbfx.ZbfxError, match="sync is True or False; found 'x'"):
        PostValidated(inner, step, sync="x")  # type: ignore[arg-type]
    with refused(zbfx.ZbfxError, match="check_finite is True or False; found 'no'"):
        PostValidated(inner, step, check_finite="no")  # type: ignore[arg-type]
    with refused(zbfx.ZbfxError, match=r"grad_scaler is a torch.amp.GradScaler, or None .*found int 3"):
        PostValidated(inner, step, grad_scaler=3)  # type: ignore[arg-type]
    with refused(zbfx.ZbfxError, match=r"found LBFGS, whose step needs closure\. Use one that steps once"):
        PostValidated(torch.optim.LBFGS(step.parameters()), step)
    with refused(zbfx.ZbfxError, match='rollback is "exact"'):
        PostValidated(inner, step, rollback="inexact")
    with refused(zbfx.ZbfxError, match="needs check_finite=True"):
        PostValidated(inner, step, check_finite=False, grad_scaler=torch.amp.GradScaler("cpu"))
    half = compiled(replace(pipe[0], model=mlp(3).model.half(), inputs=(pipe[0].inputs[0].half(),)), 2, 3).run_local()
    with refused(zbfx.ZbfxError, match="lose small numbers.*compile under torch.autocast"):
        PostValidated(adamw(half.parameters()), half, grad_scaler=torch.amp.GradScaler("cpu"))
    with refused(zbfx.ZbfxError, match="1 parameters of the optimizer are not the pipeline's"):
        PostValidated(adamw([*step.parameters(), torch.nn.Parameter(torch.ones(1))]), step)
    with refused(zbfx.ZbfxError, match="on_nonfinite='drop' checks at the end of every step, which is a barrier"):
        dropping = pipe[1].run_local(on_nonfinite="drop")
        PostValidated(adamw(dropping.parameters()), dropping)
    optimizer = PostValidated(inner, step)
    with refused(zbfx.ZbfxError, match="this step has an optimizer"):
        PostValidated(inner, step)
    with refused(zbfx.ZbfxError, match="wraps an optimizer of torch, or a list of them; found PostValidated"):
        PostValidated(optimizer, step)
    with refused(zbfx.ZbfxError, match="takes no closure"):
        optimizer.step(lambda: None)
    with refused(zbfx.ZbfxError, match="before PostValidated wraps it"):
        optimizer.add_param_group({"params": []})
    for divisor in ("a", "3", None, True, -1.0, float("nan"), float("inf"), torch.ones(2)):
        with refused(zbfx.ZbfxError, match="divide_by is a finite number above 0; found"):
            optimizer.step(divide_by=divisor)  # type: ignore[arg-type]


def test_states_of_others(pipe: tuple[Problem, zbfx.Pipeline]) -> None:
    step = pipe[1].run_local()
    optimizer = PostValidated(adamw(step.parameters()), step)
    before = optimizer.state_dict()
    fewer = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    for wrong, found in (
        ({}, "found an empty dict"),
        ({"model": {}, "optimizer": {}}, "found a dict with the keys model, optimizer"),
        (3, "found int 3"),
        (fewer, r"found \[2\] parameters"),
        ({**fewer, "param_groups": [3]}, "found param_groups list"),
    ):
        expected = r"a dict with 'state' and 'param_groups' of \[12\] parameters"
        with pytest.raises(zbfx.ZbfxError, match=f"{expected}; {found}.* the same rank saved"):
            optimizer.load_state_dict(wrong)  # type: ignore[arg-type]
    assert optimizer.state_dict() == before


def test_it_is_an_optimizer(pipe: tuple[Problem, zbfx.Pipeline]) -> None:
    problem, step = pipe[0], pipe[1].run_local()
    inner = adamw(step.parameters())
    optimizer = PostValidated(inner, step, max_norm=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    hooked: list[Any] = []
    optimizer.register_step_post_hook(lambda *args: hooked.append(args[0]))
    step(*problem.inputs, *problem.targets)
    optimizer.step()
    assert optimizer.pending is not None
    saved = optimizer.state_dict()
    assert optimizer.pending is None  # it settles
    assert hooked == [inner] * len(hooked) != []
    assert saved["state"].keys() == dict.fromkeys(range(12)).keys()
    optimizer.load_state_dict(saved)
    assert all(state["step"] == 1 for state in optimizer.state.values())
    optimizer.zero_grad()
    assert all(p.grad is None for p in step.parameters())


def test_gradients_are_cleared_when_the_verdict_is_known(pipe: tuple[Problem, zbfx.Pipeline]) -> None:
    problem, step = pipe[0], pipe[1].run_local()
    optimizer = PostValidated(adamw(step.parameters()), step, max_norm=0.1)
    step(*problem.inputs, *problem.targets)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert any(p.grad is not None and p.grad.any() for p in step.parameters())
    optimizer.settle()
    assert not any(p.grad is None or p.grad.any() for p in step.parameters())


def test_programs_show_what_travels(pipe: tuple[Problem, zbfx.Pipeline]) -> None:
    step = pipe[1].run_local()
    optimizer = PostValidated(adamw(step.parameters()), step)
    sent = {rank: code.count("ops_send") for rank, code in optimizer.programs.items()}
    assert sent == {0: 1, 1: 0}
    assert "'state>1'" in optimizer.programs[1]
    first, last = (program.code for program in step.engine.pipe.programs)
    assert first.index("'F0.1>1'") < first.index("'verdict>0'") < first.index("self.judge") < first.index("self.B0")
    assert last.index("self.own_verdict()") < last.index("send(transport, 'verdict>0'") < last.index("self.B1")
    assert first.count("receive(transport, 'loss>0')") == last.count("send(transport, 'loss>0'") == 1
    text = str(optimizer.plan())
    assert "with a barrier" in text
    assert "undo copies of" in text


def test_a_failure_in_the_optimizer_reaches_the_caller(pipe: tuple[Problem, zbfx.Pipeline]) -> None:
    problem, step = pipe[0], pipe[1].run_local()
    optimizer = PostValidated(adamw(step.parameters()), step)
    step(*problem.inputs, *problem.targets)
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        optimizer.step()
