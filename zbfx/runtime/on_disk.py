"""A step and the disk: the whole model back, and its files. In: a step's model, and how its ranks come to agree.
Out: what `zbfx.checkpoint` makes of it, on all ranks or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from zbfx.arguments import true_or_false
from zbfx.checkpoint.names import owning_ranks
from zbfx.checkpoint.whole import checked_dtype, export_state, refuse_empty, whole_state
from zbfx.errors import ZbfxError, first_line
from zbfx.runtime.engine import Engine, T
from zbfx.runtime.optimizer import Optimizer
from zbfx.runtime.options import StepOptions
from zbfx.runtime.ranks import Ranks
from zbfx.trace.guard import Source


class Stepping(Protocol):
    """A step, as these functions need it."""

    source: Source
    count: int
    options: StepOptions
    ranks: Ranks
    optimizer: Optimizer | None
    saving: Any  # the last checkpoint, perhaps on its way

    @property
    def engine(self) -> Engine: ...
    def agreed(self, call: str, work: Callable[[], T], arguments: Mapping[str, object]) -> T: ...
    def guarded(self, work: Callable[[], T]) -> T: ...


def full_state_dict(step: Stepping, everywhere: Any) -> dict[str, Tensor]:
    def check() -> bool:
        return true_or_false("everywhere", everywhere)

    return whole_state_of(step, "full_state_dict", check, {"everywhere": everywhere}, everywhere=bool(everywhere))


def export(step: Stepping, folder: Any, dtype: Any, max_shard_size: int | str) -> None:
    arguments = {"dtype": str(dtype), "max_shard_size": max_shard_size}
    state = whole_state_of(step, "export", lambda: (path_of(folder), checked_dtype(dtype)), arguments)

    def write() -> None:
        if state:
            with_errors_of(folder, lambda: export_state(step.source, state, path_of(folder), dtype, max_shard_size))

    step.agreed("export (files)", write, {})


def whole_state_of(
    step: Stepping,
    call: str,
    check: Callable[[], object],
    arguments: Mapping[str, object],
    *,
    everywhere: bool = False,
) -> dict[str, Tensor]:
    """The whole model's state, once no rank refuses the call."""
    channels = step.engine.channels
    owner = owning_ranks(step.engine.pipe, step.source.tensors)

    def checked() -> None:
        check()
        refuse_empty(step.source, {name for name, rank in owner.items() if channels is None or channels.rank == rank})

    step.agreed(call, checked, arguments)
    return step.guarded(lambda: whole_state(step.source, owner, channels, everywhere=everywhere))


def path_of(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise ZbfxError(f"folder is a path; found {type(folder).__name__}")
    return Path(folder)


def with_errors_of(folder: Any, work: Callable[[], T]) -> T:
    """Do what writes into a folder; what keeps files from being written becomes a `ZbfxError`."""
    try:
        return work()
    except OSError as error:
        raise ZbfxError(f"{folder} cannot be written: {first_line(error)}") from error
