"""One rank of a pipeline over torch.distributed: what it agrees on with the others, and what all hear of a failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor

from zbfx.comm.channels import Channels
from zbfx.comm.group import GroupTransport
from zbfx.comm.history import CLOSE
from zbfx.comm.together import agreed
from zbfx.compiled import Compiled
from zbfx.errors import InputError
from zbfx.program.codegen import Program
from zbfx.program.ops import Transport
from zbfx.runtime.agreement import batch_hashes, refuse_other_batches
from zbfx.runtime.engine import Batch, Engine, rank_engine
from zbfx.runtime.ranks import AllHere, Guarded
from zbfx.runtime.runner import Tensors
from zbfx.runtime.verdict import problems

T = TypeVar("T")


class OneOfMany:
    """This process's rank, whose others are reached over `channels`."""

    share_tensors = False

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.refusals = 0
        self.shapes: Mapping[str, tuple[int, ...]] = {}  # of the last call's batch
        self.compared: set[bool] = set()  # whether the first batch to train, to evaluate, was the same on all ranks

    @property
    def replicas(self) -> int:
        return len(self.channels.place.replicas)

    @property
    def are_open(self) -> bool:
        return self.channels.are_open()

    def begin(self, call: str, *, batch: bool = False) -> None:
        self.channels.history.begin(call, batch=batch)

    def given(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        if self.channels.control is None:  # else once all replicas are known to have such a batch
            self.channels.history.given(shapes)

    def agreed(self, call: str, work: Callable[[], T], arguments: Mapping[str, object], guarded: Guarded) -> T:
        def gather(own: Any) -> list[Any]:
            return guarded(lambda: self.channels.gather(own))

        found: T = agreed(call, work, arguments, gather, self.channels.place.names())
        return found

    def admit(self, take: Callable[[], Batch]) -> Batch:
        """Before the first send: what one replica refuses, all refuse, and all have batches of the same shapes."""
        batch = take() if self.channels.control is None else self.admit_together(take)
        self.compare_first(batch)
        return batch

    def all_refuse(self) -> bool:
        self.refusals += 1
        self.channels.history.refused()
        return self.channels.all_arrive(f"refused {self.refusals}")

    def compare_first(self, batch: Batch) -> None:
        """The first batch is the same in all bits on every rank. Later ones are not compared: that would make the ranks
        wait for each other, and on a GPU for the device."""
        engine, rows = batch
        if engine.pipe.trains not in self.compared:
            names = [spec.name for spec in engine.pipe.signature.tensors]
            refuse_other_batches(self.channels, batch_hashes(names, rows))
            self.compared.add(engine.pipe.trains)

    def admit_together(self, take: Callable[[], Batch]) -> Batch:
        batch, refusal = None, None
        try:
            batch = take()
        except InputError as error:
            refusal = error
        own = None if batch is None else [len(batch[1]), *(tuple(tensor.shape) for tensor in batch[1][0])]
        everywhere = self.channels.gather_peers((own, str(refusal)))
        if refusal is not None:
            raise refusal
        for replica, (shapes, text) in enumerate(everywhere):
            if shapes is None:
                raise InputError(f"replica {replica} refused its batch: {text}")
            if shapes != own:
                raise InputError(
                    f"all replicas take batches of the same shapes; found (microbatches, shapes of one) {own} in "
                    f"replica {self.channels.place.replica}, {shapes} in replica {replica}"
                )
        assert batch is not None, "refused above"
        self.channels.history.given(self.shapes)
        return batch

    def first(self, value: T) -> T:
        found: T = self.along(value)[0]
        return found

    def everywhere(self, value: T) -> list[T]:
        return self.channels.gather(value)

    def along(self, value: T) -> list[T]:
        return self.channels.gather_ranks(value)

    def add_up(self, state: Tensor) -> None:
        self.channels.add_up(state)

    def watched(self) -> AbstractContextManager[None]:
        return self.channels.watched()

    def fail(self, error: BaseException) -> str | None:
        return self.channels.fail(error)

    def leave(self) -> None:
        self.begin(CLOSE)
        # Ranks that go on without this one find that it closed; those that have told of their calls, the difference.
        if (found := self.channels.history.difference()) is not None:
            self.channels.first_fault(found)

    def close(self) -> None:
        self.channels.close()

    def engine(self, pipe: Compiled, tensors: Tensors) -> Engine:
        self.channels.open(pipe.message_pairs)
        return rank_engine(pipe, tensors, self.channels)

    def transports(self, programs: Sequence[Program], pairs: Collection[tuple[int, int]]) -> list[Transport]:
        (program,) = programs
        self.channels.open(pairs)
        return [GroupTransport(program.messages, self.channels)]

    def problems(self, engine: Engine, losses: Sequence[Tensor]) -> list[str]:
        own = problems(self.channels.name, losses, engine.parameters)
        family: list[Any] = self.channels.gather(own)
        everywhere: list[Any] = self.channels.gather_shards([found for rank in family for found in rank])
        return sorted((found for shard in everywhere for found in shard), key=lambda text: "gradient" in text)


Ranks = AllHere | OneOfMany
