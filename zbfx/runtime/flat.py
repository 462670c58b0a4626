"""The gradients of one step in flat tensors, one a bucket, and what becomes of `.grad`; with ZeRO-1 the parameters too.
A step sums its own gradients from zero, for only those may be summed over the replicas: what `.grad` held before is
added at the end. Where it held nothing, `.grad` is a view of the flat tensor: no memory and no copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from zbfx._torch.tensors import set_gradient_dtype, version_of
from zbfx.errors import InputError, listed
from zbfx.program.reductions import Bucket


def flattened(
    bucket: Bucket, dtype: torch.dtype, device: torch.device, replicas: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """A flat tensor for a bucket, zeros as far as a multiple of the replicas, and the views of its entries."""
    padded = -(-bucket.size // replicas) * replicas
    flat = torch.zeros(padded, dtype=dtype, device=device)
    portions = zip(bucket.names, bucket.layouts, flat[: bucket.size].split(bucket.sizes), strict=True)
    return flat, {name: portion.as_strided(layout.shape, layout.stride) for name, layout, portion in portions}


class Shards:
    """ZeRO-1: this replica's share of the parameters of each bucket, as one flat parameter that an optimizer steps. The
    model's parameters become views of flat tensors, `flat` by bucket, of which a shard is a contiguous part."""

    def __init__(self, buckets: Sequence[Bucket], named: Mapping[str, Tensor], replica: int, replicas: int) -> None:
        self.buckets, self.replica, self.replicas = tuple(buckets), replica, replicas
        self.flat: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}  # by bucket
        self.views: dict[str, Tensor] = {}
        for bucket in buckets:
            flat, views = flattened(bucket, bucket.parameter_dtype, named[bucket.names[0]].device, replicas)
            for name, view in views.items():
                view.copy_(named[name].detach())
                named[name].data = view
            self.views |= views
            self.flat[bucket.key] = flat
            self.parameters[bucket.key] = nn.Parameter(self.own(flat))
            set_gradient_dtype(self.parameters[bucket.key], bucket.dtype)
        self.collected()

    def own(self, flat: Tensor) -> Tensor:
        return flat.chunk(self.replicas)[self.replica]

    def collected(self) -> None:
        """The flat tensors have the values that the shards of all replicas have now."""
        self.seen = [version_of(parameter) for parameter in self.parameters.values()]

    @property
    def is_collected(self) -> bool:
        """Whether no optimizer has stepped this replica's shards since."""
        return self.seen == [version_of(parameter) for parameter in self.parameters.values()]

    def check(self, named: Mapping[str, Tensor]) -> None:
        """Raises `InputError` if a parameter is no view of a flat tensor any more: new values would not reach it."""
        moved = [name for name, view in self.views.items() if named[name].data_ptr() != view.data_ptr()]
        if moved:
            raise InputError(
                f"with zero=1 parameters are views of flat tensors; found {listed(moved, 3)} in memory of their own, "
                f"as after model.to(...) or parameter.data = ...: bind the pipeline again, or copy values in place"
            )


class FlatGradients:
    """The flat tensors of a rank's buckets. `views` are the gradients in them, by parameter; `results` are the tensors
    that end up in `.grad` of `owners`: of the same memory as the views, or with ZeRO-1 as this replica's share of each
    flat tensor. A model that is moved takes them along."""

    def __init__(self, buckets: Sequence[Bucket], named: Mapping[str, Tensor], shards: Shards | None = None) -> None:
        self.flat: dict[str, Tensor] = {}
        self.views: dict[str, Tensor] = {}
        for bucket in buckets:
            device = named[bucket.names[0]].device
            replicas = shards.replicas if shards else 1
            self.flat[bucket.key], views = flattened(bucket, bucket.dtype, device, replicas)
            self.views |= views
        self.owners: Mapping[str, Tensor] = shards.parameters if shards else {name: named[name] for name in self.views}
        self.places = {key: shards.own(flat) for key, flat in self.flat.items()} if shards else self.views
        self.results: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}

    def start(self) -> None:
        """Zero all sums; `.grad` is a view of them, unless it is a tensor of the user's."""
        for name, place in self.places.items():
            if name not in self.results or self.results[name].data_ptr() != place.data_ptr():
                self.results[name] = place.detach()
        self.before = {
            name: owner.grad.clone() if owner.grad is self.results[name] else owner.grad
            for name, owner in self.owners.items()
            if owner.grad is not None
        }
        for flat in self.flat.values():
            flat.zero_()
        for name, owner in self.owners.items():
            if owner.grad is None:
                owner.grad = self.results[name]

    def finish(self) -> None:
        """After the last reduction: add what `.grad` held before the step."""
        for name, before in self.before.items():
            own, result = self.owners[name].grad, self.results[name]
            if own is result:
                result.copy_(before.add_(result))
            else:
                before.add_(result)
        self.before = {}
