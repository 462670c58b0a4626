"""What stands for a value that code of a model or its loss reads: plain values for themselves, others by what a graph
holds of them. `reached.py` finds them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

MOST_OF_ARRAY = 1 << 14  # entries that are compared before each step
MOST_OF_END = MOST_OF_ARRAY // 2
LEAVES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    type(None),
    Enum,
    numpy.generic,
    torch.dtype,
    torch.device,
)


class TensorLayoutRead(NamedTuple):
    """What a graph was made for of a tensor that it reads."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    def __repr__(self) -> str:
        return f"a tensor of {self.dtype} and shape {self.shape} with requires_grad={self.requires_grad}"


class Nothing:
    """In the place of a value that is not there."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = Nothing()


class ArrayRead(NamedTuple):
    """An array of numpy, which a graph holds a copy of: its values, or those of a large one's beginning and end."""

    dtype: str
    shape: tuple[int, ...]
    octets: bytes

    @classmethod
    def of(cls, array: Any) -> ArrayRead:
        flat = array.reshape(-1)
        read = array if array.size <= MOST_OF_ARRAY else numpy.concatenate([flat[:MOST_OF_END], flat[-MOST_OF_END:]])
        return cls(str(array.dtype), array.shape, read.tobytes())

    def __repr__(self) -> str:
        return f"an array of {self.dtype} and shape {self.shape}"


class PartOf(NamedTuple):
    """A module, or a parameter or buffer, of the model or its loss."""

    name: str

    def __repr__(self) -> str:
        return self.name or "the model"


def entry_of(table: dict[Any, Any], key: Any) -> Any:
    return table.get(key, NOTHING)


def entry_at(row: Sequence[Any], place: int) -> Any:
    return row[place] if -len(row) <= place < len(row) else NOTHING


def layout_read(tensor: Tensor) -> TensorLayoutRead:
    return TensorLayoutRead(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def is_equal(before: object, after: object) -> bool:
    """Whether two values are one, or equal and of one type."""
    return before is after or (type(before) is type(after) and bool(before == after))  # no tensor is a value
