"""What tests of documents share: the code blocks of a page, and how its commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def text_of(page: str) -> str:
    """A page's text; `page` is relative to the repository."""
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    """The code of a page's blocks in this language."""
    return [code for name, code in every_block(page) if name == language]


def every_block(page: str) -> list[tuple[str, str]]:
    """Language and code of each block of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """The command lines of a page, without their comments."""
    lines = [line.split("#")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line]


def scripts(page: str) -> list[str]:
    """The Python blocks of a page that torchrun starts."""
    launched = any(command.startswith("torchrun") for command in commands(page))
    return [code for code in blocks(page, "python") if launched and "torch.distributed" in code]


def run(command: list[str], folder: Path) -> str:
    """What the command prints. Programs of the environment that runs the tests come first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    settings = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
