"""How a rank's program runs: phase by phase from Python, with compiled phases, or as one captured CUDA graph.

eager               the phases' aten ops, launched from Python
inductor            each phase compiled by torch.compile, after the split
cudagraph           the whole step of the rank, sends and receives included, captured once and replayed
cudagraph+inductor  compiled phases, captured
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import ZbfxError
from zbfx.graphs import Phase
from zbfx.step import RankStep

BACKENDS = ("eager", "inductor", "cudagraph", "cudagraph+inductor")


def checked_backend(backend: str, device: torch.device) -> str:
    if backend not in BACKENDS:
        raise ZbfxError(f"backend is one of {', '.join(BACKENDS)}; found {backend!r}")
    if backend.startswith("cudagraph") and device.type != "cuda":
        raise ZbfxError(
            f"backend={backend!r} captures CUDA graphs and needs a CUDA device; found {device}. Use 'eager'"
        )
    return backend


def phase_compiler(backend: str) -> Callable[[Phase], Callable[..., Any]]:
    """What turns a phase into the function that runs it."""
    if "inductor" not in backend:
        return lambda phase: phase.module
    return lambda phase: torch.compile(phase.module, fullgraph=not phase.is_random, dynamic=False)


class CapturedStep(RankStep):
    """A step as one CUDA graph. The first call runs eagerly, and warms everything up; the second captures, without
    running anything, and replays; later calls copy the batch into static buffers and replay.

    Random ops draw from the device's default generator, in program order: masks differ from those of other backends.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static_rows: list[list[Tensor]] = []
        self.static_loss: Tensor | None = None
        self.runner.keep_gradients = True

    def execute(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        if self.count == 0:
            self.static_rows = [[tensor.to(self.device, copy=True) for tensor in row] for row in rows]
            return super().execute(self.static_rows)
        for static_row, row in zip(self.static_rows, rows, strict=True):
            for static, tensor in zip(static_row, row, strict=True):
                static.copy_(tensor, non_blocking=True)
        if self.graph is None or self.runner.recorder is not None:
            self.capture()
        else:
            self.runner.start_gradients()
        assert self.graph is not None, "captured"
        assert self.static_loss is not None, "captured"
        if self.runner.recorder is not None:
            self.channels.barrier()
            self.runner.recorder.start = self.runner.recorder.mark()
        self.graph.replay()
        return self.static_loss.clone()

    def capture(self) -> None:
        torch.cuda.synchronize()
        self.runner.start(self.loss_gradient)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.static_loss = self.run_program(self.static_rows)
        except RuntimeError as error:
            raise ZbfxError(
                f"this step cannot be captured as a CUDA graph: {error}. Use backend='eager' or 'inductor'"
            ) from error
        self.graph = graph
