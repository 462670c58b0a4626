"""Dimensions of a mesh mean what their names say, in any order; those with other names are refused, or meant."""

from __future__ import annotations

import pytest

from tests.processes import meshes_worker as worker
from tests.processes.test_processes import refusals
from tests.support.pool import Launch, Scenario

ORDERS = [("pp", "dp"), ("dp", "pp"), ("pp", "tp"), ("tp", "pp"), ("dp", "tp", "pp"), ("pp", "tp", "dp")]


@pytest.mark.parametrize("names", ORDERS, ids="-".join)
def test_any_order_of_dimensions_equals_plain_autograd(launch: Launch, names: tuple[str, ...]) -> None:
    for found in launch(2 ** len(names), worker.trained, names).values():
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-12)
        assert len(found["errors"]) == 12, "six parameters in each of this rank's two blocks"
        assert max(found["errors"].values()) < 1e-12


@pytest.mark.parametrize("names", [("pp", "dp"), ("pp", "tp", "dp")], ids="-".join)
def test_zero_in_any_order_equals_plain_autograd(launch: Launch, names: tuple[str, ...]) -> None:
    for found in launch(2 ** len(names), worker.zero, names).values():
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-12)


@pytest.mark.parametrize(
    ("names", "dimension", "told"),
    [
        (("pp", "dp"), "pp", "replica 1, rank 1 was given other values of inputs[0] than replica 1, rank 0"),
        (("dp", "pp"), "pp", "replica 1, rank 1 was given other values of inputs[0] than replica 1, rank 0"),
        (("pp", "tp"), "pp", "shard 0, rank 1 was given other values of inputs[0] than shard 0, rank 0"),
        (("pp", "tp"), "tp", "shard 1, rank 0 was given other values of inputs[0] than shard 0, rank 0"),
    ],
)
def test_other_batches_within_one_pipeline_are_refused_everywhere(
    launch: Launch, names: tuple[str, ...], dimension: str, told: str
) -> None:
    found = launch(4, worker.other_batches, names)
    for message in refusals(found, dimension, "InputError"):
        assert message.startswith(told)
    for loss, expected in (ranks["right"] for ranks in found.values()):
        assert loss == pytest.approx(expected, rel=1e-12)


def test_shards_draw_and_judge_alike(launch: Launch) -> None:
    """Where their seeds differ, and where one alone has a weight that is not finite."""
    found = launch(4, worker.shards)
    assert len({ranks["loss"] for ranks in found.values()}) == 1
    assert len({ranks["verdict"] for ranks in found.values()}) == 1
    assert "gradients dropped: the loss of microbatch 0 is nan" in found[0]["verdict"]
    messages = refusals(found, "bind", "ZbfxError")
    assert len(set(messages)) == 1
    assert "shard 1, rank 0: gradients accumulate into .grad inside the pipeline" in messages[0]


STRANGE = {
    "cp": "found 'cp', over which nothing would be summed. Name replicas 'dp', or call bind(mesh, independent=('cp',))",
    "ep": "found 'ep', over which nothing would be summed",
    "replicas": "found 'replicas', over which nothing would be summed",
    "pp independent": "independent names dimensions of the mesh beside 'dp', 'pp', 'tp'; found 'pp' and a mesh of",
    "no such": "found 'ep' and a mesh of ('pp', 'dp')",
    "no tuple": "independent is a tuple of names of mesh dimensions; found 'ep'",
    "no mesh": "independent names dimensions of a DeviceMesh; found ('ep',) and no mesh",
    "no shards": "found a model without DTensors or collectives",
    "other shards": "found 0.up.weight over [0, 1]. Call parallelize_module(model, mesh['tp'], ...)",
}


@pytest.mark.parametrize("case", STRANGE)
def test_dimensions_that_mean_nothing_are_refused_by_name(launch: Launch, case: str) -> None:
    messages = refusals(launch(4, worker.strange_meshes), case, "ZbfxError")
    assert STRANGE[case] in messages[0]


def test_pipelines_that_are_declared_independent_train_apart(launch: Launch) -> None:
    found = launch(4, worker.strange_meshes)
    for rank, ranks in found.items():
        loss, expected = ranks["apart"]
        assert loss == pytest.approx(expected, rel=1e-12)
        assert loss != found[(rank + 1) % 2 + 2 * (rank // 2)]["apart"][0]


CLIPPED = [
    (("pp",), True, worker.clipped),
    (("pp", "dp"), True, worker.clipped),
    (("pp", "dp"), True, worker.clipped_shards),
    (("dp", "pp"), False, worker.clipped_shards),
    (("pp", "tp"), False, worker.clipped),
    (("tp", "pp", "dp"), False, worker.clipped_shards),
]


@pytest.mark.parametrize(
    ("names", "is_tied", "scenario"), CLIPPED, ids=[f"{'-'.join(n)} {s.__name__}" for n, _, s in CLIPPED]
)
def test_clipping_equals_that_of_one_process(
    launch: Launch, names: tuple[str, ...], is_tied: bool, scenario: Scenario
) -> None:
    """Over ranks, replicas, shards of ZeRO-1 and of DTensors, with a parameter that ranks share; and steps after it."""
    results = launch(2 ** len(names), scenario, names, is_tied)
    for found in results.values():
        assert found["norms"] == pytest.approx(found["expected"], rel=1e-12)
        assert len(found["norms"]) == 5
        assert len(found["errors"]) >= 12
        assert max(found["errors"].values()) < 1e-10
    for message in refusals(results, "wrong", "ZbfxError"):
        assert "max_norm is a number >= 0" in message
    if "tp" in names:
        for message in refusals(results, "validated", "ZbfxError"):
            assert "found a mesh with the dimension 'tp'. Step the optimizer itself, after" in message


def test_ranks_that_clip_to_other_norms_hear_of_it(launch: Launch) -> None:
    for message in refusals(launch(2, worker.other_clips), "other", "ZbfxError"):
        assert message.endswith("found max_norm is 1.0 on rank 0, 2.0 on rank 1")


@pytest.mark.parametrize("phase", ["F1", "B1", "W1"])
def test_a_shard_that_fails_reaches_the_pipelines_of_all_shards(launch: Launch, phase: str) -> None:
    for found in launch(4, worker.failing_shard, phase).values():
        assert found["type"] == "PipelineFault"
        assert f"shard 1, rank 1, step 1, action {phase}.0" in found["text"]
        assert "InjectedError: on purpose" in found["text"]
        assert found["seconds"] < 15
