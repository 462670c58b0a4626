"""Copies of a model without memory, on which loading and initialisation run, and values for the live tensors.
In: a model, names. Out: a copy that has memory for these names alone; the model with other values."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbfx.trace.guard import Source
from zbfx.trace.left_behind import without_look_outs
from zbfx.trace.tensor_names import named_tensors


def without_memory(source: Source, but: Collection[str] = ()) -> tuple[nn.Module, Any]:
    """Copies of model and loss on the meta device. The tensors of the names in `but` have memory on the CPU, and no
    values yet. A tensor with two names has two names in the copies too."""
    memo = without_look_outs(source.model, source.loss_fn)
    kept = {id(source.named[name]) for name in but}
    for tensor in source.named.values():
        device = torch.device("cpu" if id(tensor) in kept else "meta")
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo.setdefault(id(tensor), nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
    model = copy.deepcopy(source.model, memo)
    return model, copy.deepcopy(source.loss_fn, memo) if isinstance(source.loss_fn, nn.Module) else source.loss_fn


@torch.no_grad()
def put(source: Source, values: Mapping[str, Tensor]) -> None:
    """Give the live tensors of these canonical names their values. A tensor on the meta device stays the same object,
    in each module and optimizer that has it, and gets the memory of its value, with the strides that it had."""
    named = source.named
    for name, value in values.items():
        live = named[name]
        if not live.is_meta:
            live.copy_(value)
            continue
        if value.stride() != live.stride():
            value = torch.empty_strided(live.shape, live.stride(), dtype=value.dtype, device=value.device).copy_(value)
        filled = nn.Parameter(value, live.requires_grad) if isinstance(live, nn.Parameter) else value.detach()
        vars(filled).update(vars(live))
        torch.utils.swap_tensors(live, filled)


def named_in(copies: tuple[nn.Module, Any]) -> dict[str, Tensor]:
    """The parameters and buffers of copies, under each of their names."""
    return named_tensors(*copies)
