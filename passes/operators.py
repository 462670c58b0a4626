"""Operators of zbfx in graphs of phases: what torch has no operator for, or what its inductor would change.

zbfx::addmm_(gradient, left, right)   gradient += left right, where the gradient may have a wider dtype than both
zbfx::add_rows_(gradient, rows, indices, padding_index)
                                      gradient[indices] += rows, where indices may repeat; nothing at `padding_index`
zbfx::check(condition, message)       raises where the condition, a tensor, is False; within `noting_checks`, notes both
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from zbfx._torch.operators import ASSERT_WITH_MESSAGE

LIBRARY = torch.library.Library("zbfx", "FRAGMENT")
LIBRARY.define("addmm_(Tensor(a!) gradient, Tensor left, Tensor right) -> ()")
LIBRARY.define("add_rows_(Tensor(a!) gradient, Tensor rows, Tensor indices, int padding_index) -> ()")
LIBRARY.define("check(Tensor condition, str message='a check failed') -> ()")
ADD_PRODUCT, CHECK = torch.ops.zbfx.addmm_.default, torch.ops.zbfx.check.default
ADD_ROWS = torch.ops.zbfx.add_rows_.default
fx.has_side_effect(CHECK)  # fx would take it for dead code


@torch.library.impl(LIBRARY, "addmm_", "CompositeExplicitAutograd")
def add_product(gradient: Tensor, left: Tensor, right: Tensor) -> None:
    if gradient.dtype is left.dtype:
        gradient.addmm_(left, right)
    else:
        torch.addmm(gradient, left, right, out_dtype=gradient.dtype, out=gradient)


@torch.library.impl(LIBRARY, "addmm_", "Meta")
@torch.library.impl(LIBRARY, "add_rows_", "Meta")
@torch.library.impl(LIBRARY, "check", "Meta")
def do_nothing(*_: Any) -> None:
    """What inductor runs on fake tensors, which are written to no purpose, and have no values to check. (torch 2.11 has
    no fake version of a product into a wider dtype.)"""


@torch.library.impl(LIBRARY, "add_rows_", "CompositeExplicitAutograd")
def add_rows(gradient: Tensor, rows: Tensor, indices: Tensor, padding_index: int) -> None:
    """Rows of equal index are summed first, in float32 at least, as by the dense gradient of an embedding, and rounded
    once. The sum is kept at one of their places, so that each row of the gradient gets one sum and zeros."""
    indices, rows = indices.reshape(-1), rows.reshape(-1, rows.shape[-1])
    places = torch.arange(len(indices), device=indices.device)
    one = torch.zeros(len(gradient), dtype=torch.long, device=indices.device)
    one[indices] = places  # of several, whichever is written last
    owner = one[indices]
    wide = torch.promote_types(rows.dtype, torch.float32)
    sums = torch.zeros_like(rows, dtype=wide).index_add_(0, owner, rows.to(wide))
    counts = (owner == places) & (indices != padding_index)
    gradient.index_add_(0, indices, sums.where(counts[:, None], 0).to(gradient.dtype))


@torch.library.impl(LIBRARY, "check", "CompositeExplicitAutograd")
def assert_true(condition: Tensor, message: str = "a check failed") -> None:
    noted = NOTED.get()
    if noted is None:
        ASSERT_WITH_MESSAGE(condition, message)
    else:
        noted.append((message, condition.clone()))  # the memory of a condition may be used again


Noted = list[tuple[str, Tensor]]  # checks: what a failed one says, and its condition
NOTED: ContextVar[Noted | None] = ContextVar("noted", default=None)


@contextmanager
def noting_checks(noted: Noted | None) -> Iterator[None]:
    """Meanwhile checks are noted here, and raise nothing; None: they raise. No graph of CUDA can raise, and a check on
    weights that an optimizer may yet take back is not to."""
    token = NOTED.set(noted)
    try:
        yield
    finally:
        NOTED.reset(token)


def widens_in_products(gradient: Tensor, left: Tensor) -> bool:
    """Whether the device multiplies such matrices into a gradient of a wider dtype (torch 2.11 to 2.13: CUDA alone)."""
    return gradient.is_cuda and gradient.dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16)
