"""Tensors of a model that share memory under different names.

A graph knows its parameters and buffers by name alone: what it writes into one, it does not see in another.
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
    """Pairs of names of different tensors that have bytes in common, as they are ordered; tensors without data have
    none."""
    names = {id(tensor): name for name, tensor in reversed(list(named.items()))}  # of each tensor its first
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
    strided = tensor.layout is torch.strided and not (tensor.is_meta or is_sharded(tensor))
    return strided and tensor.numel() > 0


def refuse_written(named: Mapping[str, Tensor], joint: Joint) -> None:
    """Raise `TraceError` if the graph writes into a tensor that shares memory with another that it uses. What the model
    puts a new tensor in the place of gets memory of its own (`separate`)."""
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
    """Raise if tensors that share memory, and that training changes, are those of different ranks: each rank changes
    its own alone. `holders` are the ranks that use a tensor."""
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
    """Give what the model puts new tensors in the place of, and shares memory with others until then, memory of its
    own: a step writes into it. `torch.nn.utils.spectral_norm` begins so."""
    for name in {name for pair in overlapping(named) for name in pair if name in replaced}:
        named[name].data = named[name].detach().clone()
