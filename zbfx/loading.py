"""Loads the code of a rank's program before its first message.

CUDA loads a kernel at its first call, and may wait meanwhile for all that the device has to do. Where that waits for a
message of a rank that waits for what this one would launch next, both wait for ever: the mean of the losses, a kernel
of a few microseconds, is enough. (CUDA programming guide, lazy loading, potential hazards.) Compiling, which takes
seconds, is done here too.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from zbfx.boxed import boxed
from zbfx.calls import PhaseCall
from zbfx.graphs import Role
from zbfx.made_up import REFUSALS, arguments_of, without_checks
from zbfx.rehearsal import rehearse
from zbfx.rng import undisturbed
from zbfx.run import RankRunner


def load(runner: RankRunner, device: torch.device) -> None:
    """Call each phase once, on made-up values beside the parameters, and rehearse what lies around them. What a phase
    writes is put back as it was, from the host's memory: the device may have no room for copies."""
    phases = {id(call.phase.module): call for call in runner.calls}
    with undisturbed(device), torch.no_grad():
        for call in phases.values():
            written = [*call.accumulators, *updated(call)]
            before = [tensor.to("cpu", copy=True) for tensor in written]
            with suppress(*REFUSALS):
                call_on_made_up(call, device)
            for tensor, old in zip(written, before, strict=True):
                tensor.copy_(old)
        rehearse(runner, device)


def updated(call: PhaseCall) -> list[torch.Tensor]:
    """The buffers that the call writes."""
    pairs = zip(call.phase.ports, call.ports, strict=True)
    found = [tensor for port, tensor in pairs if port.role is Role.BUFFER and port.name in call.phase.updates]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def call_on_made_up(call: PhaseCall, device: torch.device) -> None:
    phase = without_checks(call.phase)
    run = call.run if phase is call.phase else boxed(phase)
    known = [*call.ports, *[None] * len(phase.values), *call.accumulators]
    makers = arguments_of(phase.module.graph, device)
    known += [None] * (len(makers) - len(known))
    pairs = zip(known, makers, strict=True)
    run([tensor if isinstance(tensor, torch.Tensor) else make() for tensor, make in pairs])
