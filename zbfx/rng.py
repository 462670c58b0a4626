"""Random numbers that depend on nothing but the seed, the microbatch and the place in the model.

Every random op of the joint graph has a stream number, made from its name. Before the op draws, the generator is set
from the seed of the microbatch and that number. So an op draws the same numbers under every schedule, every cut and
every number of ranks, and an op that is computed again draws what it drew before.
"""

from __future__ import annotations

import threading
import zlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zbfx._torch.operators import ATTENTION, schema_of

MASK_64 = (1 << 64) - 1
ONE_DRAWS = threading.RLock()  # the global generators are those of all threads, some of which run other replicas


def mix(*numbers: int) -> int:
    """A 63-bit hash of a few integers (the finaliser of splitmix64, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
        state ^= state >> 31
    return state >> 1


def stream_number(node_name: str) -> int:
    """The stream number of a random op, from its name in the joint graph."""
    return zlib.crc32(node_name.encode())


def seeded(op: Any, stream: int, seed: int, *args: Any, **kwargs: Any) -> Any:
    """Run a random op on a generator set from `seed` and `stream`. The global generators stay as they were. Under CUDA
    graph capture no generator can be set, and the op draws from the device's default one."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return row_by_row(op, *args, **kwargs)
    devices = {a.device for a in args if isinstance(a, Tensor)} | {torch.device(kwargs.get("device") or "cpu")}
    with ONE_DRAWS, preserved_generators(*devices):
        torch.manual_seed(mix(seed, stream))
        return row_by_row(op, *args, **kwargs)


def row_by_row(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a random op so that an entry's number depends on its indices. Most ops draw in the order of memory, and a
    value's strides depend on where a model is cut: a message fills its memory, and fake versions of some ops tell other
    strides than their kernels have. Results have the strides that the op gives them."""
    given = [argument for argument in args if isinstance(argument, Tensor)]
    draws_by_index = op in ATTENTION or kwargs.get("memory_format") not in (None, torch.preserve_format)
    if draws_by_index or all(argument.is_contiguous() for argument in given):
        return op(*args, **kwargs)
    found = op(*(a.contiguous() if isinstance(a, Tensor) else a for a in args), **kwargs)
    schema = schema_of(op)
    if schema is not None and schema.is_mutable:
        return args[0].copy_(found)

    def with_strides_of_first(result: Tensor) -> Tensor:
        if result.shape != given[0].shape:
            return result
        return torch.empty_like(given[0], dtype=result.dtype).copy_(result)

    if isinstance(found, Tensor):
        return with_strides_of_first(found)
    return tuple(with_strides_of_first(r) if isinstance(r, Tensor) else r for r in found)


def preserved_generators(*devices: torch.device) -> AbstractContextManager[None]:
    """Put the global generators of these devices back as they were, once the block that draws from them ends."""
    accelerators = [device for device in devices if device.type != "cpu"]
    device_type = accelerators[0].type if accelerators else "cuda"
    return torch.random.fork_rng([device.index or 0 for device in accelerators], device_type=device_type)


def generators(device: torch.device) -> list[Tensor]:
    """The states of torch's global generators, of the host and of this device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type != "cpu" else [])]


def same_generators(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
