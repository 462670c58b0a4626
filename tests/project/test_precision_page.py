"""The Python blocks of docs/precision.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"


def test_the_page_on_precision_runs() -> None:
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})
