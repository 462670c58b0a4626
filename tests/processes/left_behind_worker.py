"""Scenarios of models whose trained values are on several ranks, for test_left_behind.py: functions of the rank."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.processes.replicas_worker import M, alone, mesh_of, part
from tests.processes.worker import normed, refusal, run
from tests.support.models import gpt2, mlp
from tests.support.reference import compiled


def asked(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Every way to ask a model for its values."""
    return {
        "state_dict": model.state_dict,
        "of a part": next(model.children()).state_dict,
        "of a whole around it": nn.Sequential(model).state_dict,
        "deepcopy": lambda: copy.deepcopy(model),
        "save": lambda: torch.save(model, io.BytesIO()),
        "averaged": lambda: AveragedModel(model),
    }


def told(model: nn.Module) -> dict[str, str]:
    """What each of these ways is refused with; "" where it works."""
    return {name: refusal(action)["text"] for name, action in asked(model).items()}


def asked_for(rank: int) -> dict[str, Any]:
    """Before a step, after it, after the whole was loaded, after another step, and once the pipeline is closed."""
    problem = normed()
    step = compiled(problem, 2, 3, cuts=["2"]).bind()
    found: dict[str, Any] = {"before": told(problem.model)}
    found["run before"] = refusal(lambda: problem.model.eval()(*problem.inputs))["text"]
    problem.model.train()
    losses = run(step, problem, 1)["losses"]
    found["trained"] = told(problem.model)
    own = problem.model.get_submodule("0" if rank == 0 else "3")
    found["own"] = refusal(own.state_dict)["text"]
    values = {name: tensor.clone() for name, tensor in problem.model.named_parameters()}
    values |= {name: tensor.clone() for name, tensor in problem.model.named_buffers()}
    found["run"] = {
        "whole": refusal(lambda: problem.model(*problem.inputs))["text"],
        "part": refusal(lambda: own(*problem.inputs))["text"],
        "with values": refusal(lambda: torch.func.functional_call(problem.model, values, problem.inputs))["text"],
    }
    problem.model.load_state_dict(state := step.full_state_dict(everywhere=True))
    found["loaded"] = told(problem.model)
    found["run"]["loaded"] = refusal(lambda: copy.deepcopy(problem.model)(*problem.inputs))["text"]
    found["run"]["loaded itself"] = refusal(lambda: problem.model.eval()(*problem.inputs))["text"]
    problem.model.train()
    found["evaluated"] = step.evaluate(*problem.inputs, *problem.targets).item()
    found["same"] = all(torch.equal(value, state[name]) for name, value in problem.model.state_dict().items())
    found["copied"] = told(copy.deepcopy(problem.model))
    losses += run(step, problem, 1)["losses"]
    found["trained on"] = told(problem.model)
    step.close()
    found["closed"] = told(problem.model)
    return found | {"losses": losses}


def bound_again(rank: int) -> dict[str, Any]:
    """After training under one cut: another cut, the same one, in one process, and another once the whole is loaded."""
    problem, found = mlp(3), dict[str, Any]()
    plain = alone(mlp(3), 3)["losses"]
    first = compiled(problem, 2, 3, cuts=["4"], check=False)
    other = compiled(problem, 2, 3, cuts=["8"], check=False)
    other.bind().close()  # without a step nothing is left behind
    step = first.bind()
    step(*problem.inputs, *problem.targets)  # gradients alone: no value has changed
    for pipe in (other, first, other):  # each trains what the one before it has left behind
        problem.model.zero_grad()
        step.close()
        step = pipe.bind()
        step(*problem.inputs, *problem.targets)
    problem.model.zero_grad()
    step.close()
    step = first.bind()
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=1e-2)  # made before bind, of all parameters
    losses = [step(*problem.inputs, *problem.targets).item()]
    optimizer.step()
    optimizer.zero_grad()
    found["other"] = refusal(other.bind)
    found["local"] = refusal(other.run_local)["text"]
    found["same"] = refusal(lambda: first.bind().close())["text"]
    problem.model.load_state_dict(step.full_state_dict(everywhere=True))
    step = other.bind()
    losses.append(step(*problem.inputs, *problem.targets).item())
    return found | {"losses": losses, "plain": plain}


def tied(rank: int) -> dict[str, Any]:
    """A weight that the first and the last rank have: a state_dict names it twice."""
    problem = gpt2(3)
    step = compiled(problem, 2, 3).bind()
    run(step, problem, 1)
    found = told(problem.model)
    problem.model.load_state_dict(step.full_state_dict(everywhere=True))
    return found | {"loaded": refusal(problem.model.state_dict)["text"]}


def averaged(rank: int) -> dict[str, Any]:
    """An average over steps of what this rank has, beside that of a model in one process."""
    problem, plain = mlp(3), mlp(3)
    step = compiled(problem, 2, 3, check=False).bind()
    kind = get_ema_multi_avg_fn(0.5)
    own = AveragedModel(nn.ParameterList(step.parameters()), multi_avg_fn=kind)
    expected = AveragedModel(plain.model, multi_avg_fn=kind)
    pairs = [
        (problem, step, step.parameters(), lambda: own.update_parameters(nn.ParameterList(step.parameters()))),
        (plain, None, plain.model.parameters(), lambda: expected.update_parameters(plain.model)),
    ]
    for one, runs, parameters, update in pairs:
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        for _ in range(3):
            if runs is None:
                nn.functional.mse_loss(one.model(*one.inputs), *one.targets).backward()
            else:
                runs(*one.inputs, *one.targets)
            optimizer.step()
            optimizer.zero_grad()
            update()
    wanted: dict[str, Any] = dict(expected.module.named_parameters())
    found = zip(dict(step.named_parameters()), own.module.parameters(), strict=True)
    return {name: (value - wanted[name]).abs().max().item() for name, value in found}


def unsettled(rank: int) -> dict[str, Any]:
    """One rank, whose own values wait for a verdict, or for the shards of other replicas."""
    found: dict[str, Any] = {}
    problem = mlp(2 * M)
    step = compiled(part(problem, 0, 2), 1, M, check=False).bind(mesh_of(2, 1), zero=1)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    for case in ("bound", "stepped", "collected", "run"):
        if case == "stepped":
            step(*part(problem, rank, 2).inputs, *part(problem, rank, 2).targets)
            optimizer.step()
        if case == "collected":
            step.collect()
        if case == "run":
            optimizer.step()
            step(*part(problem, rank, 2).inputs, *part(problem, rank, 2).targets)
        found[case] = refusal(problem.model.state_dict)["text"]
    step.close()
    return found
