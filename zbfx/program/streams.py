"""Calls on a second stream of the device: a phase that runs beside the actions after it, until it is joined.
In: the module of a phase. Out: a module that runs it on the second stream, and `join`, which waits for it. On a device
without streams the call runs where it stands, and joining does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device on which calls run beside others. There is one for all, because every stream that
    multiplies matrices keeps a workspace of cuBLAS for good."""
    return torch.cuda.Stream(device)


class Beside(nn.Module):
    """A call that runs on `stream`, bound at run time; None: on the stream of the caller. Returns what `join` takes."""

    def __init__(self, call: nn.Module) -> None:
        super().__init__()
        self.call = call
        self.stream: torch.cuda.Stream | None = None

    def forward(self, *args: Any) -> torch.cuda.Event | None:
        self.call(*args)
        return self.end()

    def end(self) -> torch.cuda.Event | None:
        """An event at the end of all that `stream` has been given so far."""
        return None if self.stream is None else self.stream.record_event()


@contextmanager
def on_stream_of(module: nn.Module) -> Iterator[None]:
    """Enter the stream that a module runs on, after everything queued so far."""
    stream = module.stream if isinstance(module, Beside) else None
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def join(event: torch.cuda.Event | None, *values: Any) -> None:
    """Make the caller's stream wait for a call beside it. `values` are what the call reads: as arguments they live
    until here, and nothing else gets their memory while the call still reads it."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
