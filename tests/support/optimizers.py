"""Training with `PostValidated`, as its tests do it in one process and over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.models import Problem
from zbfx.optim import PostValidated

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
    optimizer = PostValidated(make(step.parameters()), step, **{"sync": False, **options})
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
