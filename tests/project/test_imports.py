"""What `import zbfx` and the command line bring along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import zbfx

COSTS = {"stages": [{"t_f": 2, "t_b": 3, "t_w": 5}] * 2, "t_comm": 7}


def lines_of(code: str, *arguments: str) -> list[str]:
    """What a fresh interpreter prints that runs `code`."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()


@pytest.mark.processes
def test_planning_does_not_load_torch(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS))
    code = """
import sys, zbfx.cli
statuses = [zbfx.cli.main([command, *sys.argv[1:]]) for command in ("show", "plan", "compare")]
print(statuses, "torch" in sys.modules, "sympy" in sys.modules)
"""
    assert lines_of(code, "--costs", str(costs), "--microbatches", "2")[-1] == "[0, 0, 0] False False"


@pytest.mark.processes
def test_names_that_need_torch_load_it_and_stay_what_they_are() -> None:
    code = """
import sys, zbfx
print("torch" in sys.modules, set(zbfx.__all__) <= set(dir(zbfx)))
print(zbfx.compile.__module__, "torch" in sys.modules)
import zbfx.gradient_check, zbfx.optim
print(zbfx.check is zbfx.gradient_check.check, zbfx.optim.PostValidated.__name__, zbfx.passes.__name__)
"""
    assert lines_of(code) == ["False True", "zbfx.pipeline True", "True PostValidated zbfx.passes"]


def test_a_name_that_zbfx_does_not_have_is_said() -> None:
    with pytest.raises(AttributeError, match="module 'zbfx' has no attribute 'comple'"):
        zbfx.comple  # noqa: B018
