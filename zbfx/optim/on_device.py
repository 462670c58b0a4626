"""Clipping and skipping without the process: what a device decides from the state of all ranks, and fused optimizers
of torch take from tensors. In: the state. Out: a step that is final on the device, and numbers that the process reads
once they are there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from zbfx.optim.state import Act, Layout, Rules, Verdict

WITH_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def clips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes from tensors what its gradients are divided by, and whether to leave a step out. What
    divides them is a float32: too short for parameters in float64."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return (
        type(optimizer) in WITH_FUSED
        and all(group.get("fused") for group in optimizer.param_groups)
        and all(p.dtype is not torch.float64 for p in parameters)
    )


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether momentum is there for all parameters with a gradient. A step that the device leaves out makes none for
    them: torch takes memory for it, and leaves that unwritten."""
    return all(
        optimizer.state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        if group.get("momentum")
        for p in group["params"]
        if p.grad is not None
    )


class Ruling:
    """What the device finds from a whole state, and does: the norm of all gradients, the factor that clips them, and
    whether the step is left out. The process reads it while the device goes on."""

    def __init__(self, rules: Rules, layout: Layout, state: Tensor) -> None:
        self.rules, self.layout = rules, layout
        norms = state[: len(layout.names)]
        norm = rules.norm(norms)
        self.factor = rules.factor(norm)
        self.skipped = (1.0 - rules.is_finite(norms)).float()
        found = torch.cat([torch.stack([norm, self.factor]), state])
        self.read_from = torch.empty_like(found, device="cpu", pin_memory=found.is_cuda)
        self.read_from.copy_(found, non_blocking=True)
        self.known = torch.cuda.current_stream().record_event() if found.is_cuda else None

    @property
    def verdict(self) -> Verdict:
        """As all ranks have it: each did what it says."""
        if self.known is not None:
            self.known.synchronize()
        norm, factor, *state = self.read_from.tolist()
        found = self.rules.judge(self.layout, state)
        return replace(found, norm=norm, factor=factor, acts=(Act.KNEW,) * len(self.layout.chain))
