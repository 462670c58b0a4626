"""One step of an optimizer, until its verdict is known and what ranks did too early is corrected. In: the gradients of
a step and the hyperparameters. Out: parameters that all ranks have stepped alike, or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from zbfx.optim.inverse import Arithmetic
from zbfx.optim.state import Act, Layout, Rules, Share, Verdict
from zbfx.optim.undo import Undo
from zbfx.plan import Action, Kind
from zbfx.runtime.runner import on_stream

SHOWN = 5  # causes, in a verdict

Seen = Mapping[int, tuple[list[Action], Tensor | None]]


class Owner(Protocol):
    """The optimizer that takes the step, as a `PendingStep` needs it."""

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, Tensor]
    stages: Mapping[str, set[int]]
    rules: Rules
    layout: Layout
    shares: list[Share]
    stream: torch.cuda.Stream | None
    target: Any  # the worker of its step

    @property
    def is_fused(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def decides_on_device(self) -> bool: ...

    def way_back(self, rank: int, groups: list[dict[str, Any]], parameters: Sequence[Tensor]) -> Undo | Arithmetic: ...

    def settled(self, verdict: Verdict, rolled_back: bool) -> None: ...


class PendingStep:
    """A step that waits for its verdict, with what it takes to undo it or take it again: the gradients, the
    hyperparameters as they were, and the way back of each rank that stepped early."""

    def __init__(
        self, owner: Owner, gradients: dict[str, Tensor | None], groups: list[dict[str, Any]], seen: Seen
    ) -> None:
        self.owner, self.gradients, self.groups, self.seen = owner, gradients, groups, seen
        self.acts: dict[int, tuple[Act, Verdict]] = {}
        self.ways: dict[int, Undo | Arithmetic] = {}
        self.state: Tensor | None = None
        self.verdict: Verdict | None = None
        self.corrected = False
        self.stream = owner.stream
        self.begun = None if owner.stream is None else torch.cuda.current_stream().record_event()
        self.known: torch.cuda.Event | None = None  # on the device: the state is complete

    def complete(self, state: Tensor) -> None:
        """The last rank of the chain has the whole state."""
        self.state = state
        if state.is_cuda:
            self.known = torch.cuda.current_stream().record_event()

    def own_verdict(self) -> Tensor:
        assert self.state is not None, "the last rank has the whole state"
        if self.known is not None:
            torch.cuda.current_stream().wait_event(self.known)
        return self.state

    def judge(self, verdict: Tensor) -> None:
        self.verdict = self.owner.rules.judge(self.owner.layout, read(verdict))

    @property
    def is_refuted(self) -> bool:
        """Whether any rank stepped early and was wrong: then forwards ran on wrong weights."""
        assert self.verdict is not None, "judged before"
        return self.verdict.refutes_any

    def correct(self) -> None:
        """Undo and redo what the verdict refutes; the first rank of a process does it for all of them."""
        if self.corrected:
            return
        self.corrected = True
        owner, verdict = self.owner, self.verdict
        assert verdict is not None, "judged before"
        rolled_back = False
        for share in owner.shares:
            act = verdict.acts[share.rank]
            if verdict.refutes(act):
                if act is Act.STEPPED or owner.decides_on_device:  # a step that the device left out made state, too
                    self.roll_back(share)
                rolled_back |= act is Act.STEPPED
                self.apply(share.names, verdict)
            elif act is Act.WAITED and owner.decides_on_device:
                self.roll_back(share)
        owner.settled(verdict, rolled_back)

    def explained(self) -> Verdict:
        """The verdict with its cause. Ranks exchange what they saw on a stream beside other work of their devices."""
        assert self.verdict is not None, "judged before"
        with on_stream(self.stream):
            if self.begun is not None:
                torch.cuda.current_stream().wait_event(self.begun)
            return describe(self.verdict, self.owner, self.seen)

    def step_early(self, share: Share, leave_out: Tensor | None = None) -> None:
        """Step as if nothing were to clip or skip, with a way back. The device leaves the step out where `leave_out` is
        1."""
        owner = self.owner
        parameters = [owner.parameters[name] for name in share.names if self.gradients[name] is not None]
        self.ways[share.rank] = owner.way_back(share.rank, self.groups, parameters)
        self.ways[share.rank].save(owner.optimizer, parameters)
        self.take(share.names, leave_out=leave_out)

    def roll_back(self, share: Share) -> None:
        owner = self.owner
        way = self.ways[share.rank]
        assert self.verdict is not None, "judged before"
        if isinstance(way, Undo):
            way.restore(owner.optimizer)
        elif self.verdict.acts[share.rank] is Act.WAITED:
            way.forget(owner.optimizer, [owner.parameters[name] for name in share.names])
        else:
            used = {id(owner.parameters[name]): self.gradients[name] for name in share.names}
            way.restore(owner.optimizer, self.groups, {key: g for key, g in used.items() if g is not None})

    def apply(self, names: Collection[str], verdict: Verdict) -> None:
        """What the verdict says, for these parameters."""
        if verdict.skipped:
            return
        if verdict.factor == 1.0:
            self.take(names)
        elif self.owner.is_fused:
            self.take(names, factor=torch.tensor(verdict.factor, dtype=torch.float64, device=self.owner.device))
        else:
            for name in names:
                gradient = self.gradients[name]
                if gradient is not None:
                    gradient.mul_(verdict.factor)
            self.take(names)

    def take(self, names: Collection[str], factor: Tensor | None = None, leave_out: Tensor | None = None) -> None:
        """Step the wrapped optimizer for these parameters alone, under the hyperparameters of this step. A fused one
        multiplies gradients by `factor`, and leaves the step out where `leave_out` is 1."""
        owner = self.owner
        own = {id(owner.parameters[name]): self.gradients[name] for name in names}
        with (
            gradients_set(owner.optimizer, own),
            hyperparameters_set(owner.optimizer, self.groups),
            fused_arguments(owner.optimizer, factor, leave_out),
        ):
            owner.optimizer.step()


def read(state: Tensor) -> list[float]:
    """The numbers of a tensor of the current stream; what other streams have queued goes on meanwhile."""
    if state.is_cuda:
        copy = torch.empty_like(state, device="cpu", pin_memory=True)
        copy.copy_(state, non_blocking=True)
        torch.cuda.current_stream().record_event().synchronize()
        state = copy
    return state.tolist()


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of each group without its parameters."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@contextmanager
def hyperparameters_set(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, the optimizer's groups are as given, even if a scheduler has changed them since."""
    now = [dict(group) for group in optimizer.param_groups]
    for group, then in zip(optimizer.param_groups, groups, strict=True):
        group.update(then)
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, now, strict=True):
            group.update(values)


@contextmanager
def fused_arguments(
    optimizer: torch.optim.Optimizer, factor: Tensor | None, leave_out: Tensor | None
) -> Iterator[None]:
    """Inside, a fused optimizer finds what it divides gradients by, and whether it leaves the step out, where torch's
    `GradScaler` puts them."""
    given = {"grad_scale": None if factor is None else (1.0 / factor).float(), "found_inf": leave_out}
    for name, value in given.items():
        if value is not None:
            setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name, value in given.items():
            if value is not None:
                delattr(optimizer, name)


@contextmanager
def gradients_set(optimizer: torch.optim.Optimizer, gradients: Mapping[int, Tensor | None]) -> Iterator[None]:
    """Inside, parameters have these gradients, given by the identity of the parameter, and all others have none."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = gradients.get(id(p))
    try:
        yield
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient


def taken(watched: list[Any]) -> tuple[list[Any], Tensor | None]:
    """The actions of a list of (action, number), and the numbers as one tensor; the list is cleared."""
    actions, numbers = [action for action, _ in watched], [number for _, number in watched]
    watched.clear()
    if len({number.dtype for number in numbers}) > 1:
        numbers = [number.double() for number in numbers]
    return actions, torch.stack(numbers) if numbers else None


def describe(verdict: Verdict, owner: Owner, seen: Seen) -> Verdict:
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
    """The first action of each microbatch that made something not finite: of the first stage whose F did, or the last
    whose B did."""
    first = []
    for microbatch in sorted({action.microbatch for action in bad}):
        forwards = [a for a in bad if a.microbatch == microbatch and a.kind is Kind.F]
        backwards = [a for a in bad if a.microbatch == microbatch and a.kind is not Kind.F]
        first.append(min(forwards, key=lambda a: a.stage) if forwards else max(backwards, key=lambda a: a.stage))
    return first[:SHOWN]
