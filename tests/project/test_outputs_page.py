"""The Python blocks of docs/outputs.md run, one after the other."""

from __future__ import annotations

import torch

from tests.support.documents import blocks


def test_the_page_on_outputs_runs() -> None:
    torch.manual_seed(0)
    found = blocks("docs/outputs.md", "python")
    assert len(found) >= 5
    exec("\n".join(found), {})
