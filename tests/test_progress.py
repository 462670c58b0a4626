"""What takes over two seconds is told on stderr: in one line on a terminal, elsewhere line by line, if asked for."""

from __future__ import annotations

import io
import logging
import time

import pytest
import torch
from torch import nn

import zbfx
from zbfx import progress
from zbfx.errors import ZbfxError
from zbfx.progress import announce, showing


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes long."""
    monkeypatch.setattr(progress, "LONG_S", 0.01)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)


def work(stream: io.StringIO, words: list[str], monkeypatch: pytest.MonkeyPatch, asked: bool | None) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    with showing("call", asked):
        for number, what in enumerate(words, start=1):
            announce(what, number, len(words))
            end_s = time.monotonic() + 5
            while asked and what not in stream.getvalue() and time.monotonic() < end_s:
                time.sleep(0.005)
    return stream.getvalue()


@pytest.mark.usefixtures("soon")
def test_a_file_gets_a_line_for_each_thing_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    text = work(io.StringIO(), ["tracing", "planning"], monkeypatch, asked=True)
    assert text == "call: tracing, 1 of 2\ncall: planning, 2 of 2\n"
    assert work(io.StringIO(), ["tracing"], monkeypatch, asked=None) == ""


@pytest.mark.usefixtures("soon")
def test_a_terminal_gets_one_line_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = work(Terminal(), ["tracing a model", "planning"], monkeypatch, asked=True)
    assert "\n" not in text
    *_, last = written = [line.rstrip() for line in text.split("\r")]
    assert written[1] == "call: tracing a model, 1 of 2, 0 s"
    assert "call: planning, 2 of 2, 0 s" in written
    assert last == ""
    assert work(Terminal(), ["tracing"], monkeypatch, asked=False) == ""


def test_what_is_quick_is_logged_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_S", 60.0)
    found: list[str] = []
    keep = logging.Handler()
    keep.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(progress.LOG, "level", logging.DEBUG)
    monkeypatch.setattr(progress.LOG, "handlers", [keep])
    progress.LOG.manager._clear_cache()  # type: ignore[attr-defined]
    compiled(progress=True)
    assert capsys.readouterr().err == ""
    steps = ["tracing the model", "cutting the graph into 2 stages", "planning an order of actions"]
    steps += ["checking the pipeline on random microbatches"]
    assert list(dict.fromkeys(found)) == steps


def compiled(**options: object) -> zbfx.Pipeline:
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4)
    return zbfx.compile(
        model,
        stages=2,
        microbatches=2,
        example_inputs=(batch,),
        loss_fn=lambda output: output.sum(),
        schedule="1f1b",
        **options,  # type: ignore[arg-type]
    )


def test_progress_is_a_choice() -> None:
    with pytest.raises(ZbfxError, match="progress is True, False or None; found 'yes'"):
        compiled(progress="yes")
