"""What becomes of errors while a step is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zbfx.runtime.captured import part


@contextmanager
def lines_used() -> Iterator[list[Any]]:
    yield []


class Capture:
    """Ends as torch's does: with an error of its own where one has ended it, and on another stream."""

    def __init__(self, *_: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> None:
        torch.cuda.set_stream("that captures")  # type: ignore[arg-type]

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            raise RuntimeError("capturing stream has unjoined work")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ArithmeticError("on purpose"), None])
def test_what_ends_a_capture_is_raised(error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ["the user's"]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    channels: Any = SimpleNamespace(lines_used=lines_used, device="cuda:0")

    def run() -> None:
        if error is not None:
            raise error

    if error is None:
        graph: Any = part(run, channels).graph
        assert graph == "graph"
        return
    with pytest.raises(type(error)) as caught:
        part(run, channels)
    assert caught.value is error
    assert streams == ["the user's", "that captures", "the user's"]
