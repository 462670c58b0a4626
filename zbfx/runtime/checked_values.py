"""Checks of values that a model makes (`torch._check_tensor_all`), where they are noted, and judged together later.

No graph of CUDA can raise, so those of a captured step are judged once it has run, on all ranks together. Those on
weights that an optimizer step may yet take back are judged once its verdict is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zbfx.errors import PipelineFault
from zbfx.plan import Action


class CheckedValue(NamedTuple):
    """A check that an action has made: what it says where the condition, a tensor, is False."""

    action: Action
    message: str
    condition: Tensor


def failed(checks: Sequence[CheckedValue], rank: str, step: int) -> list[str]:
    """What those of a rank's checks say that have failed. Waits for the device."""
    if not checks:
        return []
    found = torch.stack([check.condition.reshape(()).bool() for check in checks]).tolist()
    wrong = [check for check, is_true in zip(checks, found, strict=True) if not is_true]
    return [
        f"{rank}, step {step}, action {action} (stage {action.stage}, microbatch {action.microbatch}): "
        f"RuntimeError: {message}"  # as where a check raises by itself
        for action, message, _ in wrong
    ]


def refuse_failed(texts: Sequence[str]) -> None:
    """Raises `PipelineFault` with what the first failed check says."""
    if texts:
        raise PipelineFault(texts[0] + (f" (and {len(texts) - 1} more)" if texts[1:] else ""))
