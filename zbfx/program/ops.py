"""The functions that rank programs call to exchange values, and the protocol of the transport behind them.
In: a `Transport`, which programs get as an argument, and the key of a message or of a bucket. Out: values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zbfx.program.messages import TensorLayout
from zbfx.trace.signature import TensorSpec


class Microbatch(NamedTuple):
    """The tensors of one microbatch by name, and the seed of its random numbers."""

    inputs: Mapping[str, Tensor]
    seed: int


class Transport(Protocol):
    """Moves messages between the ranks of a pipeline; `key` names a message of the rank's program, `name` the rank.
    Messages of one channel, from one rank to another, arrive in the order of sending, and in that order they must be
    posted. `ready(key)`: the message has come, or may be released without waiting. `sent` are the keys of messages that
    are not released yet. `join` waits for all that is on its way, and returns the keys of what is posted."""

    @property
    def name(self) -> str: ...

    @property
    def sent(self) -> Collection[str]: ...
    def post(self, key: str) -> None: ...
    def ready(self, key: str) -> bool: ...
    def receive(self, key: str) -> tuple[Tensor, ...]: ...
    def send(self, key: str, values: tuple[Tensor, ...]) -> None: ...
    def release(self, key: str) -> None: ...
    def reduce(self, key: str, gradients: Tensor) -> None: ...
    def reduced(self, key: str) -> None: ...
    def gather(self, key: str, parameters: Tensor) -> None: ...
    def gathered(self, key: str) -> None: ...
    def finish(self) -> None: ...
    def drop(self) -> None: ...
    def posted_once(self, key: str) -> None: ...
    def join(self) -> set[str]: ...


def post(transport: Transport, key: str) -> None:
    """Get ready for a message that will be received."""
    transport.post(key)


def receive(transport: Transport, key: str) -> tuple[Tensor, ...]:
    return transport.receive(key)


def send(transport: Transport, key: str, values: tuple[Tensor, ...]) -> None:
    """Hand values over to another rank; they may still be on their way when this returns."""
    transport.send(key, values)


def release(transport: Transport, key: str) -> None:
    """Wait until a sent message has arrived, and let go of its values."""
    transport.release(key)


def reduce(transport: Transport, key: str, gradients: Tensor) -> None:
    """Start to sum a flat tensor of gradients over the replicas, in place."""
    transport.reduce(key, gradients)


def reduced(transport: Transport, key: str) -> None:
    transport.reduced(key)


def gather(transport: Transport, key: str, parameters: Tensor) -> None:
    """Start to collect the replicas' shards of a flat tensor of parameters, in place."""
    transport.gather(key, parameters)


def gathered(transport: Transport, key: str) -> None:
    transport.gathered(key)


def laid_out(value: Tensor, layout: TensorLayout | TensorSpec) -> Tensor:
    """The value with the strides that the receiver's graph was traced with."""
    assert value.shape == layout.shape, (value.shape, layout)
    assert value.dtype == layout.dtype, (value.dtype, layout)
    if value.stride() == layout.stride:
        return value
    result = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=value.device)
    return result.copy_(value)
