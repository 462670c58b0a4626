"""The user's model and loss: what a graph was traced from, and the holder of the tensors that a pipeline trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zbfx.trace.guard import Guard
from zbfx.trace.tracer import canonical_names, named_tensors


@dataclass(frozen=True, eq=False)
class Source:
    """A model and its loss. `guard` holds what the trace took from them besides tensors, and `local`, by name, this
    process's parts of sharded parameters."""

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
        """The live tensors by canonical name. A tied tensor comes once, a sharded one as this process's part."""
        named = {**self.named, **self.local}
        return {name: named[name] for name in dict.fromkeys(canonical_names(self.model, self.loss_fn).values())}
