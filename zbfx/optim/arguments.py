"""Checks of what a wrapped optimizer and its methods are called with, and the policy of a scaler that was passed.
In: a user's arguments. Out: the same arguments, or a `ZbfxError` that names the wrong one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zbfx._torch.tensors import gradient_dtype
from zbfx.arguments import kind_of
from zbfx.errors import ZbfxError, listed
from zbfx.optim.several import Several
from zbfx.optim.state import Trained
from zbfx.runtime.step import Step


@dataclass(frozen=True)
class Asked:
    """The arguments of `PostValidated` that ranks compare."""

    max_norm: float | None
    check_finite: bool
    grad_scaler: object  # its state
    rollback: str | None
    sync: bool | None


def checked_step(step: Any) -> Step:
    if not isinstance(step, Step):
        raise ZbfxError(
            f"the second argument is the step whose parameters are optimized, from pipe.bind() or pipe.run_local(); "
            f"found {type(step).__name__}"
        )
    return step


def checked_optimizer(given: Any, step: Step, wrapper: type) -> torch.optim.Optimizer:
    """The optimizer that was given, or several as one. None of them is a `wrapper`."""
    optimizers = list(given) if isinstance(given, Sequence) and given else [given]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, wrapper):
            raise ZbfxError(
                f"PostValidated wraps an optimizer of torch, or a list of them; found {type(optimizer).__name__}"
            )
        refuse_closures(optimizer)
        refuse_strangers(optimizer, step)
    return optimizers[0] if optimizers[0] is given else Several(optimizers)


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step on gradients alone."""
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    gather = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in gather]
    if needed:
        raise ZbfxError(
            f"PostValidated wraps an optimizer whose step() takes no arguments, since a pipeline's step has computed "
            f"the loss before; found {type(optimizer).__name__}, whose step needs {listed(needed)}. Use one that steps "
            f"once on the gradients, like AdamW or SGD"
        )


def refuse_strangers(optimizer: torch.optim.Optimizer, step: Step) -> None:
    """Refuse parameters that are not the pipeline's, and pipelines whose verdict ranks would come to apart."""
    channels = step.engine.channels
    if channels is not None and channels.place.shard_count > 1:
        raise ZbfxError(
            "PostValidated comes to its verdict among the ranks of one shard, and shards of a model need one verdict; "
            "found a mesh with the dimension 'tp'. Step the optimizer itself, after step.clip_grad_norm_(max_norm)"
        )
    known = {id(tensor) for tensor in (*Trained.of(step.worker).parameters.values(), *step.parameters())}
    strange = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if strange:
        raise ZbfxError(
            f"{strange} parameters of the optimizer are not the pipeline's: their gradients would count on one rank "
            f"alone. Make the optimizer from step.parameters(), and give others one of their own"
        )


def load_state(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """Let the optimizer, whose hooks may change it first, load a state."""
    try:
        optimizer.load_state_dict(state_dict)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        raise ZbfxError(
            f"state_dict is what state_dict() of this rank's optimizer gave, a dict with 'state' and 'param_groups' of "
            f"{sizes} parameters; found {described_state(state_dict)} ({type(error).__name__}: {error}). Load what the "
            f"same rank saved, of a pipeline with the same stages"
        ) from error


def described_state(state_dict: Any) -> str:
    if not isinstance(state_dict, Mapping):
        return kind_of(state_dict)
    if not {"state", "param_groups"} <= state_dict.keys():
        return f"a dict with the keys {listed(state_dict)}" if state_dict else "an empty dict"
    groups = state_dict["param_groups"]
    try:
        return f"{[len(group['params']) for group in groups]} parameters"
    except (KeyError, TypeError):
        return f"param_groups {kind_of(groups)}"


def checked_scaler(
    scaler: torch.amp.GradScaler | None, check_finite: bool, optimizer: torch.optim.Optimizer
) -> torch.amp.GradScaler | None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ZbfxError(f"grad_scaler is a torch.amp.GradScaler, or None to scale nothing; found {kind_of(scaler)}")
    if scaler is None or not scaler.is_enabled():
        return None
    if any(gradient_dtype(p) is torch.float16 for group in optimizer.param_groups for p in group["params"]):
        raise ZbfxError(
            "gradients in float16 lose small numbers when they are divided by the scale; found gradients of float16 "
            "parameters. Keep parameters in float32 and compile under torch.autocast(dtype=torch.float16), or compile "
            "with grad_dtype=torch.float32"
        )
    if not check_finite:
        raise ZbfxError("a grad_scaler lowers its scale when a gradient is not finite: it needs check_finite=True")
    return scaler


def state_of(scaler: object) -> object:
    """What all ranks must agree on: the state of a scaler, or whatever else was passed."""
    return scaler.state_dict() if isinstance(scaler, torch.amp.GradScaler) else scaler


def update_scale(scaler: torch.amp.GradScaler, *, overflow: bool) -> None:
    """`torch.amp.GradScaler`'s policy: lower the scale after an overflow, raise it after enough steps without one."""
    state = scaler.state_dict()
    steps = 0 if overflow else state["_growth_tracker"] + 1
    if overflow:
        state["scale"] *= state["backoff_factor"]
    elif steps == state["growth_interval"]:
        state["scale"], steps = state["scale"] * state["growth_factor"], 0
    state["_growth_tracker"] = steps
    scaler.load_state_dict(state)
