"""What a step knows of an optimizer that is validated while the next step warms up (`zbfx.optim`)."""

from __future__ import annotations

from typing import Any, Protocol

from zbfx.runtime.runner import Pending


class Optimizer(Protocol):
    """What a step asks of it."""

    sync: bool | None
    layout: Any  # the `chain` of ranks along which its state passes, and the state's `size`
    seen: dict[int, list[Any]]  # by rank, where the largest values that actions made are noted
    runners: list[Any]

    @property
    def pending(self) -> Pending | None: ...
    def settle(self) -> None: ...
    def learn(self) -> None: ...
    def explain(self) -> None: ...
    def refuse_calls(self) -> None: ...
