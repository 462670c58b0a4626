"""What a step asks of the ranks of its pipeline: all here, in one process, or one of them, with the others elsewhere.
Calls that other ranks make too are collective: every rank makes them, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zbfx.comm.channels import Channels
from zbfx.comm.group import GroupTransport
from zbfx.comm.history import CLOSE
from zbfx.comm.local import LocalTransport, Mailbox
from zbfx.comm.together import agreed
from zbfx.compiled import Compiled
from zbfx.errors import InputError, PipelineFault, ZbfxError
from zbfx.program.codegen import Program
from zbfx.program.ops import Transport
from zbfx.runtime.agreement import batch_hashes, refuse_other_batches
from zbfx.runtime.batch_checks import BatchChecks
from zbfx.runtime.engine import Batch, Engine, T, local_runners, rank_engine
from zbfx.runtime.runner import Tensors
from zbfx.runtime.verdict import NonFinite, problems

Guarded = Callable[[Callable[[], Any]], Any]  # does what other ranks wait for, and lets them hear of a failure


class AllHere:
    """All ranks in this process, on the same tensors: they take turns, and there is nobody to agree with."""

    replicas = 1
    shards = 1
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

    def admit(self, take: Callable[[], Batch], *, apart: bool = False) -> Batch:
        """The batch of a call, once all ranks and replicas have one like it. `apart`: `take` settles with them which
        batches they have."""
        return take()

    def all_refuse(self) -> bool:
        """Whether the other ranks have refused the batch too, and need not hear of it."""
        return True

    def check_batch(self, step: int, batch: Batch) -> None:
        """Compare the batches of a training step of this number with those of other ranks, and raise if they differ."""

    def check_batches(self) -> None:
        """Raise if batches of earlier steps are known by now to differ."""

    def names(self) -> list[str]:
        """The names of all processes of all replicas, in order."""
        return ["this process"]

    def everywhere(self, value: T) -> list[T]:
        """The picklable value of every process of all replicas, in order."""
        return [value]

    def before_step(self, value: T) -> list[T]:
        """What `everywhere` does, without waiting for what devices have to do."""
        return [value]

    def along(self, value: T) -> list[T]:
        """The picklable value of every process of this pipeline, in order."""
        return [value]

    def aside(self) -> Callable[[T], list[T]]:
        """What `everywhere` does, for calls from another thread beside those of this one."""
        return lambda value: [value]

    def add_up(self, state: Tensor) -> None:
        """Overwrite `state` with its sum over all processes of the pipeline."""

    def reduce(self, value: Tensor, *, is_largest: bool, over_replicas: bool) -> None:
        """Overwrite `value` with its sum over all processes that hold parts of the model, or with the largest one."""

    def watched(self) -> AbstractContextManager[None]:
        """What the device must get through in time."""
        return nullcontext()

    def fail(self, error: BaseException, let_go: Callable[[], None]) -> str | None:
        """Tell the other ranks why this one fails, or learn why they do; the first failure of all. Then `let_go` of
        what is on its way. None: nobody else has to hear of it, and the step can be called again."""
        let_go()
        return None

    def leave(self) -> None:
        """No further call follows: tell the others."""

    def close(self) -> None:
        """Let go of all connections."""

    def engine(self, pipe: Compiled, tensors: Tensors) -> Engine:
        """The pipeline's programs of this process on live tensors, connected."""
        return self.running(pipe, tensors)

    def running(self, pipe: Compiled, tensors: Tensors) -> Engine:
        """As `engine`, for programs whose messages go between ranks that are connected."""
        return Engine(pipe, local_runners(pipe, pipe.programs, tensors, self.mailbox))

    def transports(self, programs: Sequence[Program], pairs: Collection[tuple[int, int]]) -> list[Transport]:
        """How further programs of this process's ranks exchange their messages, which go between these `pairs`."""
        return [LocalTransport(f"rank {program.rank}", program.messages, self.mailbox) for program in programs]

    def problems(self, engine: Engine, losses: Sequence[Tensor]) -> list[str]:
        """What is not finite on any rank after a step."""
        found = [problems(f"rank {runner.rank}", losses, runner.parameters) for runner in engine.runners]
        return found[0].losses + [text for rank in found for text in rank.gradients]


class OneOfMany:
    """This process's rank, whose others are reached over `channels`."""

    share_tensors = False

    def __init__(self, channels: Channels, check_batches: int = 0) -> None:
        """`check_batches`: how often to compare batches (`zbfx.runtime.batch_checks`); 0: the first one alone."""
        self.channels, place = channels, channels.place
        keys = f"batches of replica {place.replica}"
        store = channels.history.store
        self.checks = BatchChecks(check_batches, store, channels.name, keys) if check_batches else None
        self.refusals = 0
        self.shapes: Mapping[str, tuple[int, ...]] = {}  # of the last call's batch
        self.compared: set[bool] = set()  # whether the first batch to train, to evaluate, was the same on all ranks

    @property
    def replicas(self) -> int:
        return len(self.channels.place.replicas)

    @property
    def shards(self) -> int:
        """In how many processes each stage's parameters are cut."""
        return self.channels.place.shard_count

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

        return agreed(call, work, arguments, gather, self.channels.place.names())

    def admit(self, take: Callable[[], Batch], *, apart: bool = False) -> Batch:
        """Before the first send: what one replica refuses, all refuse, and all have batches of the same shapes."""
        batch = take() if apart or self.channels.control is None else self.admit_together(take)
        self.compare_first(batch)
        return batch

    def check_batch(self, step: int, batch: Batch) -> None:
        if self.checks is not None:
            engine, rows = batch
            self.checks.note(step, [spec.name for spec in engine.pipe.signature.tensors], rows)
            self.check_batches()

    def check_batches(self) -> None:
        found = None if self.checks is None else self.checks.difference()
        if found is not None:
            raise PipelineFault(found)

    def all_refuse(self) -> bool:
        self.refusals += 1
        self.channels.history.refused()
        return self.channels.history.all_arrive(f"refused {self.refusals}", len(self.channels.place.names()))

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

    def names(self) -> list[str]:
        return self.channels.place.names()

    def everywhere(self, value: T) -> list[T]:
        return self.channels.gather(value)

    def before_step(self, value: T) -> list[T]:
        return self.channels.gather_before_step(value)

    def along(self, value: T) -> list[T]:
        return self.channels.gather_ranks(value)

    def aside(self) -> Callable[[T], list[T]]:
        return self.channels.gather_aside()

    def add_up(self, state: Tensor) -> None:
        dist.all_reduce(state, group=self.channels.group)

    def reduce(self, value: Tensor, *, is_largest: bool, over_replicas: bool) -> None:
        self.channels.reduce(value, is_largest=is_largest, over_replicas=over_replicas)

    def watched(self) -> AbstractContextManager[None]:
        return self.channels.watched()

    def fail(self, error: BaseException, let_go: Callable[[], None]) -> str | None:
        return self.channels.fail(error, let_go)

    @contextmanager
    def binding(self) -> Iterator[None]:
        """What other ranks wait for in `bind`: they hear of a failure. What all refuse alike is none."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, ZbfxError) and not isinstance(error, PipelineFault):
                raise
            fault = self.channels.fail(error)
            if not isinstance(error, Exception):
                raise
            raise PipelineFault(fault) from error

    def leave(self) -> None:
        self.begin(CLOSE)
        # Ranks that go on without this one find that it closed; those that have told of their calls, the difference.
        if (found := self.channels.history.difference()) is not None:
            self.channels.history.first_fault(found)

    def close(self) -> None:
        self.channels.close()

    def engine(self, pipe: Compiled, tensors: Tensors) -> Engine:
        self.channels.open(pipe.message_pairs)
        return self.running(pipe, tensors)

    def running(self, pipe: Compiled, tensors: Tensors) -> Engine:
        return rank_engine(pipe, tensors, self.channels)

    def transports(self, programs: Sequence[Program], pairs: Collection[tuple[int, int]]) -> list[Transport]:
        (program,) = programs
        self.channels.open(pairs)
        return [GroupTransport(program.messages, self.channels)]

    def problems(self, engine: Engine, losses: Sequence[Tensor]) -> list[str]:
        family: list[NonFinite] = self.channels.gather(problems(self.channels.name, losses, engine.parameters))
        everywhere = [found for shard in self.channels.gather_shards(family) for found in shard]
        texts = [text for found in everywhere for text in found.losses]
        return texts + [text for found in everywhere for text in found.gradients]


Ranks = AllHere | OneOfMany
