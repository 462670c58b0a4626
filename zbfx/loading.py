"""Loads the code of a rank's program before its first message.

CUDA loads a kernel at its first call, and may wait meanwhile for all that the device has to do. Where that waits for a
message of a rank that waits for what this one would launch next, both wait for ever: the mean of the losses, a kernel
of a few microseconds, is enough. (CUDA programming guide, lazy loading, potential hazards.) Compiling, which takes
seconds, is done here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from zbfx.boxed import boxed
from zbfx.calls import PhaseCall
from zbfx.graphs import Phase, Role, Stage
from zbfx.lifetimes import reading
from zbfx.made_up import REFUSALS, arguments_of, values_read, without_checks
from zbfx.rehearsal import rehearse
from zbfx.rng import undisturbed
from zbfx.run import RankRunner


def load(runner: RankRunner, stages: Sequence[Stage], device: torch.device) -> None:
    """Call each phase once, on made-up values beside the parameters, and rehearse what lies around them. What they
    write is put back as it was. Nothing here takes more of the device's memory than a step does."""
    phases = {id(call.phase.module): call for call in runner.calls}
    with undisturbed(device), torch.no_grad():
        for call in phases.values():
            with put_back([*call.accumulators, *updated(call)]), suppress(*REFUSALS):
                call_on_made_up(call, stages[call.phase.stage], device)
        with put_back([addition.tensor for addition in runner.additions if addition.tensor is not None]):
            rehearse(runner, stages, device)


@contextmanager
def put_back(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give tensors the values that they have now when it is over, from the host's memory."""
    before = [tensor.to("cpu", copy=True) for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(old)


def updated(call: PhaseCall) -> list[torch.Tensor]:
    """The buffers that the call writes."""
    pairs = zip(call.phase.ports, call.ports, strict=True)
    found = [tensor for port, tensor in pairs if port.role is Role.BUFFER and port.name in call.phase.updates]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def call_on_made_up(call: PhaseCall, stage: Stage, device: torch.device) -> None:
    phase = without_checks(call.phase)
    run = call.run if phase is call.phase else boxed(phase)
    run(arguments(call, phase, stage, device))


def arguments(call: PhaseCall, phase: Phase, stage: Stage, device: torch.device) -> list[Any]:
    """What the phase is called with; the values that it reads are nowhere else."""
    known = dict(enumerate(call.ports))
    read = reading(stage, phase)
    first = len(phase.ports)
    known |= {first + k: value for k, value in values_read(stage, phase, read, read.sizes, device).items()}
    known |= enumerate(call.accumulators, first + len(phase.values))
    makers = arguments_of(phase.module.graph, device)
    return [known[k] if isinstance(known.get(k), torch.Tensor) else make() for k, make in enumerate(makers)]
