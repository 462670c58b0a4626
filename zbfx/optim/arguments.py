"""Checks of what a wrapped optimizer and its methods are called with.

In: a user's arguments. Out: the same arguments, or a `ZbfxError` that names the wrong one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zbfx.arguments import kind_of
from zbfx.errors import ZbfxError, listed
from zbfx.runtime.step import Step


@dataclass(frozen=True)
class Asked:
    """The arguments of `PostValidated` that ranks compare."""

    max_norm: float | None
    check_finite: bool
    grad_scaler: object  # its state
    rollback: str | None
    sync: bool


def checked_step(step: Any) -> Step:
    if not isinstance(step, Step):
        raise ZbfxError(
            f"the second argument is the step whose parameters are optimized, from pipe.bind() or pipe.run_local(); "
            f"found {type(step).__name__}"
        )
    return step


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
