"""The Python blocks of docs/precision.md run, one after the other."""

from __future__ import annotations

import torch

from tests.support.documents import blocks


def test_the_page_on_precision_runs() -> None:
    torch.manual_seed(0)
    found = blocks("docs/precision.md", "python")
    assert len(found) >= 3
    exec("\n".join(found), {})
