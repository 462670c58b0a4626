"""What the memory tests compare predictions with: live storages, counted while a rank's program runs.

Storages that operators make while the counter is on count from then until the last reference to them is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zbfx
from zbfx import rng
from zbfx.comm.local import LocalTransport, Mailbox
from zbfx.program import ops
from zbfx.program.messages import Message
from zbfx.runtime.engine import take_turns
from zbfx.runtime.runner import RankRunner, Tensors, Wait


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made under it; `peak` is the most at any time, also when it is off."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.paused = False
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given and storage.nbytes():
                    self.add(storage)
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        assert address not in self.known, "an operator returned a storage that it was not given"

        def gone(_: Any) -> None:
            del self.known[address]
            self.live -= size

        self.known[address] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


class HoldingTransport(LocalTransport):
    """Messages within one process that hold what messages between processes hold: receives from when they are posted,
    sent values until they are released. What travels between the ranks is a copy that no rank counts."""

    def __init__(self, messages: Mapping[str, Message], mailbox: Mailbox, counter: LiveBytes) -> None:
        super().__init__("counted", messages, mailbox)
        self.counter = counter
        self.buffers: dict[str, tuple[Tensor, ...]] = {}
        self.held: dict[str, tuple[Tensor, ...]] = {}

    def post(self, key: str) -> None:
        super().post(key)
        self.buffers[key] = tuple(
            torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
            for layout in self.messages[key].layouts
        )

    def receive(self, key: str) -> tuple[Tensor, ...]:
        values = self.buffers.pop(key)
        for value, arrived in zip(values, super().receive(key), strict=True):
            value.copy_(arrived)
        return values

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        layouts = self.messages[key].layouts
        self.held[key] = tuple(ops.laid_out(value, layout) for value, layout in zip(values, layouts, strict=True))
        self.counter.paused = True
        super().send(key, tuple(value.clone() for value in self.held[key]))
        self.counter.paused = False

    def release(self, key: str) -> None:
        super().release(key)
        del self.held[key]


def counted(run: Generator[Wait, None, Any], counter: LiveBytes) -> Generator[Wait, None, Any]:
    """The same run with the counter on whenever it moves."""
    while True:
        with counter:
            try:
                position = next(run)
            except StopIteration as end:
                return end.value
        yield position


def measured_peaks(pipe: zbfx.Pipeline, rows: Sequence[Sequence[Tensor]], steps: int = 1) -> list[LiveBytes]:
    """Per rank, the counter after so many steps on these microbatches."""
    tensors = Tensors(pipe.source.tensors, pipe.compiled.joint.constants)
    mailbox = Mailbox()
    counters = [LiveBytes() for _ in pipe.programs]
    specs = pipe.compiled.signature.tensors
    runners = []
    for program, counter in zip(pipe.programs, counters, strict=True):
        adds = {gradient.name for gradient in pipe.compiled.shared_gradients if gradient.holders[0] == program.rank}
        transport = HoldingTransport(program.messages, mailbox, counter)
        runners.append(RankRunner(program, tensors, transport, adds))
    microbatches = [
        ops.Microbatch({s.name: ops.laid_out(t, s) for s, t in zip(specs, row, strict=True)}, rng.mix(0, k))
        for k, row in enumerate(rows)
    ]
    scale = torch.ones((), dtype=pipe.compiled.reduction.dtype) / len(rows)
    runners[pipe.compiled.loss_rank].summarize = lambda *losses: (pipe.compiled.reduction.combine(losses, scale),)
    with torch.no_grad():
        for _ in range(steps):
            for runner in runners:
                runner.start(scale)
            runs = [counted(r.run(microbatches, 0), c) for r, c in zip(runners, counters, strict=True)]
            take_turns(runs)
    return counters
