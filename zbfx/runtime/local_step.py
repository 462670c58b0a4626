"""A step in one process: all ranks of a pipeline, and what becomes of it when one fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from zbfx.comm.local import LocalTransport, Mailbox
from zbfx.plan import Schedule
from zbfx.program.codegen import Program
from zbfx.program.ops import Transport
from zbfx.runtime.engine import Engine, local_engine
from zbfx.runtime.step import Step, StepOptions
from zbfx.runtime.verdict import problems

if TYPE_CHECKING:
    from zbfx.pipeline import Pipeline

T = TypeVar("T")


class LocalStep(Step):
    """All ranks of a pipeline in this process, one after the other as their messages allow: same results, no speed."""

    def __init__(self, engine: Engine, options: StepOptions, mailbox: Mailbox) -> None:
        super().__init__(engine, options)
        self.mailbox = mailbox

    def let_go(self) -> None:
        self.others.clear()

    def begin(self, call: str, *, batch: bool = False) -> None:
        """All ranks are here."""

    def agreed(self, call: str, work: Callable[[], T], arguments: Mapping[str, object]) -> T:
        """All ranks are here."""
        return work()

    def given(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """All ranks are here."""

    def plan(self, find: Callable[[Any], Schedule]) -> Schedule:
        return find(self.engine.pipe.request)

    def build(self, pipe: Pipeline) -> Engine:
        return local_engine(pipe, self.engine.runners[0].tensors.of(pipe.joint), self.mailbox)

    def run(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        engine.weigh(rows)
        for runner in engine.runners:
            runner.start(engine.loss_gradient)
        self.losses = self.guarded(lambda: engine.run(rows, self.seed_of_step(), self.count))
        for runner in engine.runners:
            runner.finish_gradients()
        return engine.batch_loss

    def guarded(self, work: Callable[[], T]) -> T:
        """After a failure nothing is on its way: the step can be called again."""
        try:
            return work()
        except BaseException:
            self.drop()
            raise

    def transports(self, programs: Sequence[Program], pairs: Collection[tuple[int, int]]) -> list[Transport]:
        return [LocalTransport(f"rank {program.rank}", program.messages, self.mailbox) for program in programs]

    def add_up(self, state: Tensor) -> None:
        """All ranks are here."""

    def everywhere(self, value: Any) -> list[Any]:
        return [value]

    def problems(self, engine: Engine) -> list[str]:
        found = problems("this process", self.losses, {})
        return found + [bad for r in engine.runners for bad in problems(f"rank {r.rank}", (), r.parameters)]
