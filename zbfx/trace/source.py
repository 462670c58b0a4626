"""The user's model and loss: what a graph was traced from, and whose tensors a pipeline trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zbfx.trace.guard import Guard
from zbfx.trace.tracer import canonical_names, named_tensors


@dataclass(frozen=True, eq=False)
class Source:
    """`guard` is what the trace took from model and loss beside their tensors; `local` are this process's parts of
    sharded parameters, by name."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    guard: Guard
    local: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, Tensor]:
        """Parameters and buffers under each of their names."""
        return named_tensors(self.model, self.loss_fn)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The live tensors by canonical name: tied ones once, of sharded ones this process's part."""
        named = {**self.named, **self.local}
        return {name: named[name] for name in dict.fromkeys(canonical_names(self.model, self.loss_fn).values())}
