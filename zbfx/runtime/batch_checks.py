"""Whether the ranks of a pipeline go on to get the same batches (`bind(check_batches=N)`).

In: the batch of each step, and torch.distributed's store. Out: how it differs from another rank's, some steps later. No
step waits for another rank or for the device: hashes are made where the tensors are, and go into the store once they
are known. The first rank to write that of a step and an argument settles what those of the others must be."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.runtime.fingerprint import fingerprint, odd_numbers

CHECKS_KEPT = 8  # those whose hashes stay in the store: ranks are at most a few steps apart


@dataclass(frozen=True)
class Hashed:
    """The hashes of a step's batch, in the host's memory once `known`: by argument, one a microbatch."""

    step: int
    hashes: Mapping[str, Tensor]
    known: Sequence[torch.cuda.Event]

    @property
    def is_known(self) -> bool:
        return all(event.query() for event in self.known)


class BatchChecks:
    """Compares the batch of every `every`th step with those of the ranks whose `keys` begin alike."""

    def __init__(self, every: int, store: dist.Store, name: str, keys: str) -> None:
        self.every, self.store, self.name, self.keys = every, store, name, keys
        self.waiting: deque[Hashed] = deque()
        self.numbers: dict[torch.device, Tensor] = {}

    def note(self, step: int, names: Sequence[str], rows: Sequence[Sequence[Tensor]]) -> None:
        """The batch of a step, whose arguments have these names: a row of tensors for each microbatch."""
        if step % self.every:
            return
        hashes, devices = dict[str, Tensor](), set[torch.device]()
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            distinct = list({id(tensor): tensor for tensor in column if not tensor.is_meta}.values())
            if distinct:
                found = torch.stack([fingerprint(tensor, self.numbers_on(tensor.device)) for tensor in distinct])
                devices.add(found.device)
                pinned = torch.empty_like(found, device="cpu", pin_memory=True) if found.is_cuda else found
                hashes[name] = pinned.copy_(found, non_blocking=True)
        events = [torch.cuda.current_stream(device).record_event() for device in devices if device.index is not None]
        self.waiting.append(Hashed(step, hashes, events))

    def numbers_on(self, device: torch.device) -> Tensor:
        if device not in self.numbers:
            self.numbers[device] = odd_numbers().to(device)
        return self.numbers[device]

    def difference(self) -> str | None:
        """How a batch whose hashes are known by now differs from another rank's; None: in nothing that is known."""
        while self.waiting and self.waiting[0].is_known:
            found = self.waiting.popleft()
            for argument, hashes in found.hashes.items():
                own = f"{self.name}: {hashes.tolist()}"
                first = self.store.compare_set(self.key(found.step, argument), "", own).decode()
                self.store.delete_key(self.key(found.step - CHECKS_KEPT * self.every, argument))
                if first.rpartition(": ")[2] != own.rpartition(": ")[2]:
                    return (
                        f"{self.name} was given other values of {argument} than {first.rpartition(': ')[0]} in step "
                        f"{found.step}, as check_batches={self.every} has found; gradients since may be of mixed "
                        f"data. All ranks of a pipeline take the same batches, in all bits: shuffle with the same seed "
                        f"on each (no DistributedSampler over the ranks), or broadcast the batch"
                    )
        return None

    def key(self, step: int, argument: str) -> str:
        return f"{self.keys}, step {step}, {argument}"
