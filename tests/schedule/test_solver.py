"""A solver that misbehaves disturbs nothing. Run: pytest tests/schedule/test_solver.py (needs python-mip)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from zbfx.schedule.integer import solver
from zbfx.schedule.integer.formulation import IntegerProgram, Row
from zbfx.schedule.integer.solver import CHILD, SolverFailed, solve_in_child, solve_with_any

pytestmark = pytest.mark.solver

# Minimise x0 with x0 >= 3 - 2 x1 - x2, x1 + x2 <= 1, both binary: x0 = 1 with x1 = 1.
PROGRAM = IntegerProgram(
    lower=[0.0, 0.0, 0.0],
    upper=[9.0, 1.0, 1.0],
    first_binary=1,
    rows=[Row((0, 1, 2), (-1.0, -2.0, -1.0), -3.0), Row((1, 2), (1.0, 1.0), 1.0)],
)


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_cbc_solves_a_small_program() -> None:
    answer = solve_in_child(PROGRAM, 30)
    assert answer.values == pytest.approx((1.0, 1.0, 0.0))
    assert answer.optimal
    assert not answer.infeasible
    assert answer.bound == pytest.approx(1.0)


def test_cbc_says_infeasible() -> None:
    impossible = IntegerProgram(PROGRAM.lower, PROGRAM.upper, 1, [*PROGRAM.rows, Row((0,), (1.0,), 0.5)])
    answer = solve_in_child(impossible, 30)
    assert answer.infeasible
    assert answer.values is None


def test_a_solver_that_prints_on_stdout_does_not_garble_the_answer(tmp_path: Path) -> None:
    noisy = f"import os, runpy; os.write(1, b''); runpy.run_path({CHILD[1]!r}, run_name='__main__')"
    assert solve_in_child(PROGRAM, 30, command=python(noisy)).values == pytest.approx((1.0, 1.0, 0.0))


def test_crash_of_the_interpreter() -> None:
    with pytest.raises(SolverFailed, match=r"ended by signal 6 \(Aborted\); the plan stays as it was"):
        solve_in_child(PROGRAM, 30, command=python("import os; os.abort()"))


def test_process_that_cannot_start() -> None:
    with pytest.raises(SolverFailed, match="the solver's process cannot start"):
        solve_in_child(PROGRAM, 30, command=("/no/such/interpreter",))


def test_failure_status() -> None:
    with pytest.raises(SolverFailed, match="failed with status 1: MemoryError: no room"):
        solve_in_child(PROGRAM, 30, command=python("raise MemoryError('no room')"))


def test_nonsense_that_is_not_text() -> None:
    with pytest.raises(SolverFailed, match="the solver's answer cannot be read"):
        solve_in_child(PROGRAM, 30, command=python("import sys; sys.stdout.buffer.write(bytes([255, 254, 0]))"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lots of nonsense",
        "[]",
        "[" * 9000,
        '{"status": "OPTIMAL"}',
        '{"status": "OPTIMAL", "values": [1, 2], "bound": 0}',
        '{"status": "OPTIMAL", "values": [1, NaN, 0], "bound": 0}',
        '{"status": "OPTIMAL", "values": ["x", 1, 0], "bound": 0}',
        f'{{"status": "OPTIMAL", "values": [1{"0" * 400}, 1, 0], "bound": 0}}',
    ],
)
def test_nonsense(text: str) -> None:
    with pytest.raises(SolverFailed, match="the solver's answer cannot be read"):
        solve_in_child(PROGRAM, 30, command=python(f"print({text!r})"))


def test_ignoring_the_limit_ends_the_child_and_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"open({str(file)!r}, 'w').write(f'{{os.getpid()}} {{other.pid}}')\n"
        "time.sleep(100)"
    )
    begun = time.monotonic()
    with pytest.raises(SolverFailed, match=r"did not stop within 2 s and was ended"):
        solve_in_child(PROGRAM, 2, command=python(code))
    assert time.monotonic() - begun < 20
    for pid in map(int, file.read_text().split()):
        assert ended(pid)


def ended(pid: int) -> bool:
    """Whether a process is gone, or dead and only not yet collected by its new parent."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_absent_mip_names_the_fix() -> None:
    blocked = f"import sys, runpy; sys.modules['mip'] = None; runpy.run_path({CHILD[1]!r}, run_name='__main__')"
    with pytest.raises(
        SolverFailed, match="the integer program needs python-mip: pip install mip; the plan stays as it was"
    ):
        solve_in_child(PROGRAM, 30, command=python(blocked))


@pytest.mark.parametrize(
    ("installed", "expected"), [((), ()), (("mip",), ("CBC",)), (("mip", "highsbox"), ("HiGHS", "CBC"))]
)
def test_highs_is_preferred_where_installed(
    installed: tuple[str, ...], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solver, "find_spec", lambda name: name if name in installed else None)
    assert solver.solvers() == expected


def test_a_solver_that_fails_hands_over_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "solvers", lambda: ("no such solver", "CBC"))
    assert solve_with_any(PROGRAM, 30).values == pytest.approx((1.0, 1.0, 0.0))


def test_no_solver_at_all_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "solvers", tuple)
    with pytest.raises(SolverFailed, match="pip install mip"):
        solve_with_any(PROGRAM, 30)


def test_missing_highs_names_the_fix() -> None:
    if find_spec("highsbox"):
        pytest.skip("HiGHS is installed")
    with pytest.raises(SolverFailed, match="pip install highsbox"):
        solve_in_child(PROGRAM, 30, solver="HiGHS")


def test_child_ends_itself_when_its_parent_is_gone() -> None:
    request = {"lower": [0], "upper": [1], "first_binary": 1, "rows": [], "start": None, "until_s": 0}
    code = (
        "import sys, types, time\n"
        "sys.modules['mip'] = types.SimpleNamespace(Model=lambda **options: time.sleep(100), MINIMIZE='MIN')\n"
        f"sys.argv = ['child']\nsource = open({CHILD[1]!r}).read().replace('GRACE_S = 5', 'GRACE_S = 1')\n"
        "exec(compile(source, 'child', 'exec'))"
    )
    text = json.dumps(request | {"solver": "CBC", "seed": 0})
    result = subprocess.run(python(code), input=text, text=True, timeout=60, capture_output=True)
    assert result.returncode == -14  # SIGALRM


def test_planning_works_without_mip() -> None:
    code = (
        "import sys; sys.modules['mip'] = None\n"
        "from zbfx.plan import CostTable, StageCost\nfrom zbfx.schedule import plan\n"
        "print(plan(CostTable.chain([StageCost(2, 3, 5)] * 2, 7), 2, schedule='zb-h1').iteration_s)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(CHILD[1]).parents[2])}
    result = subprocess.run(python(code), text=True, timeout=60, capture_output=True, env=environment)
    assert (result.stdout, result.stderr) == ("37.0\n", "")
