"""Pipelines times replicas over gloo: gradients and losses of one process on the batches of all, and refusals.

Run: pytest tests/processes/test_replicas.py (CPU; launches of four, eight and four processes, see
tests/processes/replicas_worker.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes.test_processes import Results, launch, refusals

MODULE = "tests.processes.replicas_worker"


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(4, "two-by-two", tmp_path_factory.mktemp("two_by_two"), {0, 1, 2, 3}, MODULE)


def assert_equal_to_one_process(results: Results, names: set[str]) -> None:
    """All processes train all pipelines for 20 steps, in float64, with the losses and gradients of plain autograd."""
    for found in results.values():
        assert set(found) == names
        for name, figures in found.items():
            assert figures["steps"] == 20
            assert figures["loss"] < 1e-12, (name, figures)
            assert figures["gradient"] < 1e-12, (name, figures)


def test_two_by_two_equals_one_process(two_by_two: Results) -> None:
    schedules = {"gpipe", "1f1b", "zb-h1", "zb-h2", "v-min", "interleaved-1f1b"}
    names = {f"gpt {schedule}" for schedule in schedules} | {"gpt2 zb-h1", "gpt2 zb-v-order"}
    assert_equal_to_one_process({rank: found["trained"] for rank, found in two_by_two.items()}, names)


def test_schedules_of_replicas_agree_in_bits(two_by_two: Results) -> None:
    losses = {figures["last"] for found in two_by_two.values() for figures in found["trained"].values()}
    by_model = {name.split()[0] for found in two_by_two.values() for name in found["trained"]}
    assert len(losses) == len(by_model) == 2


@pytest.fixture(scope="module")
def four_by_one(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(4, "four-by-one", tmp_path_factory.mktemp("four_by_one"), {0, 1, 2, 3}, MODULE)


def test_four_by_one_equals_one_process(four_by_one: Results) -> None:
    trained = {rank: found["trained"] for rank, found in four_by_one.items()}
    assert_equal_to_one_process(trained, {"gpt2 zb-h1", "gpt2 1f1b"})


def test_two_by_four_equals_one_process(tmp_path: Path) -> None:
    assert_equal_to_one_process(launch(8, "two-by-four", tmp_path, set(range(8)), MODULE), {"gpt2 zb-h1"})


@pytest.mark.parametrize("mesh", ["two_by_two", "four_by_one"])
def test_zero_has_the_bits_of_unsharded_optimizers(mesh: str, request: pytest.FixtureRequest) -> None:
    """In float32, with a tied parameter that two ranks hold; each replica steps its share of the elements."""
    replicas = 2 if mesh == "two_by_two" else 4
    for found in request.getfixturevalue(mesh).values():
        assert len(found["zero"]) == 1
        for whole, shards in found["zero"].values():
            assert len(whole["losses"]) == 20
            assert whole["losses"] == shards["losses"]
            assert whole["evaluated"] == shards["evaluated"]
            assert whole["parameters"].keys() == shards["parameters"].keys()
            for name, parameter in whole["parameters"].items():
                assert torch.equal(parameter, shards["parameters"][name]), name
            assert whole["size"] <= shards["size"] * replicas < whole["size"] + replicas * 64


def test_gradients_of_several_steps_add_up_after_the_reduction(two_by_two: Results) -> None:
    for found in two_by_two.values():
        assert found["accumulated"]["kept"]
        assert found["accumulated"]["error"] < 1e-15
        assert found["accumulated"]["losses"] == pytest.approx([found["accumulated"]["expected"]] * 4, rel=1e-12)


def test_processes_that_are_no_pipeline_need_a_mesh(two_by_two: Results) -> None:
    for message in refusals(two_by_two, "no mesh", "ZbfxError"):
        assert "the pipeline has 2 ranks, torch.distributed has 4" in message
        assert "DeviceMesh with the dimensions ('dp', 'pp')" in message


def test_zero_is_refused_where_it_has_no_meaning(two_by_two: Results) -> None:
    for message in refusals(two_by_two, "zero 2", "ZbfxError"):
        assert message == "zero is 0, or 1 with several replicas; found 2 with 2"


def test_zero_with_steps_that_are_validated_later(two_by_two: Results) -> None:
    """Every step clipped, some, none: ZeRO-1 sums each norm over the replicas, and rolls back and repeats alike."""
    for found in two_by_two.values():
        repeated = []
        for whole, shards in zip(found["clipped"][::2], found["clipped"][1::2], strict=True):
            assert shards["losses"] == pytest.approx(whole["losses"], rel=1e-12)
            assert shards["norm"] == pytest.approx(whole["norm"], rel=1e-12)
            assert shards["counts"] == whole["counts"]
            repeated.append(whole["counts"]["repeated"])
            for name, parameter in whole["parameters"].items():
                torch.testing.assert_close(shards["parameters"][name], parameter, rtol=1e-10, atol=1e-12)
        assert repeated[0] > 0 == repeated[2]


def test_other_initial_weights_are_refused_by_name(two_by_two: Results) -> None:
    for message in refusals(two_by_two, "other weights", "ZbfxError"):
        assert "other values than in replica 0 in replica 1, rank 0: 0.weight. " in message


def test_replica_without_data_is_refused_on_all_ranks(two_by_two: Results) -> None:
    messages = refusals(two_by_two, "no data", "InputError")
    reason = "expected (inputs[0], targets[0]), found ()"
    assert all(reason in message for message in messages)
    assert [message.startswith("replica 1 refused its batch: ") for message in messages] == [True, True, False, False]


@pytest.mark.parametrize(
    ("case", "reason"), [("other count", "found (12, 8)"), ("fewer", "expected 3 microbatches, found 2")]
)
def test_other_numbers_of_microbatches_are_refused_on_all_ranks(two_by_two: Results, case: str, reason: str) -> None:
    assert all(reason in message for message in refusals(two_by_two, case, "InputError"))


def test_refusals_harm_nothing(two_by_two: Results) -> None:
    first = two_by_two[0]["accumulated"]["losses"][0]
    assert {found["after refusals"] for found in two_by_two.values()} == {first}
    assert {found["evaluated"] for found in two_by_two.values()} == {first}


def test_fault_reaches_the_other_replica(two_by_two: Results) -> None:
    expected = "replica 1, rank 1, step 5, action B1.0 (stage 1, microbatch 0): ArithmeticError: on purpose"
    assert refusals(two_by_two, "fault", "PipelineFault") == [expected] * 4
