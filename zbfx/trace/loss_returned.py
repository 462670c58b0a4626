"""What a model or a loss function returns for a microbatch -> its loss, a count if there is one, metrics."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import TraceError
from zbfx.trace.refusals import refuse_subclass


def model_loss(output: Any) -> Any:
    """The loss in the output of a model that computes it: the output itself, its `.loss`, or its first entry. Raises
    `TraceError` for a loss and a count, of which only `loss_fn` says what they are."""
    if isinstance(output, dict):
        return output.get("loss")
    if isinstance(output, tuple) and output:
        if len(output) == 2 and is_count(output[1]):
            raise TraceError(
                f"the model returns two numbers, the second of {output[1].dtype}: a loss and a count for information, "
                f"or a sum and its count? Pass loss_fn=lambda output: output[0] for the first, "
                f"loss_fn=lambda output: output for (sum, count)"
            )
        return output[0]
    return getattr(output, "loss", output)


def is_count(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point() and not value.is_complex()


def with_metrics(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """The loss and the metrics of what a loss function returns: a loss, or (loss, metrics)."""
    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned[0], returned[1]
    return returned, {}


def checked_losses(loss: Any) -> tuple[Tensor, Tensor | None]:
    """The loss, and its count if there is one; rows of both for several (sum, count)."""
    if not isinstance(loss, tuple | list):
        return checked_loss(loss, "loss_fn"), None
    if loss and all(isinstance(entry, tuple | list) for entry in loss):
        sums = [checked_loss(entry[0] if entry else entry, "loss_fn") for entry in loss]
        dtype = functools.reduce(torch.promote_types, (entry.dtype for entry in sums))
        counts = [checked_count(entry).double() for entry in loss]
        return torch.stack([entry.to(dtype) for entry in sums]), torch.stack(counts)
    return checked_loss(loss[0] if loss else loss, "loss_fn"), checked_count(loss)


def checked_loss(loss: Any, source: str) -> Tensor:
    """The loss as a scalar. Raises `TraceError` if `source` returned anything that cannot be differentiated."""
    refuse_subclass(f"the loss that {source} returns", loss)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TraceError(
            f"{source} must return a scalar loss; found {found}. "
            f"Pass loss_fn=(outputs, *targets) -> scalar, or let the model return its loss (as `.loss`, or first)"
        )
    if loss.is_complex():
        raise TraceError(
            f"{source} must return a real loss, as backward asks for; found {loss.dtype}. Return its .real, its .abs() "
            f"or another real number made of it"
        )
    if not loss.requires_grad:
        raise TraceError(
            f"the loss that {source} returns does not require grad: no trainable parameter reaches it. "
            f"Check requires_grad of the parameters, and that nothing detaches the loss or runs under torch.no_grad(). "
            f"A loss that computes its own gradient returns it from the backward of a torch.autograd.Function"
        )
    return loss.reshape(()) if loss.ndim else loss


def checked_count(loss: Sequence[Any]) -> Tensor:
    """The count of a (sum, count) loss as a scalar. Raises `TraceError` for any other tuple."""
    if len(loss) != 2 or not isinstance(loss[1], Tensor) or loss[1].numel() != 1:
        raise TraceError(
            f"loss_fn returns a scalar, or (sum, count) of two scalar tensors; found {len(loss)} entries, "
            f"the second {type(loss[1]).__name__ if len(loss) > 1 else 'missing'}. "
            f"Count on tensors: (targets != -100).sum(). Metrics come beside the loss, as in (loss, {{'name': value}})"
        )
    if loss[1].is_complex():
        raise TraceError(f"loss_fn returns (sum, count) of two real scalar tensors; found a count of {loss[1].dtype}")
    return loss[1].detach().reshape(())
