"""The cases compare in double precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.reference import default_dtype


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield
