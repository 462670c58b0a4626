"""Loads the code of a rank's program before its first message.

CUDA loads a kernel at its first call, and may wait meanwhile for all that the device has to do. Where that waits for a
message of a rank that waits for what this one would launch next, both wait for ever: the mean of the losses, a kernel
of a few microseconds, is enough. (CUDA programming guide, lazy loading, potential hazards.) What else may wait is done
here too: compiling, which takes seconds; asking the device for memory, and giving some back where it is short;
connections between replicas, which NCCL makes as they are used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zbfx.graphs import Role, Stage
from zbfx.program.calls import PhaseCall
from zbfx.program.ops import Microbatch
from zbfx.rng import preserved_generators
from zbfx.runtime.rehearsal import rehearse
from zbfx.runtime.runner import RankRunner


def load(
    runner: RankRunner, stages: Sequence[Stage], microbatches: Sequence[Microbatch], step: int, device: torch.device
) -> None:
    """Rehearse the step on these microbatches, and put back as it was what that writes. Takes no more of the device's
    memory than a step does. Collective over the replicas of the rank."""
    assert runner.pending is None, "gradients are bound before, and not once an optimizer step is settled"
    with preserved_generators(device), torch.no_grad(), put_back(written(runner)):
        rehearse(runner, stages, microbatches, step, device)


def written(runner: RankRunner) -> list[Tensor]:
    """What a step of the rank writes: gradients and buffers."""
    found = [tensor for call in runner.calls for tensor in (*call.accumulators, *updated(call))]
    found += [addition.tensor for addition in runner.additions if addition.tensor is not None]
    return list({id(tensor): tensor for tensor in found}.values())


def updated(call: PhaseCall) -> list[Tensor]:
    """The buffers that the call writes."""
    pairs = zip(call.phase.ports, call.ports, strict=True)
    found = [tensor for port, tensor in pairs if port.role is Role.BUFFER and port.name in call.phase.updates]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


@contextmanager
def put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors the values that they have now when it is over, from the host's memory."""
    before = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, old in before:
            tensor.copy_(old)
