"""Results of the compiler's steps, so that a search asks for each of them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Memo:
    """Calls pure steps, each once for the same arguments: numbers and texts by value, records of graphs by identity."""

    def __init__(self) -> None:
        self._known: dict[object, object] = {}

    def __call__(self, step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        key = (step, args, tuple(sorted(kwargs.items())))
        if key not in self._known:
            self._known[key] = step(*args, **kwargs)
        return self._known[key]  # type: ignore[return-value]
