"""Calls on a second stream of the device: a phase that runs beside the actions after it, until it is joined.

On a device without streams the call runs where it stands, and joining does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """A device's stream for what runs beside the rest, one for all: every stream that multiplies matrices keeps a
    workspace of cuBLAS for good."""
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
        """All that `stream` has to do by now."""
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
    """Wait, on the caller's stream, for a call beside it. Names the values that the call reads: they live until here,
    because memory that is let go earlier would be given to others while the call still reads it."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
