"""The command line, by value: output, messages, exit status."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from zbfx.cli import main

TABLE = {
    "stages": [{"t_f": 2, "t_b": 3, "t_w": 5, "m_b": 4, "m_w": 1}] * 2,
    "t_comm": 7,
}


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(TABLE))
    return str(path)


def test_plan_prints_json_with_the_documented_fields(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--costs", costs, "--microbatches", "2", "--schedule", "zb-h1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(plan) == [
        "schedule", "microbatches", "placement", "mem_limit", "iteration_time", "planned_time", "bubble_rate",
        "peak_memory", "lower_bound", "gap", "seconds", "notes", "ranks",
    ]  # fmt: skip
    assert (plan["schedule"], plan["iteration_time"], plan["peak_memory"]) == ("zb-h1", 37, [8, 5])
    assert plan["bubble_rate"] == pytest.approx(1 - 20 / 37, rel=1e-12)
    assert [len(rank) for rank in plan["ranks"]] == [6, 6]
    assert plan["ranks"][1][3] == {"action": "B1.1", "start": 16, "end": 19}


@pytest.mark.parametrize(
    ("limit", "status"),
    [("8", 0), ("1x", 0), ("8,5", 0), ("8,4.9", 2), ("7.9", 2), ("0.9x", 2), ("two", 2), ("1/0x", 2)],
)
def test_memory_limit_is_a_number_or_a_multiple(costs: str, limit: str, status: int) -> None:
    command = ["plan", "--costs", costs, "--microbatches", "2", "--schedule", "zb-h1", "--mem-limit", limit]
    assert main(command) == status


def test_other_memory_limits_are_told_the_unit(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    for limit in ("two", "0x", "8,5,5", "8,1x", "-1"):
        assert main(["plan", "--costs", costs, "--microbatches", "2", f"--mem-limit={limit}"]) == 2
        assert capsys.readouterr().err == (
            "zbfx: error: --mem-limit is a number above 0 in the unit of m_b, or a multiple of what 1F1B needs, like "
            f"2x, or 2 numbers with commas between, one per rank; found {limit!r}\n"
        )


def test_plan_prints_the_order_of_each_rank(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--costs", costs, "--microbatches", "2", "--schedule", "zb-h1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0: F0.0 F0.1 B0.0 W0.0 B0.1 W0.1",
        "rank 1: F1.0 B1.0 F1.1 B1.1 W1.0 W1.1",
        "zb-h1: 2 ranks, 2 microbatches, iteration time 37, bubble rate 0.4595, lower bound 37 (met: proven optimal)",
        "peak memory per rank: 8, 5",
    ]


def test_show_draws_the_grid(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--costs", costs, "--microbatches", "2", "--schedule", "zb-h1", "--width", "60"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "rank 0 |F0F1.................B0-W0---B1-W1---|",
        "rank 1 |.........F0B0-F1B1-W0---W1---........|",
    ]


def test_show_writes_files(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: str(tmp_path / f"grid.{name}") for name in ("svg", "html", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    assert main(["show", "--costs", costs, "--microbatches", "2", "--schedule", "1f1b", *options]) == 0
    assert capsys.readouterr().out == "".join(f"wrote {path}\n" for path in files.values())
    assert Path(files["svg"]).read_text().startswith("<svg")
    assert Path(files["html"]).read_text().startswith("<!doctype html>")
    assert "traceEvents" in json.loads(Path(files["trace"]).read_text())


def test_compare_lists_what_fits_and_says_why_the_rest_does_not(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "--costs", costs, "--microbatches", "4", "--mem-limit", "1x", "--budget", "0.1"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {cells[0]: cells for cells in ([c.strip() for c in line.split("│")[1:-1]] for line in lines if "│" in line)}
    assert rows["1f1b"][1:4] == ["78", "0.48718", "8"]
    assert rows["zb-h1"][1:4] == ["68", "0.41176", "8"]
    assert "gpipe" not in rows
    assert any(line.startswith("gpipe: rank 0, step 2: F0.2 raises memory to 12, over") for line in lines)


def test_compare_as_json(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--costs", costs, "--microbatches", "4", "--budget", "0.1", "--json"]) == 0
    rows = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["gpipe"]["iteration_time"] == 64
    assert rows["zb-h2"]["peak_memory"] == [12, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object with stages, t_comm, edges, placement; found []"),
        ('{"stages": [{"t_f": 1, "t_b": 1}]}', "stages[0]: the field 't_w' is missing"),
        ('{"stages": [{"t_f": "1", "t_b": 1, "t_w": 1}]}', "stages[0].t_f: expected a number; found '1'"),
        ('{"stages": [{"t_f": -1, "t_b": 1, "t_w": 1}]}', "stages[0].t_f is a finite number >= 0; found -1"),
        ('{"stages": [{"t_f": 1, "t_b": 1, "t_w": 1, "mb": 1}]}', "no field is called 'mb'; known: t_f, t_b, t_w"),
        ('{"stages": [{"t_f": 1, "t_b": 1, "t_w": 1}], "placement": [1]}', "placement uses every rank from 0 up"),
        ('{"stages": [{"t_f": 1, "t_b": 1, "t_w": 1}], "placement": [0.5]}', "expected a whole number; found 0.5"),
        ('{"stages": [{"t_f": NaN, "t_b": 1, "t_w": 1}]}', "a finite number >= 0; found nan"),
        (
            '{"stages": [{"t_f": 1, "t_b": 1, "t_w": 1e308}]}',
            "t_w is a finite number >= 0: 0, or from 1e-100 to 1e+100",
        ),
        (
            '{"stages": [{"t_f": 1, "t_b": 1e-320, "t_w": 1}]}',
            "t_b is a finite number >= 0: 0, or from 1e-100 to",
        ),
        ('{"stages": []}', "a cost table needs at least one stage"),
        ('{"stages": [{"t_f": 1, "t_b": 1, "t_w": 1}], "placement": [1000000000]}', "placement uses every rank from 0"),
        ('{"stages": [{"t_f": 1, "t_f": 2, "t_b": 1, "t_w": 1}]}', "found 't_f' several times"),
        ("[" * 100_000 + "]" * 100_000, "lists or objects that are nested too deep"),
        ('{"stages":' * 100_000 + "1" + "}" * 100_000, "lists or objects that are nested too deep"),
        ('{"stages":' + "[" * 300 + "]" * 300 + "}", "expected an object with t_f, t_b, t_w, m_b"),
        ('{"stages": "' + "s" * 9999 + '"}', "stages: expected a list; found 'sssssss"),
    ],
)
def test_bad_costs_are_one_message(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert main(["plan", "--costs", str(path), "--microbatches", "2", "--schedule", "1f1b"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("zbfx: error: ")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert len(output.err) < 500


@pytest.mark.parametrize("option", [["--microbatches", "1000000000"], ["--width", "1000000000"]])
def test_numbers_that_would_fill_memory_are_refused_at_once(
    costs: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["show", "--costs", costs, "--microbatches", "2", "--schedule", "1f1b", *option]
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(command))
    assert stop.value.code == 2
    assert " at most" in capsys.readouterr().err


def test_missing_file_and_unknown_schedule(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--costs", "no.json", "--microbatches", "2"]) == 2
    assert capsys.readouterr().err == "zbfx: error: cannot read the cost table no.json: No such file or directory\n"
    assert main(["plan", "--costs", costs, "--microbatches", "2", "--schedule", "zb-9"]) == 2
    assert "no schedule is called 'zb-9'; did you mean 'zb-v'? Known: gpipe, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--microbatches", "0"], ["--microbatches", "x"], ["--microbatches", "2", "--budget", "-1"]]
)
def test_wrong_options_end_with_usage(costs: str, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--costs", costs, *option])
    assert stop.value.code == 2
    assert "usage: zbfx plan" in capsys.readouterr().err


def test_narrow_grids_and_files_that_cannot_be_written(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["show", "--costs", costs, "--microbatches", "2", "--schedule", "zb-h1"]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--width", "39"])
    assert stop.value.code == 2
    assert "argument --width: a grid takes 40 characters or more; found 39" in capsys.readouterr().err
    assert main([*command, "--width", "40"]) == 0
    capsys.readouterr()
    for option in ("--svg", "--html", "--trace"):
        assert main([*command, option, "/no/such/folder/a"]) == 2
        message = "zbfx: error: cannot write /no/such/folder/a: No such file or directory\n"
        assert capsys.readouterr().err == message


def test_schedules_in_a_v_name_the_field_to_add(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--costs", costs, "--microbatches", "2", "--schedule", "zb-v"]) == 2
    assert "expected placement (0, 0), found (0, 1). Set the field placement of the cost table to [0, 0]" in (
        capsys.readouterr().err
    )
    assert main(["plan", "--costs", costs, "--microbatches", "2", "--schedule", "interleaved-1f1b"]) == 2
    assert "two or more: found placement (0, 1)" in capsys.readouterr().err


def test_no_unit_that_the_cost_table_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    stage = {"t_f": 2, "t_b": 3, "t_w": 5, "m_b": 4 * 2**20, "m_w": 1}
    path.write_text(json.dumps({"stages": [stage] * 2, "placement": [0, 1]}))
    command = ["plan", "--costs", str(path), "--microbatches", "2", "--budget", "0.1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert re.search(r"gpipe: iteration time \d+, peak memory 8.38861e\+06$", printed, re.MULTILINE)
    assert not re.search(r"\d (s|bytes|MiB)\b", printed)
    assert main([*command, "--mem-limit", "1"]) == 2
    assert "no schedule fits in 1 on rank 0: it holds 0 throughout, and" in capsys.readouterr().err


@pytest.mark.processes
def test_reader_that_goes_away_leaves_no_traceback(costs: str) -> None:
    command = [sys.executable, "-m", "zbfx", "plan", "--costs", costs, "--microbatches", "5000", "--schedule", "gpipe"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == b"rank 0: F0"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@pytest.mark.processes
def test_interrupt_leaves_no_traceback(costs: str) -> None:
    script = (
        "import sys, time\nfrom zbfx.cli import main\nfrom zbfx.schedule import register\n"
        "@register('slow')\ndef slow(costs, microbatches):\n    print('started', flush=True)\n    time.sleep(60)\n"
        f"sys.exit(main(['plan', '--costs', {costs!r}, '--microbatches', '2', '--schedule', 'slow']))"
    )
    # A shell that runs the tests in the background has them, and what they start, ignore interrupts.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heeds) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors == b"zbfx: interrupted\n"
    assert process.returncode == 130
