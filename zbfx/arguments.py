"""Checks of arguments: each mistake names its argument, what was expected, and what was found."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import ZbfxError


def whole_number(name: str, value: Any, meaning: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ZbfxError(f"{name} is {meaning}, an integer >= 1; found {value!r}")
    return value


def count_from_zero(name: str, value: Any, meaning: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ZbfxError(f"{name} is {meaning}, an integer >= 0; found {value!r}")
    return value


def positive_number(name: str, value: Any, meaning: str) -> float:
    """A number above 0, or a tensor that holds one."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(number, Real) or isinstance(number, bool) or not float(number) > 0:
        raise ZbfxError(f"{name} is {meaning}; found {value!r}")
    return float(number)


def true_or_false(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ZbfxError(f"{name} is True or False; found {value!r}")
    return value


def finite_number(name: str, value: Any, meaning: str, *, above_zero: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > 0 if above_zero else value >= 0) or value == math.inf:
        raise ZbfxError(f"{name} is {meaning}, a number {'>' if above_zero else '>='} 0; found {value!r}")
    return float(value)


def checked_seed(seed: Any) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ZbfxError(f"seed is an integer, which fixes the random numbers; found {seed!r}")
    return seed


def kind_of(value: Any) -> str:
    """A few words on a wrong argument."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}: call it to make an instance"
    return f"{type(value).__name__} {value!r}"[:80]


def compared(options: Any) -> dict[str, object]:
    """What ranks compare of a record of options, by name: numbers, texts, dtypes, lists of these, and the kinds of
    others."""
    values = {found.name: getattr(options, found.name) for found in fields(options) if found.compare}
    return {name: value if is_plain(value) else type(value).__name__ for name, value in values.items()}


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, str | bool | Real | torch.dtype)
