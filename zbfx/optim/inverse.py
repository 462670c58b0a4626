"""The way back in place: an optimizer's step undone by arithmetic (the paper's appendix on rollback), without memory. A
number comes back within a few units in the last place, in its own precision, of the numbers that enter: for a parameter
itself and its update, for a moment itself and the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import ZbfxError

Hyperparameters = Mapping[str, Any]  # of a parameter group: numbers, or tensors that hold one
ParameterState = dict[str, Any]  # what the optimizer keeps for one parameter


@dataclass(frozen=True, slots=True)
class Inverse:
    """`undo(group, parameter, gradient, state, first)` puts back one parameter and its state, given the gradient that
    the step used. `first`: the step has made the state, and the caller deletes it. `obstacle(group)` says why a step
    under these hyperparameters has no inverse, or None."""

    undo: Callable[[Hyperparameters, Tensor, Tensor, ParameterState, bool], None]
    obstacle: Callable[[Hyperparameters], str | None]


INVERSES: dict[type[torch.optim.Optimizer], Inverse] = {}


def register_inverse(
    optimizer: type[torch.optim.Optimizer],
    undo: Callable[[Hyperparameters, Tensor, Tensor, ParameterState, bool], None],
    obstacle: Callable[[Hyperparameters], str | None] = lambda group: None,
) -> None:
    """Make `rollback="arithmetic"` work for a further class of optimizers; see `Inverse` for both functions."""
    INVERSES[optimizer] = Inverse(undo, obstacle)


def obstacle_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> str | None:
    """Why a step under these hyperparameters cannot be undone by arithmetic; None: it can."""
    inverse = INVERSES.get(type(optimizer))
    if inverse is None:
        return f"{type(optimizer).__name__} has no inverse (zbfx.optim.register_inverse adds one)"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.is_complex() for p in parameters):
        return "a parameter is complex"
    return next((found for group in groups if (found := inverse.obstacle(group))), None)


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or as it is if it is in float64."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def decay_obstacle(group: Hyperparameters) -> str | None:
    if float(group["lr"]) * float(group["weight_decay"]) == 1.0:
        return "lr * weight_decay is 1: the step forgets the parameter"
    return None


def sgd_obstacle(group: Hyperparameters) -> str | None:
    if group["differentiable"]:
        return "differentiable steps are part of a graph"
    return decay_obstacle(group) if group["momentum"] == 0 or group["nesterov"] else None


def undo_sgd(group: Hyperparameters, parameter: Tensor, gradient: Tensor, state: ParameterState, first: bool) -> None:
    lr, decay, momentum = (float(group[key]) for key in ("lr", "weight_decay", "momentum"))
    g = -wide(gradient) if group["maximize"] else wide(gradient)
    p = wide(parameter)
    if momentum == 0.0:
        parameter.copy_((p + lr * g) / (1.0 - lr * decay))
        return
    buffer = state["momentum_buffer"]
    nesterov = group["nesterov"]
    p = (p + lr * (g + momentum * wide(buffer))) / (1.0 - lr * decay) if nesterov else p + lr * wide(buffer)
    parameter.copy_(p)
    if not first:
        buffer.copy_((wide(buffer) - (1.0 - float(group["dampening"])) * (g + decay * p)) / momentum)


def adam_obstacle(group: Hyperparameters) -> str | None:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if group["amsgrad"]:
        return "amsgrad keeps the largest second moment, which forgets the one before"
    if group["differentiable"]:
        return "differentiable steps are part of a graph"
    if beta1 == 0.0 or beta2 == 0.0:
        return f"betas are {(beta1, beta2)}: a beta of 0 forgets the moment before"
    return decay_obstacle(group) if group.get("decoupled_weight_decay") else None


def undo_adam(group: Hyperparameters, parameter: Tensor, gradient: Tensor, state: ParameterState, first: bool) -> None:
    lr, decay, epsilon = (float(group[key]) for key in ("lr", "weight_decay", "eps"))
    beta1, beta2 = (float(beta) for beta in group["betas"])
    g = -wide(gradient) if group["maximize"] else wide(gradient)
    count, m, v = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
    root = wide(v).sqrt() / (1.0 - beta2**count) ** 0.5
    p = wide(parameter) + lr / (1.0 - beta1**count) * wide(m) / (root + epsilon)
    if group.get("decoupled_weight_decay"):
        p = p / (1.0 - lr * decay)
    else:
        g = g + decay * p
    parameter.copy_(p)
    if not first:
        m.copy_((wide(m) - (1.0 - beta1) * g) / beta1)
        v.copy_(((wide(v) - (1.0 - beta2) * g * g) / beta2).clamp_(min=0.0))  # never below 0 by rounding
        state["step"] -= 1


register_inverse(torch.optim.SGD, undo_sgd, sgd_obstacle)
register_inverse(torch.optim.Adam, undo_adam, adam_obstacle)
register_inverse(torch.optim.AdamW, undo_adam, adam_obstacle)


class Arithmetic:
    """Undoes steps in place. Remembers from before a step which parameters had no state yet."""

    def __init__(self) -> None:
        self.fresh: set[int] = set()

    def save(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        self.fresh = {id(parameter) for parameter in parameters if not optimizer.state.get(parameter)}

    @torch.no_grad()
    def restore(
        self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], gradients: Mapping[int, Tensor]
    ) -> None:
        """Undo a step under these hyperparameters; `gradients` by the identity of the parameter."""
        inverse = INVERSES[type(optimizer)]
        for group, live in zip(groups, optimizer.param_groups, strict=True):
            for parameter in live["params"]:
                gradient = gradients.get(id(parameter))
                if gradient is None:
                    continue
                first = id(parameter) in self.fresh
                inverse.undo(group, parameter, gradient, optimizer.state[parameter], first)
                if first:
                    del optimizer.state[parameter]

    def forget(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        """Delete the state that a step made without changing anything."""
        for parameter in parameters:
            if id(parameter) in self.fresh:
                optimizer.state.pop(parameter, None)


class Rollback(StrEnum):
    """How a wrong step is undone: from a copy, or by the inverse of its arithmetic."""

    EXACT = "exact"
    ARITHMETIC = "arithmetic"


def checked_rollback(rollback: str | None, optimizer: torch.optim.Optimizer) -> Rollback | None:
    """None: exact while memory allows it."""
    if rollback is None:
        return None
    if rollback not in tuple(Rollback):
        raise ZbfxError(f'rollback is "exact", "arithmetic" or None; found {rollback!r}')
    chosen = Rollback(rollback)
    if chosen is Rollback.ARITHMETIC and (obstacle := obstacle_of(optimizer, optimizer.param_groups)):
        raise ZbfxError(f'rollback="arithmetic" does not work here: {obstacle}. Use rollback="exact"')
    return chosen
