"""What a step asks of the ranks of its pipeline: all here, in one process, or one of them, with the others elsewhere.

Calls that other ranks make too are collective: every rank makes them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from zbfx.comm.local import LocalTransport, Mailbox
from zbfx.compiled import Compiled
from zbfx.program.codegen import Program
from zbfx.program.ops import Transport
from zbfx.runtime.engine import Batch, Engine, local_engine
from zbfx.runtime.runner import Tensors
from zbfx.runtime.verdict import problems

T = TypeVar("T")

Guarded = Callable[[Callable[[], Any]], Any]  # does what other ranks wait for, and lets them hear of a failure


class AllHere:
    """All ranks in this process, on the same tensors: they take turns, and there is nobody to agree with."""

    replicas = 1
    share_tensors = True
    are_open = True  # ranks reach each other

    def __init__(self) -> None:
        self.mailbox = Mailbox()

    def begin(self, call: str, *, batch: bool = False) -> None:
        """A call that every rank makes begins; `batch`: the shapes of its batch follow (`given`)."""

    def given(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """The shapes of the call's batch, by name."""

    def agreed(self, call: str, work: Callable[[], T], arguments: Mapping[str, object], guarded: Guarded) -> T:
        """Do `work` on every rank. What one rank refuses, all refuse, as they do arguments that differ."""
        return work()

    def admit(self, take: Callable[[], Batch]) -> Batch:
        """The batch of a call, once all ranks and replicas have one like it."""
        return take()

    def all_refuse(self) -> bool:
        """Whether the other ranks have refused the batch too, and need not hear of it."""
        return True

    def first(self, value: T) -> T:
        """The first rank's picklable value, on all ranks of the pipeline."""
        return value

    def everywhere(self, value: T) -> list[T]:
        """The picklable value of every process of all replicas, in order."""
        return [value]

    def along(self, value: T) -> list[T]:
        """The picklable value of every process of this pipeline, in order."""
        return [value]

    def add_up(self, state: Tensor) -> None:
        """Overwrite `state` with its sum over all processes of the pipeline."""

    def watched(self) -> AbstractContextManager[None]:
        """What the device must get through in time."""
        return nullcontext()

    def fail(self, error: BaseException) -> str | None:
        """Tell the other ranks why this one fails, or learn why they do; the first failure of all. None: nobody else
        has to hear of it, and the step can be called again."""
        return None

    def leave(self) -> None:
        """No further call follows: tell the others."""

    def close(self) -> None:
        """Let go of all connections."""

    def engine(self, pipe: Compiled, tensors: Tensors) -> Engine:
        """The pipeline's programs of this process on live tensors, connected."""
        return local_engine(pipe, tensors, self.mailbox)

    def transports(self, programs: Sequence[Program], pairs: Collection[tuple[int, int]]) -> list[Transport]:
        """How further programs of this process's ranks exchange their messages, which go between these `pairs`."""
        return [LocalTransport(f"rank {program.rank}", program.messages, self.mailbox) for program in programs]

    def problems(self, engine: Engine, losses: Sequence[Tensor]) -> list[str]:
        """What is not finite on any rank after a step."""
        found = problems("this process", losses, {})
        return found + [bad for r in engine.runners for bad in problems(f"rank {r.rank}", (), r.parameters)]
