"""Time training steps: the same way for every system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

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
    """What one rank saw: seconds of each timed step in a row of steps and of each by itself, peak memory since
    `reset_peak`, and the loss if it has it."""

    step_s: list[float]
    single_s: list[float]
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


class Marks:
    """Points in time on a rank's device, which neither the device nor the process waits at."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.points: list[Any] = []

    def set(self) -> None:
        if self.device.type == "cuda":
            self.points.append(torch.cuda.Event(enable_timing=True))
            self.points[-1].record()
        else:
            self.points.append(perf_counter())

    def intervals_s(self) -> list[float]:
        synchronize(self.device)
        if self.device.type == "cuda":
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self.points)]
        return [end - begin for begin, end in pairwise(self.points)]


def measure(
    runnable: Runnable, device: torch.device, *, warmup: int, repeats: int, keep_gradients: bool = True
) -> Measured:
    """Run `warmup` steps, then time half of `repeats`, each of which all ranks begin at the same moment, and `repeats`
    in a row, as training runs them: no rank waits for another but for its messages. Gradients are zeroed in place
    before each step, or, unless `keep_gradients`, set to None."""
    # Never steps: it zeroes all gradients at once.
    gradients = torch.optim.SGD(runnable.parameters, lr=0.0)
    loss, single_s = None, []
    for index in range(warmup + max(1, repeats // 2)):
        gradients.zero_grad(set_to_none=not keep_gradients)
        synchronize(device)
        barrier()
        begun = perf_counter()
        loss = runnable.step()
        synchronize(device)
        if index >= warmup:
            single_s.append(perf_counter() - begun)
    marks = Marks(device)
    for _ in range(1 + repeats):  # the first fills the pipeline
        gradients.zero_grad(set_to_none=not keep_gradients)
        loss = runnable.step()
        marks.set()
    return Measured(marks.intervals_s(), single_s, peak_gib(device), None if loss is None else float(loss.detach()))


def step_ms(everyone: Sequence[Measured]) -> tuple[float, float]:
    """Milliseconds of a step in a row of steps, the median on the slowest rank, and of the slowest one."""
    return 1e3 * max(median(one.step_s) for one in everyone), 1e3 * max(max(one.step_s) for one in everyone)


def single_ms(everyone: Sequence[Measured]) -> float:
    """Milliseconds of a step by itself, as long as its slowest rank: the median."""
    return 1e3 * median(max(step) for step in zip(*(one.single_s for one in everyone), strict=True))
