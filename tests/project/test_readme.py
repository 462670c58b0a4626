"""README.md is true: its snippets and commands run, its pictures are what the commands print, its files exist."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support import documents
from tests.support.documents import ROOT, run
from zbfx.costs.tables import costs_from_json
from zbfx.schedule import names, plan

TEXT = (ROOT / "README.md").read_text()
blocks = partial(documents.blocks, "README.md")
LINES = [line for block in blocks("sh") for line in block.splitlines()]
MAKE = [line for line in LINES if line.startswith("make ")]
COMMANDS = [line.split("#")[0].strip() for line in LINES if line not in MAKE]
OF_ZBFX = [command for command in COMMANDS if command.startswith("python -m zbfx ")]


def pictures() -> list[str]:
    return [block for block in blocks("text") if block.startswith("rank 0 |")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the README names, and links to those of the repository."""
    path = tmp_path_factory.mktemp("readme")
    (costs,) = blocks("json")
    (path / "costs.json").write_text(costs)
    (script,) = (block for block in blocks("python") if "init_process_group" in block)
    (path / "train.py").write_text(script)
    for name in ("examples", "benchmarks"):
        (path / name).symlink_to(ROOT / name)
    return path


@pytest.fixture
def zbfx_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    """What `python -m zbfx` prints, with these arguments and in the folder, but without a process of its own."""

    def run(arguments: list[str]) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["zbfx", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("zbfx", run_name="__main__")
        printed = capsys.readouterr()
        assert ended.value.code == 0, printed.out + printed.err
        return printed.out

    return run


@pytest.mark.processes
def test_python_snippets_run_in_order_and_print_the_program(folder: Path) -> None:
    snippets = [block for block in blocks("python") if "init_process_group" not in block]
    printed = run([sys.executable, "-c", "\n".join(snippets)], folder)
    (program,) = (block for block in blocks("text") if block.startswith("def forward"))
    assert printed.startswith("rank 0 |")
    assert printed[printed.index("def forward") :] == program


@pytest.mark.parametrize("command", OF_ZBFX)
def test_command_of_zbfx_runs(command: str, zbfx_prints: Callable[[list[str]], str]) -> None:
    zbfx_prints(shlex.split(command.removeprefix("python -m zbfx")))


@pytest.mark.processes
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in OF_ZBFX])
def test_command_runs(command: str, folder: Path) -> None:
    printed = run(shlex.split(command), folder)
    if command.startswith("torchrun"):
        # The two ranks may write into one line.
        printed_by_rank = re.findall(r"rank (\d): loss ([\d.]+), trains (\[.*?\])", printed)
        assert [(rank, trained) for rank, _, trained in sorted(printed_by_rank)] == [
            ("0", "['0.weight', '0.bias', '2.weight', '2.bias']"),
            ("1", "['4.weight', '4.bias']"),
        ]
        assert len({loss for _, loss, _ in printed_by_rank}) == 1


@pytest.mark.processes
def test_script_runs_as_two_replicas(folder: Path) -> None:
    (lines,) = blocks("py")
    (folder / "replicas.py").write_text((folder / "train.py").read_text().replace("step = pipe.bind()", lines))
    printed = run(shlex.split("torchrun --nproc-per-node=4 replicas.py"), folder)
    losses = re.findall(r"loss ([\d.]+)", printed)
    assert len(losses) == 4
    assert len(set(losses)) == 1


@pytest.mark.parametrize(("picture", "schedule"), list(zip(pictures(), ("1f1b", "zb-h1"), strict=True)))
def test_pictures_are_what_show_prints(picture: str, schedule: str, zbfx_prints: Callable[[list[str]], str]) -> None:
    options = ["--costs", "costs.json", "--microbatches", "8", "--schedule", schedule, "--width", "80"]
    assert zbfx_prints(["show", *options]).startswith(picture)


def test_figures_of_the_pictures() -> None:
    """The formulas and rates that the README states for its two pictures, and "with the same peak memory"."""
    costs = costs_from_json(json.loads(blocks("json")[0]))
    ours = {name: plan(costs, 8, schedule=name) for name in ("1f1b", "zb-h1", "zb-h2")}
    assert {name: schedule.iteration_s for name, schedule in ours.items()} == {"1f1b": 33, "zb-h1": 27, "zb-h2": 24}
    assert "9/33 for 1F1B, 3/27 for ZB-H1" in " ".join(TEXT.split())
    assert {name: max(schedule.peak_bytes) for name, schedule in ours.items()} == {"1f1b": 8, "zb-h1": 8, "zb-h2": 14}


@pytest.mark.parametrize("command", MAKE)
def test_make_targets_exist(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_files_exist() -> None:
    linked = re.findall(r"\]\(([\w./]+)\)", TEXT)
    quoted = re.findall(r"`((?:zbfx|passes|benchmarks|examples|docs|tests)/[\w./]*)`", TEXT)
    (tree,) = (block for block in blocks("text") if "pipeline.py" in block)
    owner, listed = "", []
    for line in tree.splitlines():
        top, name = re.match(r"(\S*)\s+([\w.]+/?)?", line).groups()  # type: ignore[union-attr]
        owner = top or owner
        listed += [owner, *([owner + name] if name and (name.endswith((".py", ".md", "/"))) else [])]
        listed += [owner + other for other in re.findall(r"[:;] (\w+\.py):", line)]
    assert [path for path in {*linked, *quoted, *listed} if not (ROOT / path).exists()] == []
    assert {"zbfx/pipeline.py", "zbfx/candidate.py", "zbfx/costs/", "docs/numerics.md"} <= set(listed)


def test_schedules_exist() -> None:
    quoted = set(re.findall(r"""[`"](gpipe|1f1b|zb-[\w-]+|v-\w+|interleaved-\w+|ilp|auto)[`"]""", TEXT))
    assert quoted - {"auto"} <= set(names())
    assert set(names()) <= quoted, "the README names every schedule"
