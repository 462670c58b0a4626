"""A checkpoint that is on its way to the disk, in a thread of its own if training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

from zbfx.errors import ZbfxError


class Saved:
    """A checkpoint on its way to the disk. `wait()` until it is whole, which gives its folder; raises `ZbfxError` if it
    could not be written, and those before are as they were. `is_done`: there is nothing to wait for."""

    def __init__(self, write: Callable[[], Path], *, aside: bool) -> None:
        self.path: Path | None = None
        self.error: Exception | None = None
        self.thread = Thread(target=self.run, args=(write,), name="zbfx save") if aside else None
        if self.thread is None:
            self.path = write()
        else:
            self.thread.start()

    def run(self, write: Callable[[], Path]) -> None:
        try:
            self.path = write()
        except Exception as error:  # raised where it is waited for
            self.error = error

    @property
    def is_done(self) -> bool:
        return self.thread is None or not self.thread.is_alive()

    def finish(self) -> None:
        """Wait until nothing is written any more."""
        if self.thread is not None:
            self.thread.join()

    def wait(self) -> Path:
        self.finish()
        if self.error is not None:
            raise ZbfxError(str(self.error)) from self.error
        assert self.path is not None, "written"
        return self.path
