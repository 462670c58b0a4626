"""What a checkpoint holds beside the model: between what has a state and what writes it. In and out: records."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zbfx._torch.tensors import pytree
from zbfx.checkpoint.distributed import stored_tensors
from zbfx.checkpoint.parts import Boxes
from zbfx.errors import ZbfxError, first_line


@dataclass
class State:
    """What a process gives to a checkpoint of one object: `tensors` by key, and `plain` data."""

    tensors: dict[str, Tensor | Boxes] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to load from: its table of contents, and plain data."""

    table: Metadata
    plain: Mapping[str, Any]

    @cached_property
    def entries(self) -> Mapping[str, TensorStorageMetadata]:
        """Its tensors by key."""
        return stored_tensors(self.table)

    def empty(self, key: str, device: torch.device) -> Tensor:
        """Memory for a tensor."""
        entry = self.entries[key]
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def equal_values(one: Any, other: Any) -> bool:
    """Whether two values, nested in lists and dicts, are equal; tensors in all bits."""
    ones, structure = pytree.tree_flatten(one)
    others, other_structure = pytree.tree_flatten(other)
    return structure == other_structure and all(map(equal_leaves, ones, others))


def equal_leaves(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and torch.equal(bits_of(one), bits_of(other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def bits_of(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def refuse_unreadable(label: str, plain: Any) -> None:
    """Raise for what could not be read back without unpickling."""
    box = io.BytesIO()
    try:
        torch.save(plain, box)
        box.seek(0)
        torch.load(box, weights_only=True)
    except Exception as error:  # of any kind: what it holds is the user's
        raise ZbfxError(
            f"the state of {label} holds more than tensors, numbers, texts, lists and dicts, and could only be read "
            f"back by running code of the file: {first_line(error)}. Leave it out, or give plain data in its state_dict"
        ) from error
