"""A step whose phases are launched one by one, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from zbfx.runtime.engine import Engine
from zbfx.runtime.loading import load

LOADS = ("cuda",)  # devices on which a first call may wait for all others

Results = tuple[tuple[Tensor, ...], Tensor]  # the losses of the microbatches, and the loss of the batch


class Running(Protocol):
    """What a run needs of the step that it is part of."""

    count: int

    def seed_of_step(self) -> int: ...

    def settle_first(self, engine: Engine) -> None: ...


class Launched:
    """Runs an engine's programs, node by node. Code is loaded before the first message."""

    def prepare(self, engine: Engine) -> None:
        """An engine that this is going to run was made."""

    def check_pending(self, engines: Sequence[Engine]) -> None:
        """Raises `InputError` where a step cannot follow while an optimizer step waits for its verdict."""

    def run(self, step: Running, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Results:
        device = engine.pipe.device
        loads = engine.runs == 0 and engine.channels is not None and device.type in LOADS
        if loads:
            step.settle_first(engine)
        for runner in engine.runners:
            runner.start(engine.loss_gradient)
        if loads:
            for runner in engine.runners:
                inputs = engine.inputs(rows, runner, step.seed_of_step())
                load(runner, engine.pipe.stages, inputs, step.count, device)
                del inputs  # the run makes its own
        engine.start_clocks()
        return engine.run(rows, step.seed_of_step(), step.count), engine.batch_loss
