"""Models and training states on disk, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint import models
from tests.checkpoint.models import different, language_pipe, on_meta, plain, plain_pipe, tensors, tokens
from tests.processes import checkpoints_worker as worker
from tests.processes.checkpoints_worker import Form
from tests.support.pool import Launch, Results


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


V = (("schedule", "zb-v-order"), ("stages_per_rank", 2))
FORMS = [
    Form(2),
    Form(3),
    Form(1),
    Form(4, barrier=True),
    Form(2, replicas=2, zero=1),
    Form(2, options=V),
    Form(2, replicas=2),
    Form(1, replicas=2, zero=1),
]


def whole_optimizer(ranks: Results) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state of each parameter, from the processes' parts of it."""
    if "buckets" not in ranks[0]:
        return {name: state for found in ranks.values() for name, state in found["optimizer"].items()}
    replicas = 2
    count = len(ranks) // replicas
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for rank in range(count):
        shards = [ranks[replica * count + rank] for replica in range(replicas)]
        for bucket, names, layouts in shards[0]["buckets"]:
            states = [found["optimizer"][bucket] for found in shards]
            for key, value in states[0].items():
                flat = torch.cat([state[key] for state in states]) if value.ndim else value
                at = 0
                for name, (shape, stride) in zip(names, layouts, strict=True):
                    size = torch.Size(shape).numel()
                    part = flat[at : at + size].clone().as_strided(shape, stride) if value.ndim else flat
                    whole.setdefault(name, {})[key] = part
                    at += size
    return whole


@pytest.mark.slow
def test_training_goes_on_in_any_form(launch: Launch, tmp_path: Path) -> None:
    """Tensors and optimizer have the bits of the run before. Losses have those of the unbroken run while there is one
    replica; after that they are within 1e-12 of it."""
    unbroken = worker.in_one_process(Form(2), str(tmp_path / "unbroken"), 3 * len(FORMS), 5)["losses"]
    before: Results = {}
    folder = tmp_path / "run"
    for index, form in enumerate(FORMS):
        seed = 99 if before else 5  # the checkpoint's counts
        ranks = (
            {0: worker.in_one_process(form, str(folder), 3, seed)}
            if form.processes == 1
            else launch(form.processes, worker.over_processes, form, str(folder), 3, seed)
        )
        for found in ranks.values():
            assert found["count"] == 3 * index
            assert found["path"] == f"step-{3 * index + 3}"
            if before:
                assert different(found["model"], before[0]["saved"]) == [], form
            expected = unbroken[3 * index : 3 * index + 3]
            if all(earlier.replicas == 1 for earlier in FORMS[: index + 1]):
                assert found["losses"] == expected, form
            assert found["losses"] == pytest.approx(expected, rel=1e-12), form
        if before:
            now = whole_optimizer(ranks)
            was = whole_optimizer(
                {rank: found | {"optimizer": found["saved optimizer"]} for rank, found in before.items()}
            )
            assert now.keys() == was.keys()
            assert all(different(now[name], was[name]) == [] for name in now), form
        before = ranks
    assert sorted(path.name for path in folder.iterdir()) == ["step-21", "step-24"]


def test_a_weight_of_two_layers_has_a_sum_in_each_of_their_stages(tmp_path: Path) -> None:
    """So that its gradient is added up in another order where one stage has both."""
    unbroken = worker.in_one_process(Form(2), str(tmp_path / "unbroken"), 6, 5, tied=True)["losses"]
    folder = str(tmp_path / "run")
    assert worker.in_one_process(Form(2), folder, 3, 5, tied=True)["losses"] == unbroken[:3]
    found = worker.in_one_process(Form(1), folder, 3, 99, tied=True)["losses"]
    assert found == pytest.approx(unbroken[3:], rel=1e-12)
