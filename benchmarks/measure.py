"""Time training steps: the same way for every system."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Runnable:
    """A system that is ready to run: `step` launches one training step and returns the loss on ranks that have it.

    `parameters` are this rank's; their gradients are zeroed in place between steps, outside of the timing.
    """

    step: Callable[[], Tensor | None]
    parameters: Iterable[Tensor]
    layers: list[int] | None = None  # blocks of each stage
    planned_ms: float | None = None
    planned_gib: list[float] | None = None
    close: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Measured:
    """What one rank saw: seconds of each timed step, peak memory since `reset_peak`, and the loss if it has it."""

    step_s: list[float]
    peak_gib: float | None
    loss: float | None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Peak memory counts from here: before parameters are allocated, after everything that a plan measures."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def barrier() -> None:
    """All ranks leave together (a sum over gloo, which costs no device time)."""
    dist.all_reduce(torch.zeros(1))


def measure(
    runnable: Runnable, device: torch.device, *, warmup: int, repeats: int, keep_gradients: bool = True
) -> Measured:
    """Run `warmup` steps, then time `repeats`, which all ranks begin at the same moment. Gradients are zeroed in place
    before each step, or, unless `keep_gradients`, set to None."""
    loss, step_s = None, []
    for index in range(warmup + repeats):
        for parameter in runnable.parameters:
            if not keep_gradients:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        synchronize(device)
        barrier()
        begun = perf_counter()
        loss = runnable.step()
        synchronize(device)
        if index >= warmup:
            step_s.append(perf_counter() - begun)
    return Measured(step_s, peak_gib(device), None if loss is None else float(loss.detach()))
