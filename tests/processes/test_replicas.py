"""Pipelines times replicas over gloo: gradients and losses of one process on the batches of all, and refusals."""

from __future__ import annotations

import pytest
import torch

from tests.processes import replicas_worker as worker
from tests.processes.test_processes import refusals
from tests.support.models import Maker, gpt, gpt2
from tests.support.pool import Launch, Results

SCHEDULES: dict[Maker, tuple[str, ...]] = {
    gpt: ("gpipe", "1f1b", "zb-h1", "zb-h2", "v-min", "interleaved-1f1b"),
    gpt2: ("zb-h1", "zb-v-order"),
}


def assert_equal_to_one_process(results: Results, names: set[str]) -> None:
    """All processes train all pipelines for 20 steps, in float64, with the losses and gradients of plain autograd."""
    for found in results.values():
        assert set(found) == names
        for name, figures in found.items():
            assert figures["steps"] == 20
            assert figures["loss"] < 1e-12, (name, figures)
            assert figures["gradient"] < 1e-12, (name, figures)


def two_by_two(launch: Launch, make: Maker) -> Results:
    return launch(4, worker.two_by_two, make, *SCHEDULES[make])


def test_two_by_two_equals_one_process(launch: Launch) -> None:
    for make, schedules in SCHEDULES.items():
        names = {f"{make.__name__} {schedule}" for schedule in (*schedules, "from a plan on disk")}
        assert_equal_to_one_process(two_by_two(launch, make), names)


@pytest.mark.parametrize("make", SCHEDULES, ids=lambda make: make.__name__)
def test_schedules_of_replicas_agree_in_bits(launch: Launch, make: Maker) -> None:
    found = two_by_two(launch, make).values()
    assert len({figures["last"] for trained in found for figures in trained.values()}) == 1


def test_four_by_one_equals_one_process(launch: Launch) -> None:
    found = launch(4, worker.trained_alike, gpt2, 4, 1, "1f1b", "zb-h1")
    assert_equal_to_one_process(found, {"gpt2 zb-h1", "gpt2 1f1b"})


def test_two_by_four_equals_one_process(launch: Launch) -> None:
    assert_equal_to_one_process(launch(8, worker.trained_alike, gpt2, 2, 4, "zb-h1"), {"gpt2 zb-h1"})


@pytest.mark.parametrize(("replicas", "ranks"), [(2, 2), (4, 1)])
def test_zero_has_the_bits_of_unsharded_optimizers(launch: Launch, replicas: int, ranks: int) -> None:
    """In float32, with a tied parameter that two ranks hold; each replica steps its share of the elements."""
    for found in launch(4, worker.sharded, replicas, ranks).values():
        assert len(found) == 1
        for whole, shards in found.values():
            assert len(whole["losses"]) == 20
            assert whole["losses"] == shards["losses"]
            assert whole["evaluated"] == shards["evaluated"]
            assert whole["parameters"].keys() == shards["parameters"].keys()
            for name, parameter in whole["parameters"].items():
                assert torch.equal(parameter, shards["parameters"][name]), name
            assert whole["size"] <= shards["size"] * replicas < whole["size"] + replicas * 64


def test_gradients_of_several_steps_add_up_after_the_reduction(launch: Launch) -> None:
    for found in launch(4, worker.steps_and_refusals).values():
        assert found["accumulated"]["kept"]
        assert found["accumulated"]["error"] < 1e-15
        assert found["accumulated"]["losses"] == pytest.approx([found["accumulated"]["expected"]] * 4, rel=1e-12)


def test_a_schedule_trains_whatever_its_name(launch: Launch) -> None:
    """A further shape is planned with the user's function: no name of it turns training off."""
    names = ("forward", "evaluate", "F", "one by one")
    for found in launch(2, worker.named_schedules, *names).values():
        assert found.keys() == set(names)
        assert all(error < 1e-15 for errors in found.values() for error in errors), found


def test_processes_that_are_no_pipeline_need_a_mesh(launch: Launch) -> None:
    for message in refusals(launch(4, worker.refusals_of_bind), "no mesh", "ZbfxError"):
        assert "the pipeline has 2 ranks, torch.distributed has 4" in message
        assert "DeviceMesh with the dimensions ('dp', 'pp')" in message


def test_zero_is_refused_where_it_has_no_meaning(launch: Launch) -> None:
    for message in refusals(launch(4, worker.refusals_of_bind), "zero 2", "ZbfxError"):
        assert message == "zero is 0, or 1 with several replicas; found 2 with 2"


def test_zero_with_steps_that_are_validated_later(launch: Launch) -> None:
    """Every step clipped, some, none: ZeRO-1 sums each norm over the replicas, and rolls back and repeats alike."""
    for found in launch(4, worker.clipped).values():
        repeated = []
        for whole, shards in zip(found[::2], found[1::2], strict=True):
            assert shards["losses"] == pytest.approx(whole["losses"], rel=1e-12)
            assert shards["norm"] == pytest.approx(whole["norm"], rel=1e-12)
            assert shards["counts"] == whole["counts"]
            repeated.append(whole["counts"]["repeated"])
            for name, parameter in whole["parameters"].items():
                torch.testing.assert_close(shards["parameters"][name], parameter, rtol=1e-10, atol=1e-12)
        assert repeated[0] > 0 == repeated[2]


def test_other_initial_weights_are_refused_by_name(launch: Launch) -> None:
    for message in refusals(launch(4, worker.refusals_of_bind), "other weights", "ZbfxError"):
        assert "other values than in replica 0 in replica 1, rank 0: 0.weight. " in message


def test_replica_without_data_is_refused_on_all_ranks(launch: Launch) -> None:
    messages = refusals(launch(4, worker.steps_and_refusals), "no data", "InputError")
    reason = "expected (inputs[0], targets[0]), found ()"
    assert all(reason in message for message in messages)
    assert [message.startswith("replica 1 refused its batch: ") for message in messages] == [True, True, False, False]


@pytest.mark.parametrize(
    ("case", "reason"), [("other count", "found (12, 8)"), ("fewer", "expected 3 microbatches, found 2")]
)
def test_other_numbers_of_microbatches_are_refused_on_all_ranks(launch: Launch, case: str, reason: str) -> None:
    found = launch(4, worker.steps_and_refusals)
    assert all(reason in message for message in refusals(found, case, "InputError"))


def test_refusals_harm_nothing(launch: Launch) -> None:
    ranks = launch(4, worker.steps_and_refusals)
    first = ranks[0]["accumulated"]["losses"][0]
    assert {found["after refusals"] for found in ranks.values()} == {first}
    assert {found["evaluated"] for found in ranks.values()} == {first}


def test_fault_reaches_the_other_replica(launch: Launch) -> None:
    expected = "replica 1, rank 1, step 5, action B1.0 (stage 1, microbatch 0): InjectedError: on purpose"
    assert refusals(launch(4, worker.steps_and_refusals), "fault", "PipelineFault") == [expected] * 4
