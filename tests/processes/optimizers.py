"""Scenarios of optimizer steps without a barrier, for test_optimizers.py: functions of the rank, see
tests/support/pool.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.models import gpt2, mirrored, mlp
from tests.support.optimizers import adamw, train
from tests.support.reference import compiled
from zbfx.errors import PipelineFault
from zbfx.optim import PostValidated
from zbfx.runtime import captured
from zbfx.testing.faults import OPTIMIZER, Raise, injected


@contextmanager
def loads() -> Iterator[None]:
    """What is loaded before messages, as on GPUs, changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "LOADS", ("cpu",))
        yield


@loads()
def with_and_without_barrier(rank: int, schedule: str, max_norm: float) -> dict[bool, dict[str, Any]]:
    """By `sync`. A norm of 0.1 lies between what two ranks know, so that some step early and are wrong."""
    problem = mlp(5)
    pipe, start = compiled(problem, dist.get_world_size(), 5, schedule=schedule), mlp(5).model.state_dict()
    results: dict[bool, dict[str, Any]] = {}
    for sync in (True, False):
        problem.model.load_state_dict(start)
        results[sync] = asdict(train(problem, pipe.bind(), 8, max_norm=max_norm, sync=sync, scheduled=True))
    return results


@loads()
def with_skip_connections(rank: int) -> dict[bool, dict[str, Any]]:
    problem = mirrored(9)
    pipe, start = compiled(problem, dist.get_world_size(), 6), mirrored(9).model.state_dict()
    results: dict[bool, dict[str, Any]] = {}
    for sync in (True, False):
        problem.model.load_state_dict(start)
        step = pipe.bind(on_new_shape="symbolic")
        results[sync] = asdict(train(problem, step, 4, max_norm=1e-3, sync=sync, rows=(18, 12)))
    return results


@loads()
def tied_weights(rank: int) -> dict[str, Any]:
    """Over processes, and all in one."""
    problem = gpt2(4)
    pipe = compiled(problem, dist.get_world_size(), 4)
    found = train(problem, pipe.bind(), 4, max_norm=0.5)
    problem.model.load_state_dict(gpt2(4).model.state_dict())
    local = train(problem, pipe.run_local(), 4, max_norm=0.5, sync=True)
    return {"ranks": asdict(found), "local": asdict(local)}


def replicated_ranks(rank: int) -> dict[str, Any]:
    """Two replicas of two ranks, each with its part of the batch, and one process with all of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    results: dict[str, Any] = {}
    for max_norm in (0.1, 10.0):
        for sync in (True, False):
            problem = mlp(6)
            rows = problem.inputs[0].shape[0] // 2
            half = slice(rank // 2 * rows, (rank // 2 + 1) * rows)
            part = replace(problem, inputs=(problem.inputs[0][half],), targets=(problem.targets[0][half],))
            step = compiled(part, 2, 3).bind(mesh)
            results[f"{max_norm} {sync}"] = asdict(train(part, step, 6, max_norm=max_norm, sync=sync, rolled=False))
        whole = mlp(6)
        alone = train(whole, compiled(whole, 2, 6).run_local(), 6, max_norm=max_norm, sync=True, rolled=False)
        results[f"{max_norm} alone"] = asdict(alone)
    return results


@loads()
def failing(rank: int) -> str:
    """What each rank hears where the first one of the chain fails, in its second step, after it has passed its state
    on, and lives on."""
    problem, world = mlp(5), dist.get_world_size()
    step = compiled(problem, world, 5).bind()
    inner = torch.optim.SGD(step.parameters(), lr=0.01, momentum=0.9)
    optimizer = PostValidated(inner, step, max_norm=10.0)
    try:
        with injected(Raise(), OPTIMIZER, rank=0, after=1):
            for _ in range(5):
                step(*problem.inputs, *problem.targets)
                optimizer.step()
    except PipelineFault as error:
        dist.barrier()
        return str(error)
    return ""


@loads()
def not_finite(rank: int) -> dict[str, Any]:
    """Three steps, the second of which has a NaN in its input."""
    problem, world = mlp(5), dist.get_world_size()
    pipe = compiled(problem, world, 5)
    step = pipe.bind()
    optimizer = PostValidated(adamw(step.parameters()), step, max_norm=0.1)
    step(*problem.inputs, *problem.targets)
    optimizer.step()
    optimizer.settle()
    before = [p.detach().clone() for p in step.parameters()]
    bad = problem.inputs[0].clone()
    bad[2 * 3] = float("nan")
    optimizer.zero_grad()
    step(bad, *problem.targets)
    optimizer.step()
    optimizer.zero_grad()
    later = step(*problem.inputs, *problem.targets)
    cause = str(optimizer.verdict)
    same = all(torch.equal(a, b) for a, b in zip(before, step.parameters(), strict=True))
    optimizer.step()
    optimizer.settle()
    return {"cause": cause, "kept": same, "later": later.item(), "counts": asdict(optimizer.counts)}
