"""Scenarios of precision, for tests of tests/numerics: functions of the rank, see tests/support/pool.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from tests.processes.replicas_worker import M, mesh_of, part
from tests.support.models import Problem, mlp
from tests.support.reference import compiled, reference, relative_error

STEPS = 3


def narrow_mlp(microbatches: int) -> Problem:
    problem = mlp(microbatches)
    inputs, targets = (tuple(t.bfloat16() for t in group) for group in (problem.inputs, problem.targets))
    return replace(problem, model=problem.model.bfloat16(), inputs=inputs, targets=targets)


def gradients_of(step: Any) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in step.named_parameters()}


def replicas_with_float32_gradients(rank: int) -> dict[int, Any]:
    """By stage of ZeRO: the largest error of the first step's gradients beside torch's own, whether parameters after
    some steps are torch's but for rounding, and the dtypes of what the optimizer steps."""
    results: dict[int, Any] = {}
    whole, mesh, replica = narrow_mlp(2 * M), mesh_of(2, 2), rank // 2
    initial = copy.deepcopy(whole.model.state_dict())
    twin = copy.deepcopy(whole)
    for parameter in twin.model.parameters():
        parameter.grad_dtype = torch.float32
    plainly = torch.optim.SGD(twin.model.parameters(), lr=0.1, momentum=0.9)
    first: dict[str, Any] = {}
    for _ in range(STEPS):
        reference(twin, 2 * M, twin.model)
        first = first or {name: p.grad.clone() for name, p in twin.model.named_parameters() if p.grad is not None}
        plainly.step()
        plainly.zero_grad()
    pipe = compiled(part(whole, 0, 2), 2, M, grad_dtype=torch.float32)
    own = part(whole, replica, 2)
    for zero in (0, 1):
        pipe.model.load_state_dict(initial)
        step = pipe.bind(mesh, zero=zero)
        optimizer = torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9)
        errors = [0.0]
        for count in range(STEPS):
            step(*own.inputs, *own.targets)
            if count == 0 and not zero:
                errors += [relative_error(g, first[name]) for name, g in gradients_of(step).items()]
            dtypes = {(p.dtype, p.grad.dtype) for p in step.parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        step.collect()
        agree = all(
            torch.allclose(p, twin.model.get_parameter(name), rtol=2e-2, atol=2e-3)
            for name, p in step.engine.runners[0].parameters.items()
        )
        results[zero] = (max(errors), agree, dtypes)
        step.close()
    return results


def replicas_of_masters(rank: int) -> dict[int, Any]:
    """By stage of ZeRO: the losses of training steps under autocast, those of evaluations after each, and what one
    process with all batches has before the first step and after each."""
    results: dict[int, Any] = {}
    whole, mesh, replica = mlp(2 * M), mesh_of(2, 2), rank // 2
    initial = copy.deepcopy(whole.model.state_dict())
    twin = copy.deepcopy(whole)
    plainly = torch.optim.SGD(twin.model.parameters(), lr=0.5)
    expected = []
    for _ in range(STEPS + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            expected.append(float(reference(twin, 2 * M, twin.model)[0]))
        plainly.step()
        plainly.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe = compiled(part(whole, 0, 2), 2, M)
    own = part(whole, replica, 2)
    for zero in (0, 1):
        pipe.model.load_state_dict(initial)
        step = pipe.bind(mesh, zero=zero)
        optimizer = torch.optim.SGD(step.parameters(), lr=0.5)
        losses, evaluated = [], []
        for _ in range(STEPS):
            losses.append(float(step(*own.inputs, *own.targets)))
            optimizer.step()
            optimizer.zero_grad()
            evaluated.append(float(step.evaluate(*own.inputs, *own.targets)))
        results[zero] = losses, evaluated, expected
        step.close()
    return results
