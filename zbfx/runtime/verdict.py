"""Whether a step's losses and gradients are finite, and what to do about it: one verdict for all ranks.
"keep"   nothing is checked
"drop"   the step's gradients are dropped on every rank: `.grad` is what it was before, `step.verdict` says why
"raise"  the same, and every rank raises `NonFiniteStep`"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

CHOICES = ("keep", "drop", "raise")


def snapshot(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """The gradients before a step; None costs nothing."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}


class NonFinite(NamedTuple):
    """What is not finite after a step, in words."""

    losses: list[str]
    gradients: list[str]


def problems(rank: str, losses: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]) -> NonFinite:
    """Those of this rank: losses by microbatch, gradients by parameter."""
    wrong = {name: p.grad for name, p in parameters.items() if p.grad is not None and not torch.isfinite(p.grad).all()}
    return NonFinite(
        [
            f"the loss of microbatch {k} is {loss.tolist()}"
            for k, loss in enumerate(losses)
            if not torch.isfinite(loss).all()
        ],
        [f"the gradient of {name} is not finite on {rank}" for name in wrong],
    )


def settle(
    found: Sequence[str], before: Mapping[str, Tensor | None], parameters: Mapping[str, nn.Parameter]
) -> str | None:
    """Drop the step's gradients if anything was found on any rank; returns the verdict."""
    if not found:
        return None
    for name, parameter in parameters.items():
        parameter.grad = before[name]
    return f"gradients dropped: {'; '.join(found[:5])}" + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
