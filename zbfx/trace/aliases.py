"""Tensors of a model that share memory under different names.

A graph knows parameters and buffers by name alone: it does not see that a write into one of them changes another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from zbfx.errors import TraceError, ZbfxError
from zbfx.graphs import Joint, Role
from zbfx.passes.nodes import storage_bytes
from zbfx.trace.tensor_parallel import is_sharded


def overlapping(named: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of names of different tensors that have bytes in common, in the order of `named`. Tensors without data have
    no bytes."""
    names = {id(tensor): name for name, tensor in reversed(list(named.items()))}  # the first name of each tensor
    places = {name: place for place, name in enumerate(named)}
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + storage_bytes(tensor), places[name])
        for name, tensor in named.items()
        if names[id(tensor)] == name and has_bytes(tensor)
    )
    found, reaching = [], list[tuple[int, int]]()
    for start, end, place in spans:
        reaching = [(until, other) for until, other in reaching if until > start]
        found += [sorted((place, other)) for _, other in reaching]
        reaching.append((end, place))
    every = list(named)
    return [(every[one], every[other]) for one, other in sorted(found)]


def has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor has entries in the memory of this process at strides that it knows."""
    strided = tensor.layout is torch.strided and not (tensor.is_meta or is_sharded(tensor))
    return strided and tensor.numel() > 0


def refuse_written(named: Mapping[str, Tensor], joint: Joint) -> None:
    """Raise `TraceError` if the graph writes into a tensor that shares memory with another one that it uses. Buffers
    that the model replaces by new tensors are left out: `separate` gives them memory of their own."""
    written = {port.name for port in joint.outputs if port.role is Role.BUFFER_UPDATE} - joint.replaced
    used = {port.name for port in joint.inputs if port.role in (Role.PARAMETER, Role.BUFFER)} | written
    for one, other in overlapping(named):
        if {one, other} <= used - joint.replaced and {one, other} & written:
            into, beside = (one, other) if one in written else (other, one)
            raise TraceError(
                f"the model writes into {into}, which shares memory with {beside}: the graph holds two tensors, and "
                f"would read {beside} as it was. Give each its own memory (.clone()), or take the view in the forward"
            )


def refuse_apart(named: Mapping[str, Tensor], holders: Mapping[str, Sequence[int]], joint: Joint) -> None:
    """Raise if training changes tensors that share memory and are used on different ranks, as each rank would change
    only its own copy. `holders` gives the ranks that use a tensor."""
    changing = {port.name for port in joint.outputs if port.role in (Role.GRADIENT, Role.BUFFER_UPDATE)}
    for one, other in overlapping(named):
        if one in holders and other in holders and {one, other} & changing:
            ranks = sorted({*holders[one], *holders[other]})
            if len(ranks) > 1:
                raise ZbfxError(
                    f"{one} and {other} share memory, and are used on ranks {', '.join(map(str, ranks))}: each of them "
                    "would change only its own copy. Use one parameter in both places (the same object, transposed in "
                    "the forward), give each its own memory (.clone()), or cut the model so that one rank has both"
                )


def separate(named: Mapping[str, Tensor], replaced: Collection[str]) -> None:
    """Give each buffer in `replaced` that shares memory with other tensors memory of its own, as a step writes into it.
    The buffers of `torch.nn.utils.spectral_norm` share memory until the first forward replaces them."""
    for name in {name for pair in overlapping(named) for name in pair if name in replaced}:
        named[name].data = named[name].detach().clone()
