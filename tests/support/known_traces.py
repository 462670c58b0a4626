"""Traces of models that are alike, each made once in a process: tracing is most of what compiling a small model takes.

For scenarios over processes, and tests of what is done with a graph. Tests of tracing trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbfx.compiling
from zbfx.modes import Modes
from zbfx.plans.identity import identity
from zbfx.spelled import spelled
from zbfx.trace.tensor_names import named_tensors
from zbfx.trace.tensor_parallel import is_sharded
from zbfx.trace.tracer import trace

Known = dict[str, Any]  # traces by what decides them


def trace_once(patch: pytest.MonkeyPatch, known: Known) -> None:
    """Until the patch is undone, `zbfx.compile` takes traces of models like earlier ones from `known`."""

    def remembered(model: nn.Module, loss_fn: Callable[..., Any] | None, *arguments: Any, **options: Any) -> Any:
        key = told(model, loss_fn, arguments, options)
        if key is None:
            return trace(model, loss_fn, *arguments, **options)
        if key not in known:
            known[key] = trace(model, loss_fn, *arguments, **options)
        return known[key]

    patch.setattr(zbfx.compiling, "trace", remembered)


def told(model: nn.Module, loss_fn: Any, arguments: Any, options: Any) -> str | None:
    """All that decides a trace, None where no text tells it."""
    tensors, found, modes = named_tensors(model, loss_fn), identity(model, loss_fn), Modes.now()
    leaves, structure = pytree.tree_flatten(arguments)
    if found.strange or any(map(is_sharded, tensors.values())) or modes.function_modes:
        return None
    layouts = [(leaf.dtype, leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    devices = [str(tensor.device) for tensor in tensors.values()]
    state = modes.switches, modes.autocasts, modes.keeps_casts, torch.is_grad_enabled()
    return spelled((found.parts, layouts, str(structure), devices, options, state))
