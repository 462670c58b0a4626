"""Scripts for torchrun, run by the ranks of the pool: these have imported already what takes seconds."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import pytest
import torch.distributed as dist

from tests.support.pool import Launch


class Printed(NamedTuple):
    out: str
    err: str


def run_as(rank: int, script: str, arguments: tuple[str, ...], folder: str) -> tuple[str, str]:
    """What a script, or a module by its name, writes on this rank, to stdout and to stderr. Its environment is that of
    torchrun, whose store is the pool's."""
    world = dist.get_world_size()
    dist.destroy_process_group()
    told: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "tests"}
    with ExitStack() as stack:
        out, err = (stack.enter_context(TemporaryFile("w+")) for _ in range(2))  # with numbers, for faulthandler
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in told.items():
            patch.setenv(name, str(value))
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script, *arguments])
        patch.setattr(sys, "path", [*sys.path])
        warnings.simplefilter("default")
        try:
            if script.endswith(".py"):
                runpy.run_path(script, run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"{script} ended with {ended.code}: {written(err)}") from ended
        return written(out), written(err)


def written(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def run_on_ranks(
    launch: Launch, world: int, script: str | os.PathLike[str], arguments: Sequence[str] = (), folder: Path = Path()
) -> dict[int, Printed]:
    """What each rank writes, as `torchrun --nproc-per-node={world}` would start them in a folder."""
    found = launch(world, run_as, str(script), tuple(arguments), str(folder.resolve()))
    return {rank: Printed(*printed) for rank, printed in found.items()}
