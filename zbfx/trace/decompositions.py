"""Operators that the tracer takes apart in another way than torch, whose way is wrong or does not fit into one graph.

multilabel_margin_loss   torch (2.11 to 2.13) counts the margin to class 0 for each place behind a row's first -1.
ctc_loss                 what torch keeps for its backward has a size that depends on values, the targets' lengths.
                         Operators of zbfx, whose backward computes that again, give torch's bits with its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zbfx._torch.operators import CTC_LOSS, CTC_LOSS_BACKWARD, aten

# By the numbers that torch gives its reductions.
REDUCE: Mapping[int, Callable[[Tensor], Tensor]] = {0: lambda losses: losses, 1: Tensor.mean, 2: Tensor.sum}


def multilabel_margin_loss(scores: Tensor, labels: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss of scores (classes,) or (rows, classes), and for each class whether it is among the labels. `labels` has
    the shape of `scores`; the labels of a row end at its first negative number. `reduction` is torch's number: 0 for
    none, 1 for the mean, 2 for the sum."""
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


CTC_OPS = torch.library.Library("zbfx", "FRAGMENT")


def define(name: str, lengths: str, forward: Any, backward: Any) -> Any:
    """Define the operator `name`, which takes log probabilities (steps, rows, classes) and gives the loss of each row.
    `lengths` is the type of the lengths of inputs and targets, in the words of a schema. `forward` and `backward` are
    torch's operators for lengths of this type."""
    rest = f"Tensor log_probs, Tensor targets, {lengths} input_lengths, {lengths} target_lengths, int blank, "
    rest += "bool zero_infinity) -> Tensor"
    CTC_OPS.define(f"{name}({rest}")
    CTC_OPS.define(f"{name}_backward(Tensor gradient, {rest}")
    backward_name = f"zbfx::{name}_backward"

    def losses(*args: Any) -> Any:
        return forward(*args)[0]

    def gradient_of(gradient: Tensor, *args: Any) -> Any:
        *of, blank, zero_infinity = args
        return backward(gradient, *of, *forward(*args), blank, zero_infinity)

    def backpropagate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, targets, *tensors = ctx.saved_tensors
        sizes = tensors or ctx.sizes
        found = getattr(torch.ops.zbfx, f"{name}_backward").default(gradient, log_probs, targets, *sizes, *ctx.options)
        return found, None, None, None, None, None

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        log_probs, targets, *sizes, blank, zero_infinity = inputs
        ctx.sizes, ctx.options = sizes, (blank, zero_infinity)
        ctx.save_for_backward(log_probs, targets, *(size for size in sizes if isinstance(size, Tensor)))

    CTC_OPS.impl(name, losses, "CompositeExplicitAutograd")
    CTC_OPS.impl(f"{name}_backward", gradient_of, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zbfx::{name}", lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1]))
    torch.library.register_fake(backward_name, lambda _, log_probs, *__: log_probs.new_empty(log_probs.shape))
    torch.library.register_autograd(f"zbfx::{name}", backpropagate, setup_context=remember)
    return getattr(torch.ops.zbfx, name).default


BY_TENSORS = define("ctc_loss", "Tensor", CTC_LOSS.Tensor, CTC_LOSS_BACKWARD.Tensor)
BY_NUMBERS = define("ctc_loss_of_sizes", "SymInt[]", CTC_LOSS.default, CTC_LOSS_BACKWARD.default)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """What `torch.ctc_loss` gives for log probabilities (steps, rows, classes), or (steps, classes) of one row.

    `reduction` is torch's number: 0 for the losses of the rows, 1 for their mean by letters and rows, 2 for their sum.
    """
    rows = log_probs if log_probs.dim() == 3 else log_probs[:, None]
    by = BY_TENSORS if isinstance(input_lengths, Tensor) else BY_NUMBERS
    losses = by(rows, targets.to(rows.device, torch.long), input_lengths, target_lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction == 1:
        letters = torch.as_tensor(target_lengths).to(losses.device, losses.dtype)
        return (losses / letters.clamp_min(1)).mean()
    return losses.sum() if reduction == 2 else losses if log_probs.dim() == 3 else losses[0]


# The functions that take operators apart in place of torch's.
RIGHT: Mapping[Any, Callable[..., Any]] = {
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    aten.ctc_loss.Tensor: ctc_loss,
    aten.ctc_loss.IntList: ctc_loss,
}
