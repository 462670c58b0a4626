"""Loss scaling over all ranks: `torch.amp.GradScaler`'s policy, applied to the verdict of the whole pipeline.

In: a user's scaler, whether a step overflowed on any rank. Out: the scaler with its next scale.
"""

from __future__ import annotations

import torch

from zbfx.arguments import kind_of
from zbfx.errors import ZbfxError


def checked_scaler(
    scaler: torch.amp.GradScaler | None, check_finite: bool, optimizer: torch.optim.Optimizer
) -> torch.amp.GradScaler | None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ZbfxError(f"grad_scaler is a torch.amp.GradScaler, or None to scale nothing; found {kind_of(scaler)}")
    if scaler is None or not scaler.is_enabled():
        return None
    if any(p.dtype is torch.float16 for group in optimizer.param_groups for p in group["params"]):
        raise ZbfxError(
            "gradients in float16 lose small numbers when they are divided by the scale; found float16 parameters. "
            "Keep parameters in float32 and compile under torch.autocast(dtype=torch.float16)"
        )
    if not check_finite:
        raise ZbfxError("a grad_scaler lowers its scale when a gradient is not finite: it needs check_finite=True")
    return scaler


def state_of(scaler: object) -> object:
    """What all ranks must agree on: the state of a scaler, or whatever else was passed."""
    return scaler.state_dict() if isinstance(scaler, torch.amp.GradScaler) else scaler


def update_scale(scaler: torch.amp.GradScaler, *, overflow: bool) -> None:
    """Lower the scale after an overflow; raise it after enough steps without one."""
    state = scaler.state_dict()
    steps = 0 if overflow else state["_growth_tracker"] + 1
    if overflow:
        state["scale"] *= state["backoff_factor"]
    elif steps == state["growth_interval"]:
        state["scale"], steps = state["scale"] * state["growth_factor"], 0
    state["_growth_tracker"] = steps
    scaler.load_state_dict(state)
