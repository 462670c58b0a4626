"""Parts of a tensor that DCP writes and reads as boxes of the whole. In: a range of a tensor's elements, as they lie in
memory, in a flat tensor. Out: a record that DCP takes in the place of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]  # the first element's indices, and the sizes


@dataclass(frozen=True)
class Piece:
    """The elements `begin` to `end` of a dense tensor, in the order of its memory (by its strides). They are elements
    `start` and on of a flat tensor."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    end: int
    start: int

    def part(self, flat: Tensor) -> Boxes:
        """These elements of the flat tensor as boxes of the whole one."""
        order = sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim))
        back = [order.index(dim) for dim in range(len(order))]
        blocks: dict[tuple[int, ...], Tensor] = {}
        place = self.start
        for offsets, sizes in boxes_of(tuple(self.shape[dim] for dim in order), self.begin, self.end):
            values = flat[place : place + prod(sizes)].view(sizes).permute(back)
            blocks[tuple(offsets[k] for k in back)] = values
            place += prod(sizes)
        return Boxes(torch.Size(self.shape), flat.dtype, blocks)


def boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The boxes that a range of the elements of a contiguous tensor consists of, in order."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    inner, rest = prod(shape[1:]), tuple(shape[1:])
    first, last = begin // inner, (end - 1) // inner
    if first == last and end - begin < inner:
        yield from within(first, rest, begin - first * inner, end - first * inner)
        return
    if begin % inner:
        yield from within(first, rest, begin % inner, inner)
        first += 1
    if end // inner > first:
        yield (first, *(0 for _ in rest)), (end // inner - first, *rest)
    if end % inner:
        yield from within(last, rest, 0, end % inner)


def within(row: int, rest: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of(rest, begin, end):
        yield (row, *offsets), (1, *sizes)


@dataclass(frozen=True)
class Boxes:
    """Boxes of a tensor of this shape, by the indices of their first elements."""

    shape: torch.Size
    dtype: torch.dtype
    blocks: dict[tuple[int, ...], Tensor]

    def size(self) -> torch.Size:
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), block.size()) for at, block in self.blocks.items()]

    def __create_write_items__(self, name: str, part: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


class PartSaver(DefaultSavePlanner):
    """Plans what a process writes of tensors and parts of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.blocks[tuple(index.offset or ())] if isinstance(found, Boxes) else super().lookup_object(index)


class PartLoader(DefaultLoadPlanner):
    """Plans what a process reads into tensors and parts of them. Bytes are left alone: they are pickles."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As it is: DCP's own way takes out what is no tensor."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.blocks[tuple(index.offset or ())] if isinstance(found, Boxes) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("only tensors are asked for")
