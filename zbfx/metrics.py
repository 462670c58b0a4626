"""What a loss function returns beside the loss: named values, and how those of microbatches make that of a batch.

sum     their sum, over microbatches and replicas
mean    their mean; with a `count`, the sum of all values over the sum of all counts, as losses over tokens weigh
max     the largest, entry by entry
last    that of the last microbatch, of the last replica
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import TraceError, ZbfxError


class MetricReduction(StrEnum):
    """How the values of microbatches make that of their batch."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A value that a loss function returns beside the loss, in `(loss, {"name": Metric(...)})`.

    value      a tensor of any shape, the same in every microbatch; no gradient flows from it
    reduction  "mean", "sum", "max" or "last": how the values of microbatches and replicas make that of the batch
    count      a tensor: `value` is a sum over so many, and the batch has the sum of all values over that of all counts

    Raises `ZbfxError` for anything else."""

    value: Tensor
    reduction: str = "mean"
    count: Tensor | None = None

    def __post_init__(self) -> None:
        if self.reduction not in tuple(MetricReduction):
            names = ", ".join(MetricReduction)
            raise ZbfxError(f"a metric's reduction is one of {names}; found {self.reduction!r}")
        if self.count is not None and MetricReduction(self.reduction) is not MetricReduction.MEAN:
            raise ZbfxError(f"a metric with a count is a mean, value over count; found reduction={self.reduction!r}")
        refuse_other("value", self.value)
        if self.count is not None:
            refuse_other("count", self.count)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Metric:
        """A metric of other tensors, made of this one's."""
        return replace(self, value=change(self.value), count=None if self.count is None else change(self.count))


def refuse_other(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ZbfxError(
            f"a metric's {name} is a tensor, made of the outputs or targets of a microbatch; found "
            f"{type(tensor).__name__} {tensor!r}"[:300]
        )
    if tensor.is_complex():
        raise ZbfxError(f"a metric's {name} is real; found {tensor.dtype}")


@dataclass(frozen=True, slots=True)
class MetricKind:
    """What a graph knows of a metric: its name, how it is reduced, and whether it has a count."""

    name: str
    reduction: MetricReduction
    is_counted: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what a microbatch makes for it."""
        return (self.name, f"count of {self.name}") if self.is_counted else (self.name,)

    def dtype_of_batch(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the batch's value, for values of this dtype: sums are exact for integers, and in float32 at
        least for others."""
        if self.reduction in (MetricReduction.MAX, MetricReduction.LAST):
            return dtype
        if dtype.is_floating_point:
            return torch.promote_types(dtype, torch.float32)
        return torch.float64 if self.reduction is MetricReduction.MEAN else torch.int64

    def of_batch(self, values: Tensor, count: Tensor | None = None) -> Tensor:
        """The batch's value, from those of the microbatches of all replicas along dimension 0, and their counts."""
        if self.reduction is MetricReduction.LAST:
            return values[-1]
        if self.reduction is MetricReduction.MAX:
            return values.amax(0)
        total = values.to(self.dtype_of_batch(values.dtype)).sum(0)
        if self.reduction is MetricReduction.SUM:
            return total
        return total / len(values) if count is None else (total / count.double().sum(0)).to(total.dtype)


def metrics_of(found: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics that a loss function returns, by name; a tensor stands for its mean, a pair for (sum, count).
    Raises `TraceError` for anything else."""
    made = {}
    for name, value in found.items():
        if not isinstance(name, str):
            raise TraceError(f"metrics have names, as in (loss, {{'accuracy': value}}); found the name {name!r}")
        match value:
            case Metric():
                made[name] = value
            case Tensor():
                made[name] = Metric(value)
            case (Tensor() as total, Tensor() as count):
                made[name] = Metric(total, count=count)
            case _:
                raise TraceError(
                    f"a metric is a tensor (its mean over microbatches), a pair of tensors (sum, count), or a "
                    f"zbfx.Metric(value, reduction); found {type(value).__name__} for {name!r}"
                )
    return made
