"""The gradients of one step in flat tensors, one a bucket, and what becomes of `.grad`.

A step sums its own gradients from zero, for only those may be summed over the replicas: what `.grad` held before is
added at the end. Where it held nothing, `.grad` is a view of the flat tensor: no memory and no copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zbfx.reductions import Bucket


class FlatGradients:
    """The flat tensors of a rank's buckets. `views` are the gradients in them, by parameter."""

    def __init__(self, buckets: Sequence[Bucket], named: Mapping[str, Tensor]) -> None:
        self.named = {name: named[name] for bucket in buckets for name in bucket.names}
        self.flat: dict[str, Tensor] = {}
        self.views: dict[str, Tensor] = {}
        for bucket in buckets:
            device = self.named[bucket.names[0]].device
            flat = self.flat[bucket.key] = torch.zeros(bucket.size, dtype=bucket.dtype, device=device)
            portions = flat.split(bucket.sizes)
            for name, layout, portion in zip(bucket.names, bucket.layouts, portions, strict=True):
                self.views[name] = portion.as_strided(layout.shape, layout.stride)
        self.before: dict[str, Tensor] = {}

    def start(self) -> None:
        """Zero all sums; `.grad` is a view of them, unless it is a tensor of the user's."""
        self.before = {
            name: parameter.grad.clone() if parameter.grad is self.views[name] else parameter.grad
            for name, parameter in self.named.items()
            if parameter.grad is not None
        }
        for flat in self.flat.values():
            flat.zero_()
        for name, parameter in self.named.items():
            if parameter.grad is None:
                parameter.grad = self.views[name]

    def finish(self) -> None:
        """After the last reduction: add what `.grad` held before the step."""
        for name, before in self.before.items():
            own, view = self.named[name].grad, self.views[name]
            if own is view:
                view.copy_(before.add_(view))
            else:
                before.add_(view)
        self.before = {}
