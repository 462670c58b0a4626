"""What stages hold between F, B and W, by level of recomputation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory.saved_bytes import main

pytestmark = [pytest.mark.slow, pytest.mark.transformers]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(model, level, stage) -> row."""
    path: Path = tmp_path_factory.mktemp("saved") / "rows.jsonl"
    main(["--models", "gpt", "llama", "unet", "--out", str(path)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["model"], row["recompute"], row["stage"]): row for row in rows}


def test_there_is_a_row_for_every_model_level_and_stage(found: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    levels = ("none", "cheap", "full")
    assert set(found) == {(m, level, k) for m in ("gpt", "llama", "unet") for level in levels for k in range(4)}
    assert all(row["commit"] and row["versions"] for row in found.values())


@pytest.mark.parametrize("stage", [1, 2])
def test_w_holds_inputs_of_products_and_gradients_of_their_outputs(
    found: dict[tuple[str, str, int], dict[str, Any]], stage: int
) -> None:
    """In bytes per s b h and layer, 2 a value. GPT: of QKV, projection, up, down 2 + 2 + 2 + 8 of inputs and
    6 + 2 + 8 + 2 of gradients; Llama's gate adds a gradient of 8."""
    for level in ("none", "cheap", "full"):
        assert found["gpt", level, stage]["m_w_sbh"] == 32
        assert found["llama", level, stage]["m_w_sbh"] == 40


@pytest.mark.parametrize("model", ["gpt", "llama", "unet"])
def test_each_level_saves_less_than_the_one_before(
    found: dict[tuple[str, str, int], dict[str, Any]], model: str
) -> None:
    for stage in range(4):
        sizes = [found[model, level, stage]["m_b_bytes"] for level in ("none", "cheap", "full")]
        assert sizes[0] > sizes[1] > sizes[2]
