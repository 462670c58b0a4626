"""The wheel contains every package of the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def project_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> dict[str, Path]:
    """Import name -> folder of everything with an `__init__.py`; `passes/` counts once, under its import name."""
    folders = [file.parent for file in (ROOT / "zbfx").rglob("__init__.py") if not file.parent.is_symlink()]
    names = {".".join(folder.relative_to(ROOT).parts): folder for folder in folders}
    return names | {"zbfx.passes": ROOT / "passes"}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from a copy, so that stale build folders play no part."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("zbfx", "passes"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", target, source],
        check=True,
        timeout=120,
    )
    (wheel,) = target.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_packages_list_matches_the_tree() -> None:
    assert sorted(project_table()["tool"]["setuptools"]["packages"]) == sorted(packages_on_disk())


def test_link_to_passes_is_a_link() -> None:
    assert (ROOT / "zbfx" / "passes").is_symlink()
    assert (ROOT / "zbfx" / "passes").resolve() == ROOT / "passes"


@pytest.mark.processes
def test_wheel_holds_every_module(wheel_names: set[str]) -> None:
    expected = {
        f"{name.replace('.', '/')}/{file.name}"
        for name, folder in packages_on_disk().items()
        for file in folder.glob("*.py")
    }
    assert "zbfx/passes/__init__.py" in expected
    assert {name for name in wheel_names if name.endswith(".py")} == expected


@pytest.mark.processes
def test_wheel_holds_type_marker_and_command(wheel_names: set[str]) -> None:
    assert "zbfx/py.typed" in wheel_names
    assert any(name.endswith("entry_points.txt") for name in wheel_names)
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
    assets = ("d3.min.js", "d3.LICENSE", "page.css", "page.js", "playground.html")
    assert {f"zbfx/show/assets/{name}" for name in assets} <= wheel_names


def test_constraints_pin_every_direct_dependency() -> None:
    project = project_table()["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert {line.split(">=")[0] for line in wanted} <= pinned
