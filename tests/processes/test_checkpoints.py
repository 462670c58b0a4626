"""Models and training states on disk, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint import models
from tests.checkpoint.models import different, language_pipe, on_meta, plain, plain_pipe, tensors, tokens
from tests.processes import checkpoints_worker as worker
from tests.support.pool import Launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    models.tied_llama().save_pretrained(path)
    return path


@pytest.mark.transformers
def test_rank_has_the_tensors_of_its_stages_alone(launch: Launch, folder: Path) -> None:
    expected = tensors(models.tied_llama().from_pretrained(folder))
    ids = tokens(4)
    loss = language_pipe(on_meta(models.tied_llama), 3).run_local(weights=folder)(input_ids=ids, labels=ids)
    ranks = launch(3, worker.from_folder, models.tied_llama, str(folder))
    for found in ranks.values():
        memory = found["memory"]
        assert different(memory, {name: expected[name] for name in memory}) == []
        aliases = {"lm_head.weight"} if "model.embed_tokens.weight" in found["used"] else set()
        buffers = {name for name in memory if name.endswith("inv_freq")}
        assert set(memory) == set(found["used"]) | aliases | buffers
        assert torch.equal(found["loss"], loss)
    assert {name for found in ranks.values() for name in found["memory"]} == set(expected)


def test_initial_values_depend_neither_on_ranks_nor_on_replicas(launch: Launch) -> None:
    model = on_meta(plain)
    step = plain_pipe(model, 1).run_local(weights="init", seed=0)
    step(torch.ones(4, 6), torch.zeros(4, 6))
    expected = {name: tensor for name, tensor in tensors(model).items() if not tensor.is_meta}
    for found in launch(4, worker.initial).values():
        parameters = {name: t for name, t in found.items() if "running" not in name and "batches" not in name}
        assert different(parameters, {name: expected[name] for name in parameters}) == []
        assert "0.weight" in found or "4.weight" in found


def test_what_one_rank_refuses_all_refuse(launch: Launch) -> None:
    for rank, (kind, other) in launch(2, worker.refused).items():
        assert "4.weight is stored as torch.int8" in kind
        assert "weights is 'a mapping' on rank 0, 'None' on rank 1" in other, rank


@pytest.mark.parametrize("zero", [0, 1])
def test_whole_model_comes_back(launch: Launch, zero: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp(f"zero{zero}") / "model"
    ranks = launch(4, worker.whole, zero, str(folder))
    expected = ranks[0]["all"]
    assert list(expected) == list(worker.trained().state_dict())
    assert different(ranks[0]["first"], expected) == []
    tied = {name: tensor for name, tensor in expected.items() if name != "7.weight"}
    assert different(load_file(folder / "model.safetensors"), tied) == []
    names = {name for name, _ in worker.trained().named_parameters(remove_duplicate=False)}
    expected = {name: tensor for name, tensor in expected.items() if name in names}
    for rank, found in ranks.items():
        assert rank == 0 or found["first"] == {}
        assert different({name: found["all"][name] for name in names}, expected) == []
        own = {name: tensor for name, tensor in found["own"].items() if name in names}
        assert own
        assert different(own, {name: expected[name] for name in own}) == []


@pytest.mark.transformers
def test_whole_of_a_sharded_model(launch: Launch) -> None:
    for found in launch(4, worker.whole_of_shards).values():
        assert different(found["whole"], found["before"]) == []
