"""`docs/refusals.md` explains every message of the library, and none that there is not."""

from __future__ import annotations

import re

import pytest

from tests.support.documents import text_of
from tests.support.messages import messages, speaks

PAGE = "docs/refusals.md"


def keys() -> list[str]:
    """The parts of messages that the page explains."""
    rows = re.findall(r"^\| (`.*?`) \|", text_of(PAGE), re.MULTILINE)
    return [key for row in rows for key in re.findall("`(.*?)`", row)]


@pytest.mark.slow
def test_every_message_is_explained() -> None:
    found = keys()
    missing = [f"{one.place}: {one.text}" for one in messages() if not any(key in one.text for key in found)]
    assert not missing, "\n".join(missing)


def test_every_explained_message_exists() -> None:
    texts = [message.text for message in messages()]
    gone = [key for key in keys() if not any(key in text for text in texts)]
    assert not gone, "\n".join(gone)


def test_every_key_can_be_searched_for() -> None:
    """No key is so short that it stands for whatever message."""
    assert [key for key in keys() if not speaks(key)] == []


def test_every_row_has_a_cause_and_a_remedy() -> None:
    rows = re.findall(r"^\| `.*$", text_of(PAGE), re.MULTILINE)
    assert len(rows) > 150
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert [row for row in cells if len(row) != 3 or not all(row)] == []
