"""JSON files of users. In: a path. Out: what the file holds, or a `ZbfxError` that says why it is no document of one
meaning."""

from __future__ import annotations

import json
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
