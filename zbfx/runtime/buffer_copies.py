"""What forwards write, such as the statistics of a batch norm, is each replica's own. Processes that go on when others
end (`zbfx.runtime.survival`) keep a copy of every replica's, as of the last step's end. In: an engine. Out: bytes, a
row a replica; they are of the buffers of one rank, in the order of their names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zbfx.comm.seats import Seat
from zbfx.runtime.engine import Engine


def buffers_written(engine: Engine) -> dict[str, Tensor]:
    """The buffers that forwards of a rank write, in the order of their names."""
    runner = engine.runners[0]
    names = sorted({name for call in runner.calls for name in call.phase.updates})
    return {name: runner.tensors.named[name] for name in names}


def buffer_row(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, one after the other."""
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unpack(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """Give tensors the values of these bytes."""
    parts = row.split([tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a copy begins where its dtype may


class BufferCopies:
    """`before`: the rows before the step that runs; None: all replicas' are alike. `after`: those that it leaves, once
    they have come."""

    def __init__(self) -> None:
        self.before: Tensor | None = None
        self.after: Tensor | None = None

    def begin(self, engine: Engine, own: Seat, replicas: int) -> None:
        """A step begins; what the user has written into this process's buffers is part of it."""
        row = buffer_row([*buffers_written(engine).values()])
        if self.before is None:
            self.before = torch.stack([row] * replicas)
        self.before[own.replica] = row
        self.after = None

    def take(self, engine: Engine) -> None:
        """Tell the other replicas what a seat's step has left, and hear what theirs have. Collective over the seats of
        a rank."""
        assert engine.channels is not None, "of a rank among others"
        row = buffer_row([*buffers_written(engine).values()])
        self.after = engine.channels.from_replicas(row) if len(row) else self.before

    def end(self) -> None:
        """The step is over, on all."""
        self.before = self.after

    def give(self, engine: Engine, seat: Seat, *, is_over: bool) -> None:
        """Give an engine the buffers of a seat: those after the step that is over, or before the one that will run
        again."""
        rows = self.after if is_over else self.before
        assert rows is not None, "a step has begun"
        unpack(rows[seat.replica], [*buffers_written(engine).values()])
