"""The norm of all gradients of a model, and gradients clipped by it, where processes hold them in parts.

In: an engine's gradients. Out: the norm that one process with all of them would find. A parameter that several ranks
hold counts on the first of them, one that every shard has whole on shard 0, and with ZeRO-1 each replica counts its own
part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zbfx.comm.place import Place
from zbfx.errors import ZbfxError
from zbfx.program.messages import parameter_holders
from zbfx.runtime.engine import Engine
from zbfx.runtime.ranks import Ranks
from zbfx.trace.tensor_parallel import is_cut, is_sharded

SMALL = 1e-6  # what torch adds to a norm that it divides by


def checked_norms(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """The largest norm and the kind of norm, as numbers."""
    try:
        largest, kind = float(max_norm), float(norm_type)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ZbfxError(f"max_norm and norm_type are numbers; found {max_norm!r} and {norm_type!r}") from error
    if not largest >= 0 or not kind > 0:
        raise ZbfxError(
            f"max_norm is a number >= 0, and norm_type one > 0 (inf: the largest gradient); found {max_norm!r} and "
            f"{norm_type!r}"
        )
    return largest, kind


def gradients(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """The gradients of this process by the names of parameters; with ZeRO-1 this replica's parts of them."""
    if engine.shards is None:
        yield from ((name, p.grad) for name, p in engine.parameters.items() if p.grad is not None)
        return
    for bucket in engine.shards.buckets:
        gradient = engine.shards.parameters[bucket.key].grad
        if gradient is not None:
            begin = -engine.shards.replica * gradient.numel()
            for name, size in zip(bucket.names, bucket.sizes, strict=True):
                part = gradient[max(begin, 0) : max(begin + size, 0)]
                begin += size
                if part.numel():
                    yield name, part


def counted(engine: Engine, named: Mapping[str, Tensor], place: Place | None) -> list[Tensor]:
    """The gradients that this process counts among all. `named` are the model's parameters."""
    if place is None:
        return [gradient for _, gradient in gradients(engine)]
    holders = parameter_holders(engine.pipe.stages, engine.pipe.placement)
    is_first_shard = place.family % place.shard_count == 0
    if place.shard_count > 1 and not any(map(is_sharded, named.values())):
        raise ZbfxError(
            "clip_grad_norm_ knows the shards of a model by its DTensor parameters; found none, on a mesh with the "
            "dimension 'tp'. Call parallelize_module(model, mesh['tp'], ...) before compile"
        )
    return [
        gradient
        for name, gradient in gradients(engine)
        if holders[name][0] == place.rank and (is_first_shard or is_cut(named[name]))
    ]


@torch.no_grad()
def clip(engine: Engine, ranks: Ranks, named: Mapping[str, Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Multiply all gradients so that their norm is `max_norm` at most, without waiting for the device; returns the norm
    before. Collective over all ranks, replicas and shards."""
    pipe, is_largest = engine.pipe, math.isinf(norm_type)
    parts = counted(engine, named, engine.channels.place if engine.channels else None)
    found = torch.zeros(1, dtype=torch.float64, device=pipe.device)
    if parts:
        real = [part.abs() if part.is_complex() else part for part in parts]
        norms = torch.stack([torch.linalg.vector_norm(part, norm_type, dtype=torch.float64) for part in real])
        found[0] = norms.max() if is_largest else norms.pow(norm_type).sum()
    ranks.reduce(found, is_largest=is_largest, over_replicas=engine.shards is not None)
    norm = found[0] if is_largest else found[0].pow(1 / norm_type)
    factor = (max_norm / (norm + SMALL)).clamp(max=1.0)
    for parameter in engine.parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return norm.to(torch.promote_types(pipe.reduction.dtype, torch.float32))
