"""Operators that the tracer takes apart in another way than torch, whose way is wrong or does not fit into one graph.

multilabel_margin_loss   torch (2.11 to 2.13) counts the margin to class 0 for each place behind a row's first -1.
ctc_loss                 the size of what it keeps for its backward depends on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zbfx._torch import aten
from zbfx.trace.ctc import ctc_loss

# By the numbers that torch gives its reductions.
REDUCE: Mapping[int, Callable[[Tensor], Tensor]] = {
    0: lambda losses: losses,
    1: Tensor.mean,
    2: Tensor.sum,
}


def multilabel_margin_loss(scores: Tensor, labels: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss of scores (classes,) or (rows, classes), and for each class whether it is among the labels.

    `labels` has the shape of `scores`; the labels of a row end at its first negative number. `reduction` is torch's
    number: 0 for none, 1 for the mean, 2 for the sum.
    """
    shape = scores.shape
    if len(shape) > 2 or labels.shape != shape or scores.numel() == 0:
        raise RuntimeError(
            f"multilabel_margin_loss takes scores and labels of one shape, (classes,) or (rows, classes); found "
            f"{tuple(shape)} and {tuple(labels.shape)}"
        )
    rows, row_labels = torch.atleast_2d(scores), torch.atleast_2d(labels)
    count = rows.shape[-1]
    classes = torch.arange(count, device=labels.device)
    end = torch.where(row_labels < 0, classes, count).amin(-1, keepdim=True)
    is_label = classes < end
    chosen = torch.where(is_label, row_labels, 0)
    is_target = (is_label[..., None] & (chosen[..., None] == classes)).any(-2)
    margins = 1.0 - rows.gather(-1, chosen)[..., None] + rows[..., None, :]  # row, label, class
    counts = is_label[..., None] & ~is_target[..., None, :] & (margins > 0)
    losses = torch.where(counts, margins, 0).sum((-2, -1)) / count
    losses = losses.reshape(shape[:-1]) if len(shape) < 2 else losses
    return REDUCE[reduction](losses), is_target.to(scores.dtype).reshape(shape)


# The functions that take operators apart in place of torch's.
RIGHT: Mapping[Any, Callable[..., Any]] = {
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    aten.ctc_loss.Tensor: ctc_loss,
    aten.ctc_loss.IntList: ctc_loss,
}
