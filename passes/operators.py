"""Operators of zbfx in graphs of phases: what torch has no operator for, or what its inductor would change.

zbfx::addmm_(gradient, left, right)   gradient += left right, where the gradient may have a wider dtype than both
zbfx::check(condition, message)       raises where the condition, a tensor, is False
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from zbfx import _torch

LIBRARY = torch.library.Library("zbfx", "FRAGMENT")
LIBRARY.define("addmm_(Tensor(a!) gradient, Tensor left, Tensor right) -> ()")
LIBRARY.define("check(Tensor condition, str message='a check failed') -> ()")
ADD_PRODUCT, CHECK = torch.ops.zbfx.addmm_.default, torch.ops.zbfx.check.default
fx.has_side_effect(CHECK)  # fx would take it for dead code


@torch.library.impl(LIBRARY, "addmm_", "CompositeExplicitAutograd")
def add_product(gradient: Tensor, left: Tensor, right: Tensor) -> None:
    if gradient.dtype is left.dtype:
        gradient.addmm_(left, right)
    else:
        torch.addmm(gradient, left, right, out_dtype=gradient.dtype, out=gradient)


@torch.library.impl(LIBRARY, "check", "CompositeExplicitAutograd")
def assert_true(condition: Tensor, message: str = "a check failed") -> None:
    _torch.ASSERT_WITH_MESSAGE(condition, message)


def widens_in_products(gradient: Tensor, left: Tensor) -> bool:
    """Whether the device multiplies such matrices into a gradient of a wider dtype (torch 2.11 to 2.13: CUDA alone)."""
    return gradient.is_cuda and gradient.dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16)
