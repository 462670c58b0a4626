"""The site builds: every page is in its navigation, no link is broken, every name of the reference exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.documents import PAGES, ROOT, run, text_of

pytest.importorskip("mkdocs", reason="needs zbfx[docs]")


def test_the_site_builds(tmp_path: Path) -> None:
    run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "-f", "mkdocs.yml", "-d", str(tmp_path / "site")],
        ROOT,
    )
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "<li><p><code>model</code>" in reference or "<code>model</code>: any nn.Module" in reference


def test_every_page_is_in_the_navigation() -> None:
    navigation = text_of("mkdocs.yml").split("\nnav:\n")[1]
    assert sorted(re.findall(r"- (\w+\.md)$", navigation, re.MULTILINE)) == sorted(
        page.removeprefix("docs/") for page in PAGES if page != "README.md"
    )
