"""A step and the disk: the whole model back, and its files. In: a step's worker.
Out: what `zbfx.checkpoint` makes of it, on all ranks or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zbfx.arguments import true_or_false
from zbfx.checkpoint.names import owning_ranks
from zbfx.checkpoint.whole import checked_dtype, export_state, refuse_empty, whole_state
from zbfx.errors import ZbfxError, first_line
from zbfx.runtime.engine import T
from zbfx.runtime.worker import Worker


def full_state_dict(worker: Worker, everywhere: Any) -> dict[str, Tensor]:
    def check() -> bool:
        return true_or_false("everywhere", everywhere)

    return whole_state_of(worker, "full_state_dict", check, {"everywhere": everywhere}, everywhere=bool(everywhere))


def export(worker: Worker, folder: Any, dtype: Any, max_shard_size: int | str) -> None:
    arguments = {"dtype": str(dtype), "max_shard_size": max_shard_size}
    state = whole_state_of(worker, "export", lambda: (path_of(folder), checked_dtype(dtype)), arguments)

    def write() -> None:
        if state:
            with_errors_of(folder, lambda: export_state(worker.source, state, path_of(folder), dtype, max_shard_size))

    worker.agreed("export (files)", write, {})


def whole_state_of(
    worker: Worker,
    call: str,
    check: Callable[[], object],
    arguments: Mapping[str, object],
    *,
    everywhere: bool = False,
) -> dict[str, Tensor]:
    """The whole model's state, once no rank refuses the call."""
    channels = worker.engine.channels
    owner = owning_ranks(worker.engine.pipe, worker.source.tensors)

    def checked() -> None:
        check()
        refuse_empty(worker.source, {name for name, rank in owner.items() if channels is None or channels.rank == rank})

    worker.agreed(call, checked, arguments)
    return worker.guarded(lambda: whole_state(worker.source, owner, channels, everywhere=everywhere))


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
