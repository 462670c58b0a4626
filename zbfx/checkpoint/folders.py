"""A folder of checkpoints, of which each is whole or not there. A checkpoint is written beside the others, under a name
that nobody reads, and gets its own in one step, once all of it is on the disk. In: a folder, a count. Out: paths."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from zbfx.checkpoint.distributed import is_distributed
from zbfx.errors import ZbfxError

NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")  # the count, and which one of that count
PARTIAL = ".partial-"

Order = tuple[int, int]


def order_of(path: Path) -> Order | None:
    """Where a checkpoint stands among those of its folder; None for what is none."""
    found = NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 0)) if found and path.is_dir() else None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, from the first to the newest."""
    ordered = {path: order for path in folder.iterdir() if (order := order_of(path))} if folder.is_dir() else {}
    return sorted(ordered, key=ordered.__getitem__)


def newest(folder: Path) -> Path:
    """A checkpoint itself, or the newest one of a folder. Raises `ZbfxError` where there is none."""
    if is_distributed(folder):
        return folder
    found = checkpoints(folder)
    if not found:
        raise ZbfxError(f"{folder} has no checkpoint of step.save that is whole; expected a folder in it like step-100")
    return found[-1]


def begin(folder: Path, count: int) -> Path:
    """Where to write a checkpoint. What ended processes have left half written goes. Raises `ZbfxError` where another
    checkpoint would stay the newest."""
    later = [path.name for path in checkpoints(folder) if (order_of(path) or (0, 0))[0] > count]
    if later:
        raise ZbfxError(
            f"{folder} has {later[-1]}, which would stay its newest checkpoint beside that of step {count}. Save into "
            f"another folder, or remove it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = folder / f"{PARTIAL}{count}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    return partial


def commit(partial: Path, count: int, keep: int | None) -> Path:
    """Give a checkpoint its name, once all its files are on the disk; of those that there are then, leave the last
    `keep`."""
    folder = partial.parent
    orders = [order for path in checkpoints(folder) if (order := order_of(path))]
    again = 1 + max((number for step, number in orders if step == count), default=-1)
    path = folder / (f"step-{count}.{again}" if again else f"step-{count}")
    sync(partial)
    os.rename(partial, path)
    sync(folder)
    for old in checkpoints(folder)[:-keep] if keep else ():
        gone = folder / f"{PARTIAL}{old.name}-{uuid.uuid4().hex[:8]}"  # in one step: never half of a checkpoint
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)
    return path


def sync(folder: Path) -> None:
    """Wait until a folder's names are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
