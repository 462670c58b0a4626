"""Training with `PostValidated`, as its tests do it in one process and over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.models import Problem, gpt2, mirrored, mlp
from tests.support.reference import compiled
from zbfx.errors import PipelineFault
from zbfx.optim import PostValidated
from zbfx.runtime import launched

Make = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, maximize=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "no momentum": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.9)),
}
INVERTIBLE = [name for name in OPTIMIZERS if name not in ("amsgrad", "no momentum")]


@dataclass(frozen=True)
class Result:
    """What training leaves: losses, parameters, and the optimizer's state by parameter."""

    losses: list[float]
    parameters: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, int]
    norms: list[float]


def train(
    problem: Problem,
    step: Any,
    steps: int,
    make: Make = adamw,
    *,
    scheduled: bool = False,
    rolled: bool = True,
    rows: Sequence[int | None] = (None,),
    prepare: Callable[[PostValidated], None] = lambda optimizer: None,
    **options: Any,
) -> Result:
    """`scheduled`: with a learning rate that changes after every step; `rolled`: and a batch that does; `rows`: of the
    batch, in turn."""
    optimizer = PostValidated(make(step.parameters()), step, **options)
    prepare(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
    losses, norms = [], []
    for count in range(steps):
        by = count if rolled else 0
        size = rows[count % len(rows)]
        inputs, targets = (tuple(t.roll(by, 0)[:size] for t in group) for group in (problem.inputs, problem.targets))
        losses.append(step(*inputs, *targets).item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if optimizer.verdict is not None:
            norms.append(optimizer.verdict.norm)
    optimizer.settle()
    parameters = {name: p.detach().clone() for name, p in step.named_parameters()}
    state = {name: dict(optimizer.state.get(p, {})) for name, p in step.named_parameters()}
    return Result(losses, parameters, state, asdict(optimizer.counts), norms)


def same_bits(found: Result, expected: Result) -> bool:
    """Losses, parameters and state, bit for bit."""
    assert found.state.keys() == expected.state.keys()
    return str(found.losses) == str(expected.losses) and all(  # a NaN equals a NaN
        torch.equal(found.parameters[name], parameter)
        and found.state[name].keys() == expected.state[name].keys()
        and all(torch.equal(torch.as_tensor(found.state[name][k]), torch.as_tensor(v)) for k, v in state.items())
        for (name, parameter), state in zip(expected.parameters.items(), expected.state.values(), strict=True)
    )


def optimizer_ranks(rank: int) -> dict[str, Any]:
    """Training over processes, with and without a barrier: the norm lies between what two ranks know, so that some step
    early and are wrong. What is loaded before messages, as on GPUs, changes nothing."""
    launched.LOADS = ("cpu",)
    world = dist.get_world_size()
    results: dict[str, Any] = {}
    for name, schedule, max_norm in (("clips", "zb-h1", 0.1), ("h2", "zb-h2", 0.1), ("free", "1f1b", 10.0)):
        for sync in (True, False):
            problem = mlp(5)
            step = compiled(problem, world, 5, schedule=schedule).bind()
            results[f"{name} {sync}"] = asdict(train(problem, step, 8, max_norm=max_norm, sync=sync, scheduled=True))
    for sync in (True, False):
        problem = mirrored(9)
        step = compiled(problem, world, 6).bind(on_new_shape="symbolic")
        results[f"skips {sync}"] = asdict(train(problem, step, 4, max_norm=1e-3, sync=sync, rows=(18, 12)))
    problem = gpt2(4)
    results["tied"] = asdict(train(problem, compiled(problem, world, 4).bind(), 4, max_norm=0.5))
    alone = gpt2(4)
    results["tied local"] = asdict(train(alone, compiled(alone, world, 4).run_local(), 4, max_norm=0.5, sync=True))
    results["nan"] = not_finite(world)
    results["fault"] = failing(rank, world)
    return results


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


class Failing(torch.optim.SGD):
    """Fails in its second step."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if any(self.state.values()):
            raise ArithmeticError("on purpose")
        return super().step(*args, **kwargs)


def failing(rank: int, world: int) -> str:
    """What each rank hears where the first one of the chain fails after it has passed its state on, and lives on."""
    problem = mlp(5)
    step = compiled(problem, world, 5).bind()
    make = Failing if rank == 0 else torch.optim.SGD
    optimizer = PostValidated(make(step.parameters(), lr=0.01, momentum=0.9), step, max_norm=10.0)
    try:
        for _ in range(5):
            step(*problem.inputs, *problem.targets)
            optimizer.step()
    except PipelineFault as error:
        dist.barrier()
        return str(error)
    return ""


def not_finite(world: int) -> dict[str, Any]:
    """Three steps, the second of which has a NaN in its input."""
    problem = mlp(5)
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
