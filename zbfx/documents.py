"""Files of users that are text: JSON that is read, pictures and pages that are written. In: a path. Out: what the file
holds, or a `ZbfxError` that says why it is no document of one meaning, or why it cannot be written."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

from zbfx.errors import ZbfxError, listed

LONGEST = 100  # characters of a wrong value
TOO_DEEP = "lists or objects that are nested too deep"


def read_json(path: str | PathLike[str]) -> Any:
    """What a JSON file holds. Raises `ZbfxError` where it is not JSON, names a field twice, or is nested too deep;
    `OSError` where it cannot be read."""
    try:
        return json.loads(Path(path).read_text(), object_pairs_hook=named_once)
    except ZbfxError as error:
        raise ZbfxError(f"{path}: {error}") from error
    except ValueError as error:
        raise ZbfxError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ZbfxError(f"{path} has {TOO_DEEP}") from error


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a whole file, or none: a write that is cut off leaves the file that was there. Raises `ZbfxError` where the
    system refuses."""
    whole = Path(os.path.realpath(path))
    is_stream = whole.exists() and not whole.is_file()  # a terminal or a pipe; or a folder, which is refused
    part = whole if is_stream else whole.with_name(f".{whole.name}.{os.getpid()}")
    try:
        try:
            part.write_text(text)
            part.replace(whole)
        except BaseException:
            if not is_stream:
                part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ZbfxError(f"cannot write {path}: {error.strerror}") from error


def refuse_unwritable(path: str | PathLike[str]) -> None:
    """Raises `ZbfxError` where `write_text` would: before what takes long to make is made."""
    whole = Path(os.path.realpath(path))
    try:
        if whole.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if whole.is_file() or not whole.exists():
            part = whole.with_name(f".{whole.name}.{os.getpid()}")
            part.touch()
            part.unlink()
    except OSError as error:
        raise ZbfxError(f"cannot write {path}: {error.strerror}") from error


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose fields have different names. JSON readers take the last of those that are alike."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ZbfxError(f"an object has a field once; found {listed(map(repr, twice), 3)} several times")
    return found


def shown(value: Any) -> str:
    """The beginning of a wrong value, which may be a whole document."""
    try:
        text = repr(value)
    except RecursionError:
        return TOO_DEEP
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
