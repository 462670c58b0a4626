"""Several optimizers, each with parameters of its own, as one. In: optimizers of torch. Out: an optimizer whose groups
are theirs, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zbfx.errors import ZbfxError


class Several(torch.optim.Optimizer):
    """Optimizers that step together, such as Muon for matrices and AdamW for all else. Groups are the very dicts of the
    optimizers, so that schedulers of each go on working; one mapping holds the state of all. Raises `ZbfxError` where
    two of them have the same parameter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        every = [id(p) for group in groups for p in group["params"]]
        if len(set(every)) < len(every):
            raise ZbfxError(
                "a parameter is stepped by one optimizer; found one in several of those that were given. Give each "
                "parameters of its own"
            )
        super().__init__(groups, {})
        self.gather()

    def gather(self) -> None:
        """Take over the groups and the state of the optimizers."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def __repr__(self) -> str:
        return f"Several({', '.join(map(repr, self.optimizers))})"

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each optimizer its groups of the state, and the state of their parameters. Raises `ValueError`, as
        torch's optimizers do, for other groups."""
        groups, parts = list(state_dict["param_groups"]), list[dict[str, Any]]()
        if len(groups) != len(self.param_groups):
            raise ValueError(f"there are {len(self.param_groups)} groups, and {len(groups)} in the state")
        for optimizer in self.optimizers:
            own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            numbers = {number for group in own for number in group["params"]}
            state = {number: value for number, value in state_dict["state"].items() if number in numbers}
            parts.append({"state": state, "param_groups": own})
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            optimizer.load_state_dict(part)
        self.state.clear()
        self.gather()
