"""The whole model back: `full_state_dict`, and files that plain transformers and torch load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint import models
from tests.checkpoint.models import different, language_pipe, on_meta, plain, plain_pipe, tensors, tokens
from zbfx.errors import ZbfxError

pytestmark = pytest.mark.transformers


def test_state_is_that_of_the_model() -> None:
    """In the order of state_dict, tied names included; loads into a plain model, strictly."""
    torch.manual_seed(0)
    model = plain()
    step = plain_pipe(model, 3).run_local()
    step(torch.ones(4, 6), torch.zeros(4, 6))
    torch.optim.SGD(step.parameters(), lr=0.1).step()
    found, expected = step.full_state_dict(), {name: t.clone() for name, t in model.state_dict().items()}
    assert list(found) == list(expected)
    assert different(found, expected) == []
    assert found["7.weight"] is found["0.weight"]
    plain().load_state_dict(found)
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(0.0)
    assert different(found, expected) == [], "a copy"


def test_tensor_without_data_is_refused() -> None:
    step = plain_pipe(on_meta(plain), 2).run_local(weights="init")
    with pytest.raises(ZbfxError, match="found unread without data, which no stage reads"):
        step.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("make", [models.tied_llama, models.mixtral])
def test_exported_model_has_the_logits_of_the_pipeline(make: Callable[[], Any], tmp_path: Path) -> None:
    """Made on meta, trained, exported in several files, loaded by from_pretrained."""
    model = on_meta(make)
    step = language_pipe(model, 3).run_local(weights="init")
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    ids = tokens(4)
    for _ in range(2):
        step(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
    step.export(tmp_path / "out", max_shard_size="10KB")
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(info.values()), "nothing is missing, nothing surplus"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert different(tensors(loaded), tensors(model)) == []
    losses = [loaded(input_ids=part, labels=part).loss for part in ids.chunk(2)]
    torch.testing.assert_close(step.evaluate(input_ids=ids, labels=ids), torch.stack(losses).mean())
    again = on_meta(make)
    language_pipe(again, 2).run_local(weights=tmp_path / "out")
    assert different(tensors(again), tensors(model)) == []


def test_files_have_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    """And the config says so. An export into a folder that has one replaces its files."""
    model = models.gpt2()
    step = language_pipe(model, 1).run_local()
    step.export(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "tokenizer.json").write_text("{}")
    step.export(str(tmp_path), dtype=torch.bfloat16)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert next(model.parameters()).dtype is torch.float32


def test_plain_model_is_exported_and_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = plain()
    plain_pipe(model, 2).run_local().export(tmp_path / "new" / "folder")
    other = on_meta(plain)
    plain_pipe(other, 3).run_local(weights=tmp_path / "new" / "folder")
    assert different(tensors(other), tensors(model)) == []


def test_arguments_are_checked(tmp_path: Path) -> None:
    step = plain_pipe(plain(), 2).run_local()
    with pytest.raises(ZbfxError, match="everywhere is True or False; found 'all'"):
        step.full_state_dict(everywhere="all")  # type: ignore[arg-type]
    with pytest.raises(ZbfxError, match=r"dtype is a floating dtype .* found dtype torch.int8"):
        step.export(tmp_path, dtype=torch.int8)
    with pytest.raises(ZbfxError, match="folder is a path; found int"):
        step.export(3)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(ZbfxError, match="cannot be written"):
        step.export(tmp_path / "file")
