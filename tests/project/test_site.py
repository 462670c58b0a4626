"""The site builds: every page is in its navigation, no link is broken, every name of the reference exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.documents import PAGES, ROOT, run, text_of

pytest.importorskip("mkdocs", reason="needs zbfx[docs]")


@pytest.mark.processes
def test_the_site_builds(tmp_path: Path) -> None:
    # Without --quiet, which silences the warnings that a strict build counts.
    run([sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path / "site")], ROOT)
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "<code>model</code>: any nn.Module" in reference, "columns of docstrings are lists"


def test_every_page_is_in_the_navigation() -> None:
    navigation = text_of("mkdocs.yml").split("\nnav:\n")[1]
    assert sorted(re.findall(r"- (\w+\.md)$", navigation, re.MULTILINE)) == sorted(
        page.removeprefix("docs/") for page in PAGES if page != "README.md"
    )
