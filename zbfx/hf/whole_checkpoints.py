"""Checkpoints of transformers' `Trainer` that a killed process has left half written. In: the folder that they are in.
Out: the newest whole one. The Trainer's state is the last file that is written, so a checkpoint with it is whole."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from zbfx.errors import ZbfxError

TRAINERS_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def begin_checkpoint(folder: Path, step: int, *, rotates: bool) -> None:
    """What stands there of an earlier run is not whole from now on. Partial ones go if the Trainer keeps only so many
    (`rotates`), for it counts them among these; else they stay, for all that they hold may be weights of the user's."""
    (folder / f"{PREFIX_CHECKPOINT_DIR}-{step}" / TRAINER_STATE_NAME).unlink(missing_ok=True)
    if rotates:
        for path in set(numbered(folder)) - set(whole_checkpoints(folder)):
            shutil.rmtree(path)


def is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


def numbered(folder: Path) -> dict[Path, int]:
    """Folders with the names of checkpoints, and their steps."""
    return {
        path: int(name[1])
        for path in folder.glob("*")
        if (name := TRAINERS_NAME.fullmatch(path.name)) and path.is_dir()
    }


def whole_checkpoints(folder: Path) -> list[Path]:
    """Those that are whole, from the first to the newest."""
    steps = numbered(folder)
    return sorted(filter(is_whole, steps), key=steps.__getitem__)


def newest_whole(folder: Path) -> Path:
    """Raises `ZbfxError` where there is none."""
    found = whole_checkpoints(folder)
    if not found:
        raise ZbfxError(
            f"resume_from_checkpoint=True goes on from the newest checkpoint in {folder}, which has none that is whole"
        )
    return found[-1]


def refuse_partial(checkpoint: Path) -> None:
    """Raise for a checkpoint, by its name one of the Trainer's, that was not written to its end."""
    if not checkpoint.is_dir() or TRAINERS_NAME.fullmatch(checkpoint.name) is None or is_whole(checkpoint):
        return
    others = whole_checkpoints(checkpoint.parent)
    instead = f"{others[-1].name} is the newest whole one" if others else "there is no other one"
    raise ZbfxError(
        f"resume_from_checkpoint={str(checkpoint)!r} was not written to its end: it has no {TRAINER_STATE_NAME} that "
        f"can be read. In {checkpoint.parent} {instead}"
    )
