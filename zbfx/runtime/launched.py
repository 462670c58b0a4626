"""A step whose phases are launched one by one, from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from zbfx.runtime.engine import Engine
from zbfx.runtime.loading import load

LOADS = ("cuda",)  # devices on which a first call may wait for all others

Results = tuple[tuple[Tensor, ...], Tensor]  # the losses of the microbatches, and the loss of the batch


class Launched:
    """Runs an engine's programs, node by node. Code is loaded before the first message."""

    def prepare(self, engine: Engine) -> None:
        """An engine that this is going to run was made."""

    def check_pending(self, engines: Iterable[Engine]) -> None:
        """Raises `InputError` where a step cannot follow while an optimizer step waits for its verdict."""

    def run(
        self, engine: Engine, rows: Sequence[Sequence[Tensor]], seed: int, step: int, settle: Callable[[], None]
    ) -> Results:
        """The losses of step number `step`, whose random numbers follow `seed`. `settle` ends an optimizer step that
        waits for its verdict, for runs in which its gradients are bound anew."""
        device = engine.pipe.device
        loads = engine.runs == 0 and engine.channels is not None and device.type in LOADS
        if loads:
            settle()
        for runner in engine.runners:
            runner.start(engine.loss_gradient)
        if loads:
            for runner in engine.runners:
                inputs = engine.inputs(rows, runner, seed)
                load(runner, engine.pipe.stages, inputs, step, device)
                del inputs  # the run makes its own
        engine.start_clocks()
        return engine.run(rows, seed, step), engine.batch_loss
