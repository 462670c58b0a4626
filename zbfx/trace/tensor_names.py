"""The names of a model's and a loss's tensors: all that each has, and the one that the pipeline calls it by."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

MODEL_PREFIX, LOSS_PREFIX = "model.", "loss_fn."  # in an `Objective`; a loss module's have theirs in a pipeline, too


def named_tensors(model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    """Every parameter and buffer under each of its names. The names of a loss module's begin with `loss_fn.`."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **{name: tensor for _, _, name, tensor in plain_tensors(model)},
    }
    if isinstance(loss_fn, nn.Module):
        named |= {LOSS_PREFIX + name: tensor for name, tensor in named_tensors(loss_fn, None).items()}
    return named


def plain_tensors(model: nn.Module) -> list[tuple[nn.Module, str, str, Tensor]]:
    """The tensors that modules hold as plain attributes, each with its module, attribute and qualified name."""
    return [
        (module, attribute, f"{prefix}.{attribute}" if prefix else attribute, value)
        for prefix, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    ]


def canonical_names(model: nn.Module, loss_fn: Any) -> dict[str, str]:
    """For each name of a parameter or buffer, the first name of its tensor, which is what `named_parameters()` says."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(model, loss_fn).items()}
