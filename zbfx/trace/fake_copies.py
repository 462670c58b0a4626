"""Copies of model and loss to trace: with fake tensors in the place of parameters, buffers and plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbfx._torch.modules import own_modules
from zbfx.errors import TraceError, listed
from zbfx.trace.compiled_parts import deep_copy
from zbfx.trace.left_behind import forget_nothing, without_look_outs
from zbfx.trace.refusals import refuse_subclass
from zbfx.trace.tensor_names import named_tensors, plain_tensors
from zbfx.trace.tensor_parallel import fake_sharded, is_sharded


def fake_copies(
    model: nn.Module, loss_fn: Any, outside: Iterable[Tensor], fake_mode: Any, device: torch.device
) -> tuple[nn.Module, Any]:
    """Copies of model and loss whose parameters and buffers are fake. A tensor with two names has two names there too.
    In the copies, tensors that are plain attributes are buffers. So the pipeline reads and writes the live ones. It
    reads live ones `outside` of these too, such as those in a list that a module holds."""
    memo = without_look_outs(model, loss_fn) | {id(tensor): tensor for tensor in outside if tensor.is_leaf}
    for name, tensor in named_tensors(model, loss_fn).items():
        if id(tensor) in memo:
            continue
        if is_sharded(tensor):
            memo[id(tensor)] = fake_sharded(tensor, fake_mode, device)  # type: ignore[arg-type]
            memo[id(tensor.device_mesh)] = tensor.device_mesh  # type: ignore[attr-defined]
            continue
        refuse_subclass(name, tensor)
        with fake_mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    fakes = dict(memo)
    try:
        fake_model = deep_copy(model, memo)
        fake_loss_fn = deep_copy(loss_fn, memo) if isinstance(loss_fn, nn.Module) else loss_fn
        forget_nothing(fake_model, fake_loss_fn)
        for copied in (fake_model, fake_loss_fn):
            for module, attribute, _, tensor in plain_tensors(copied) if isinstance(copied, nn.Module) else ():
                delattr(module, attribute)
                module.register_buffer(attribute, tensor, persistent=False)
        return fake_model, fake_loss_fn
    except Exception as error:
        where = f" for {listed(found)}" if (found := attributes_without_copy(model, fakes)) else ""
        raise TraceError(
            f"tracing works on a copy, so that the model stays untouched, and copy.deepcopy of it failed{where}: "
            f"{type(error).__name__}: {error}. Keep what cannot be copied out of the module's attributes, such as "
            "results of an earlier forward"
        ) from error


def attributes_without_copy(model: nn.Module, memo: Mapping[int, Any]) -> list[str]:
    """The qualified names of the attributes that `copy.deepcopy` fails for."""
    found = []
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if value is not own_modules(module):
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    found.append(f"{prefix}.{attribute}" if prefix else attribute)
    return found
