"""One step of an optimizer, from when a rank takes it until its verdict is known and it is right."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbfx.optim.origin import describe
from zbfx.optim.state import Act, Verdict
from zbfx.optim.undo import Undo
from zbfx.plan import Action

if TYPE_CHECKING:
    from zbfx.optim.post_validated import PostValidated, Share

Seen = Mapping[int, tuple[list[Action], Tensor | None]]


class PendingStep:
    """A step that waits for its verdict, with what it takes to undo it or take it again: the gradients, the
    hyperparameters as they were, and the way back of each rank that stepped early."""

    def __init__(
        self, owner: PostValidated, gradients: dict[str, Tensor | None], groups: list[dict[str, Any]], seen: Seen
    ) -> None:
        self.owner, self.gradients, self.groups, self.seen = owner, gradients, groups, seen
        self.acts: dict[int, tuple[Act, Verdict]] = {}
        self.state: Tensor | None = None
        self.verdict: Verdict | None = None
        self.wrong: bool | None = None
        self.stream: torch.cuda.Stream | None = None

    def own_verdict(self) -> Tensor:
        assert self.state is not None, "the last rank has the whole state"
        return self.state

    def judge(self, verdict: Tensor) -> None:
        self.verdict = self.owner.rules.judge(self.owner.layout, verdict.tolist())

    def correct(self) -> bool:
        if self.wrong is None:
            self.wrong = self.corrected()
        return self.wrong

    def corrected(self) -> bool:
        """Undo and redo what the verdict refutes; the first rank of a process does it for all of them."""
        owner, verdict = self.owner, self.verdict
        assert verdict is not None, "judged before"
        if verdict.skipped:
            verdict = describe(verdict, owner, self.seen)
        rolled_back = False
        for share in owner.shares:
            act, _ = self.acts.get(share.rank, (Act.WAITED, None))
            if verdict.refutes(act):
                if act is Act.STEPPED:
                    self.roll_back(share)
                    rolled_back = True
                self.apply(share.names, verdict)
        owner.settled(verdict, rolled_back)
        return verdict.refutes_any

    def step_early(self, share: Share) -> None:
        """Step as if nothing were to clip or to skip, with a way back."""
        owner = self.owner
        parameters = [owner.parameters[name] for name in share.names if self.gradients[name] is not None]
        owner.way_back(share.rank, self.groups).save(owner.optimizer, parameters)
        self.take(share.names)

    def roll_back(self, share: Share) -> None:
        owner = self.owner
        way = owner.way_back(share.rank, self.groups)
        if isinstance(way, Undo):
            way.restore(owner.optimizer)
        else:
            used = {id(owner.parameters[name]): self.gradients[name] for name in share.names}
            way.restore(owner.optimizer, self.groups, {key: g for key, g in used.items() if g is not None})

    def apply(self, names: Collection[str], verdict: Verdict) -> None:
        """What the verdict says, for these parameters."""
        if verdict.skipped:
            return
        if verdict.factor != 1.0:
            for name in names:
                gradient = self.gradients[name]
                if gradient is not None:
                    gradient.mul_(verdict.factor)
        self.take(names)

    def take(self, names: Collection[str]) -> None:
        """Step the wrapped optimizer for these parameters alone, under the hyperparameters of this step."""
        owner = self.owner
        own = {id(owner.parameters[name]): self.gradients[name] for name in names}
        with gradients_set(owner.optimizer, own), hyperparameters_set(owner.optimizer, self.groups):
            owner.optimizer.step()


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of each group without its parameters."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@contextmanager
def hyperparameters_set(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Meanwhile the optimizer's groups are as given: a scheduler may have changed them since."""
    now = [dict(group) for group in optimizer.param_groups]
    for group, then in zip(optimizer.param_groups, groups, strict=True):
        group.update(then)
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, now, strict=True):
            group.update(values)


@contextmanager
def gradients_set(optimizer: torch.optim.Optimizer, gradients: Mapping[int, Tensor | None]) -> Iterator[None]:
    """Meanwhile the parameters have these gradients, by identity, and others none."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = gradients.get(id(p))
    try:
        yield
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
