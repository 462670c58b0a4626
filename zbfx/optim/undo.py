"""The exact way back: a copy of what a step of the optimizer is about to change.
In: an optimizer and its parameters, before a step. Out: both as they were, bit for bit, after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zbfx._torch.tensors import foreach_copy
from zbfx.memory.predict import available_bytes

MARGIN_BYTES = 1 << 28  # device memory that copies leave free


class Undo:
    """Copies of parameters and of their optimizer state, in memory that is used again in every step. They live on the
    parameters' device while it has room, otherwise in pinned memory of the host."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of the live tensor
        self.states: list[tuple[Tensor, dict[str, Any]]] = []  # what each parameter's state held

    @torch.no_grad()
    def save(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        """Copy the parameters and their state as they are before a step."""
        live = {id(tensor): tensor for tensor in (*parameters, *state_tensors(optimizer, parameters))}
        self.copies = {key: self.copies.get(key) or (tensor, room_for(tensor)) for key, tensor in live.items()}
        foreach_copy([copy for _, copy in self.copies.values()], [tensor for tensor, _ in self.copies.values()])
        self.states = [(parameter, dict(optimizer.state.get(parameter, {}))) for parameter in parameters]

    def has_room(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> bool:
        """Whether there is memory, on the device or the host, for the copies that have none yet."""
        tensors = [*parameters, *state_tensors(optimizer, parameters)]
        missing = sum(tensor.nbytes for tensor in tensors if id(tensor) not in self.copies)
        on_device = [tensor.device for tensor in tensors if tensor.is_cuda]
        if not missing or (on_device and torch.cuda.mem_get_info(on_device[0])[0] > missing + MARGIN_BYTES):
            return True
        return missing + MARGIN_BYTES < available_bytes()

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Put everything back as it was, bit for bit."""
        foreach_copy([tensor for tensor, _ in self.copies.values()], [copy for _, copy in self.copies.values()])
        for parameter, values in self.states:
            state = optimizer.state.pop(parameter, {})
            state.clear()
            state.update(values)
            if state:
                optimizer.state[parameter] = state

    @property
    def bytes(self) -> int:
        return sum(copy.nbytes for _, copy in self.copies.values())


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                yield value


def room_for(tensor: Tensor) -> Tensor:
    """Memory for a copy: on the tensor's device, or pinned on the host where that is full."""
    if tensor.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(tensor.device)
        if free < tensor.nbytes + MARGIN_BYTES:
            return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
    return torch.empty_like(tensor, requires_grad=False)
