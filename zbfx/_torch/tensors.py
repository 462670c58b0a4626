"""What torch notes of tensors: gradients, hooks, versions and memory; work on many at once; nested ones flattened.

torch.utils._pytree                 2.11.0, 2.13.0   nested inputs to flat leaves with key paths
_foreach_norm, _foreach_copy_       2.11.0, 2.13.0   one kernel for many tensors
UntypedStorage._cdata               2.11.0, 2.13.0   the address of a storage, fake ones included
Tensor.grad_dtype                   2.11.0, 2.13.0   public since 2.10; the dtype of a tensor's gradient
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree

pytree = _pytree
TreeSpec = _pytree.TreeSpec


def gradient_dtype(parameter: Tensor) -> torch.dtype | None:
    """The dtype of a parameter's gradients; None: whichever they have."""
    dtype: torch.dtype | None = parameter.grad_dtype
    return dtype


def set_gradient_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Let a parameter, which has no gradient yet or one of this dtype, have gradients of this dtype."""
    if parameter.grad_dtype is not dtype:
        parameter.grad_dtype = dtype


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether hooks wait for this parameter's gradient (`register_hook`, `register_post_accumulate_grad_hook`)."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_hooks(tensor: Tensor) -> bool:
    """Whether hooks wait for the gradient of a tensor that is no parameter, or it keeps its gradient."""
    return bool(tensor._backward_hooks or tensor.retains_grad)


def version_of(tensor: Tensor) -> int:
    """How often a tensor, or another on its memory, was written in place; inference tensors have no count."""
    return tensor._version


def storage_of(tensor: Tensor) -> int:
    """The address of what a tensor, fake or not, is a view of."""
    return tensor.untyped_storage()._cdata


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, fake or not, are views of one storage."""
    return storage_of(one) == storage_of(other)


def foreach_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, complex ones too, in float64."""
    real = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]
    return list(torch._foreach_norm(real, 2.0, dtype=torch.float64))


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, which may be on another device; in the order of the current stream."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
