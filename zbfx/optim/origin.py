"""Where a NaN or infinity began: the report of a step that was skipped.

In: the verdict, and the largest value that each action made on each rank. Out: the verdict with its cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbfx.optim.state import Verdict
from zbfx.plan import Action, Kind

if TYPE_CHECKING:
    from zbfx.optim.post_validated import PostValidated

SHOWN = 5


def taken(watched: list[Any]) -> tuple[list[Any], Tensor | None]:
    """The actions of a list of (action, number), and the numbers as one tensor; the list is cleared."""
    actions, numbers = [action for action, _ in watched], [number for _, number in watched]
    watched.clear()
    if len({number.dtype for number in numbers}) > 1:
        numbers = [number.double() for number in numbers]
    return actions, torch.stack(numbers) if numbers else None


def describe(verdict: Verdict, owner: PostValidated, seen: Mapping[int, tuple[list[Action], Tensor | None]]) -> Verdict:
    """The verdict with its cause, from the values that all ranks saw. Every rank calls it."""
    own = [
        str(action)
        for actions, sizes in seen.values()
        for action, size in zip(actions, () if sizes is None else sizes.tolist(), strict=True)
        if not isfinite(size)
    ]
    bad = {Action.parse(text) for texts in owner.target.ranks.everywhere(own) for text in texts}
    if began := origins(bad):
        return replace(verdict, cause="; ".join(f"{a} (stage {a.stage}, microbatch {a.microbatch})" for a in began))
    names = [f"the gradient of {n} (stage {min(owner.stages[n])})" for n in verdict.nonfinite]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return replace(verdict, cause=f"no value between stages, but {', '.join(names[:SHOWN])}{more}, in a W")


def origins(bad: set[Action]) -> list[Action]:
    """For each microbatch the first action that made something not finite: the first stage whose F did, or the last
    whose B did."""
    first = []
    for microbatch in sorted({action.microbatch for action in bad}):
        forwards = [a for a in bad if a.microbatch == microbatch and a.kind is Kind.F]
        backwards = [a for a in bad if a.microbatch == microbatch and a.kind is not Kind.F]
        first.append(min(forwards, key=lambda a: a.stage) if forwards else max(backwards, key=lambda a: a.stage))
    return first[:SHOWN]
