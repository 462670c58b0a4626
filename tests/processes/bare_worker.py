"""Scenarios of ranks without trainable parameters, or without any, for test_bare.py: functions of the rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.processes.replicas_worker import M, in_double_precision, mesh_of, part
from tests.support.models import Problem, mlp
from tests.support.reference import compiled
from zbfx.optim import PostValidated

STEPS, MAX_NORM = 3, 1e-2


class Adapted(nn.Module):
    """A frozen product, and one of low rank beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters(microbatches: int) -> Problem:
    """All is frozen but adapters of the upper half."""
    problem = mlp(microbatches, layers=4)
    layers = list(problem.model.children())
    upper = [Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in layers[4:]]
    return replace(problem, model=nn.Sequential(*(layer.requires_grad_(False) for layer in layers[:4]), *upper))


def lower_adapters(microbatches: int) -> Problem:
    """All is frozen but adapters of the lower half."""
    problem = mlp(microbatches, layers=4)
    layers = list(problem.model.children())
    lower = [Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in layers[:4]]
    return replace(problem, model=nn.Sequential(*lower, *(layer.requires_grad_(False) for layer in layers[4:])))


def bare(microbatches: int) -> Problem:
    """The last rank computes, and has nothing to train."""
    problem = mlp(microbatches, layers=4)
    last = [nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Softplus()]
    return replace(problem, model=nn.Sequential(*list(problem.model.children())[:4], *last))


MODELS = {"adapters": adapters, "lower adapters": lower_adapters, "bare": bare}


def plain(problem: Problem) -> dict[str, Any]:
    """Clipped steps of AdamW in one process."""
    optimizer = torch.optim.AdamW((p for p in problem.model.parameters() if p.requires_grad), lr=1e-2)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(problem.model(*problem.inputs), *problem.targets)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(problem.model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "values": dict(problem.model.named_parameters())}


@in_double_precision
def trained(rank: int, model: str, replicas: int, optimizer: str, zero: int) -> dict[str, Any]:
    """The same steps over ranks: how far losses, norms and parameters are from those of one process."""
    torch.manual_seed(0)
    expected = plain(MODELS[model](M * replicas))
    torch.manual_seed(0)
    whole = MODELS[model](M * replicas)
    mesh = mesh_of(replicas, 2)
    own = part(whole, mesh.get_local_rank("dp"), replicas)
    step = compiled(own, 2, M, cuts=["4"]).bind(
        mesh, zero=zero, on_nonfinite="drop" if optimizer == "checked" else "keep"
    )
    inner: torch.optim.Optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    validated = PostValidated(inner, step, max_norm=MAX_NORM) if optimizer == "validated" else None
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(step(*own.inputs, *own.targets).item())
        if validated is None:
            norms.append(step.clip_grad_norm_(MAX_NORM).item())
        (validated or inner).step()
        (validated or inner).zero_grad()
    if validated is not None:
        validated.settle()
    inner.load_state_dict(inner.state_dict())
    step.collect()
    step.evaluate(*own.inputs, *own.targets)
    values, named = dict(whole.model.named_parameters()), list(step.engine.runners[0].parameters)
    errors = [(values[name] - expected["values"][name]).abs().max().item() for name in named]
    state = step.full_state_dict()
    step.close()
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, expected["losses"], strict=True)),
        "norms": max((abs(a - b) for a, b in zip(norms, expected["norms"], strict=False)), default=0.0),
        "parameters": max(errors, default=0.0),
        "own": len(named),
        "whole": len(state),
    }
