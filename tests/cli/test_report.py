"""`python -m zbfx report`: of costs, of a model, with a measured step; what it says, and where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import zbfx
from tests.cli.test_check import MODEL
from tests.support.pool import Launch
from tests.support.scripts import run_on_ranks
from zbfx.cli import main

STAGE = {"t_f": 2, "t_b": 3, "t_w": 5, "m_b": 4, "m_w": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "costs.json").write_text(json.dumps({"stages": [STAGE] * 2, "t_comm": 7}))
    own = 'def planned():\n    return {**pipeline(), "schedule": "gpipe", "microbatches": 2}\n'
    (tmp_path / "user_model.py").write_text(MODEL + own)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def views_of(path: Path) -> list[Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return list(json.loads(data)["views"])


def test_of_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--costs", "costs.json", "--microbatches", "2", "--schedule", "zb-h1"]) == 0
    printed = capsys.readouterr()
    assert re.fullmatch(r"wrote report.html \(0.\d MB\)\n", printed.out)
    assert [view["name"] for view in views_of(folder / "report.html")] == ["zb-h1", "gpipe", "1f1b"]


@pytest.mark.slow
def test_of_a_model_with_a_measured_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["report", "user_model.py:planned", "--microbatches", "4", "--schedule", "1f1b", "--profile"]
    assert main([*command, "--compare", "zb-h1", "--out", "mine.html"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("wrote mine.html (")
    assert [line.split()[1] for line in printed.err.splitlines()] == ["compiling", "running", "planning"]
    first, second = views_of(folder / "mine.html")
    assert (first["name"], second["name"]) == ("1f1b", "zb-h1")
    assert [lane["name"] for lane in first["lanes"]] == ["plan 0", "step 0", "plan 1", "step 1"]
    assert len(first["lanes"][1]["actions"].split()) == 2 * 4, "F and B: these layers' Ws are empty"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "report takes a model (FILE.py:FUNCTION), or --costs and --microbatches; found neither"),
        (["user_model.py:pipeline", "--costs", "costs.json"], "found both"),
        (["--costs", "costs.json"], "report --costs takes --microbatches; found none"),
        (["--costs", "costs.json", "--microbatches", "2", "--profile"], "found --profile, which runs a model"),
        (["user_model.py:planned", "--seed", "1"], "--budget and --seed are of plans from --costs"),
        (["user_model.py"], "report takes FILE.py:FUNCTION"),
        (["--costs", "costs.json", "--microbatches", "2", "--out", "no/such/folder.html"], "cannot write"),
        (["--costs", "costs.json", "--microbatches", "2", "--compare", "gpip"], "gpip"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("more", "name"), [([], "gpipe"), (["--schedule", "zb-h1"], "zb-h1"), (["--improve"], None)])
def test_of_a_model_as_it_says_or_as_it_is_asked(folder: Path, more: list[str], name: str | None) -> None:
    assert main(["report", "user_model.py:planned", "--compare", "--mem-limit", "9x", *more]) == 0
    (view,) = views_of(folder / "report.html")
    assert name is None or view["name"] == name
    assert sum(len(lane["actions"].split()) for lane in view["lanes"]) in (8, 12), "two microbatches on two ranks"


def test_a_model_is_shown_planned_and_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "user_model.py:planned", "--width", "60", "--svg", "s.svg"]) == 0
    assert "data-action" in (folder / "s.svg").read_text()
    assert capsys.readouterr().out == "wrote s.svg\n"
    assert main(["plan", "user_model.py:planned", "--schedule", "1f1b", "--microbatches", "3"]) == 0
    assert capsys.readouterr().out.startswith("rank 0: F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2\n")
    assert main(["compare", "user_model.py:planned", "--json", "--mem-limit", "2x"]) == 0
    rows = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["zb-h1"]["microbatches"] == 2
    assert "error" in rows["zb-v"]
    assert main(["compare", "user_model.py:planned", "--mem-limit", "2x"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"gpipe +│ +[\d.]+ µs │", printed)
    assert "found (0, 1). The model is cut for it by --schedule zb-v\n" in printed


def test_a_profile_says_what_each_rank_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--trace", "t.json", "--svg", "t.svg", "--html", "t.html"]
    assert main(["profile", "user_model.py:pipeline", "--microbatches", "4", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"Profile\(.*\); measured: (\d+%|no) idle", lines[0])
    assert [line.split(":")[0] for line in lines[1:3]] == ["rank 0 idles", "rank 1 idles"]
    assert lines[3:] == ["wrote t.html", "wrote t.svg", "wrote t.json"]
    assert {e["pid"] for e in json.loads((folder / "t.json").read_text())["traceEvents"]} == {0, 1}


@pytest.mark.parametrize("command", [["profile"], ["report", "--profile"]])
@pytest.mark.parametrize("file", ["no/such/page.html", "."])
def test_a_place_that_cannot_be_written_is_found_before_a_step_runs(
    command: list[str], file: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("zbfx.measured_step.measured_step")
    option = "--html" if command == ["profile"] else "--out"
    assert main([*command, "user_model.py:pipeline", option, file]) == 2
    assert f"cannot write {file}: " in capsys.readouterr().err
    assert not list(folder.glob("**/.*html*"))


@pytest.mark.slow
def test_a_profile_over_processes(launch: Launch, folder: Path) -> None:
    printed = run_on_ranks(launch, 2, "zbfx", ["profile", "user_model.py:pipeline"], folder)
    assert [line.split(":")[0] for line in printed[0].out.splitlines()[1:]] == ["rank 0 idles", "rank 1 idles"]
    assert printed[1].out == ""
    assert "zbfx: running 3 steps over 2 processes" in printed[0].err


def test_files_are_written_whole_or_not_at_all(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show = ["show", "--costs", "costs.json", "--microbatches", "2", "--schedule", "zb-h1", "--svg"]
    assert main([*show, "s.svg"]) == 0
    assert capsys.readouterr().out == "wrote s.svg\n"
    before, files = (folder / "s.svg").read_text(), set(folder.iterdir())

    def full(path: Path, text: str) -> None:
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main([*show, "s.svg"]) == 2
    assert capsys.readouterr().err == "zbfx: error: cannot write s.svg: No space left on device\n"
    assert main([*show, str(folder)]) == 2
    assert (folder / "s.svg").read_text() == before
    assert set(folder.iterdir()) == files


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"zbfx {zbfx.__version__}\n"
