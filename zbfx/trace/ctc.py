"""The CTC loss as operators of zbfx, whose results have sizes that the tracer knows.

torch's own operator also returns what its backward needs. The size of that depends on values, the lengths of the
targets, and so one graph cannot hold it. Here the backward computes it again, with the kernels of torch and its bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zbfx import _torch

CTC_OPS = torch.library.Library("zbfx", "FRAGMENT")


def define(name: str, lengths: str, forward: Any, backward: Any) -> Any:
    """Define the operator `name`, which takes log probabilities (steps, rows, classes) and gives the loss of each row.

    `lengths` is the type of the lengths of inputs and targets, in the words of a schema. `forward` and `backward` are
    torch's operators for lengths of this type.
    """
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


BY_TENSORS = define("ctc_loss", "Tensor", _torch.CTC_LOSS.Tensor, _torch.CTC_LOSS_BACKWARD.Tensor)
BY_NUMBERS = define("ctc_loss_of_sizes", "SymInt[]", _torch.CTC_LOSS.default, _torch.CTC_LOSS_BACKWARD.default)


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
