"""What `dir` and `repr` show is what the documentation speaks of."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import zbfx
from tests.support.models import mlp
from tests.support.reference import compiled
from zbfx.runtime.step import OFFERED, Step

ROOT = Path(__file__).parents[1]
DOCUMENTS = "\n".join(file.read_text() for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
UNDER = re.compile("__.*__")


@pytest.fixture(scope="module")
def step() -> Step:
    return compiled(mlp(4), 2, 4, check=False).run_local()


def test_dir_of_the_package_is_what_it_offers() -> None:
    assert dir(zbfx) == sorted(zbfx.__all__)
    for name in zbfx.__all__:
        assert getattr(zbfx, name) is not None


def test_dir_of_a_step_is_what_the_documents_speak_of(step: Step) -> None:
    shown = [name for name in dir(step) if not UNDER.fullmatch(name)]
    assert shown == sorted(OFFERED)
    for name in shown:
        assert hasattr(step, name)
        assert re.search(rf"\bstep\.{name}\b", DOCUMENTS), f"no document speaks of step.{name}"
    named = set(re.findall(r"\bstep\.([a-z]\w+)", DOCUMENTS))
    assert {name for name in named if hasattr(step, name)} <= set(shown), "what documents speak of is shown"


def test_a_step_says_what_it_is(step: Step) -> None:
    problem = mlp(4)
    assert repr(step) == "Step(ranks 0 to 1 of 2, stages 0, 1, backend eager, count 0)"
    step(*problem.inputs, *problem.targets)
    assert repr(step) == "Step(ranks 0 to 1 of 2, stages 0, 1, backend eager, count 1)"
    step.close()
    assert repr(step).endswith("count 1, closed)")


def test_the_version_is_written_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", zbfx.__version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "zbfx.__version__"}
