"""Pipelines over real processes and gloo: the same bits as in one process, and no rank left waiting when one fails."""

from __future__ import annotations

import pytest
import torch

from tests.processes import worker
from tests.support.models import gpt, gpt2
from tests.support.pool import Launch, Results
from tests.support.reference import assert_same

SOON_S = 20.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_twenty_steps_equal_in_bits_to_one_process(launch: Launch, schedule: str) -> None:
    local = launch(1, worker.trained_alone, gpt, 4, 5, worker.STEPS)[0]
    found = launch(4, worker.trained, schedule)
    assert len(local["losses"]) == 20
    assert local["losses"][-1] < 0.5 * local["losses"][0]
    assert [found[rank]["losses"] for rank in range(4)] == [local["losses"]] * 4
    parameters = {name: p for rank in range(4) for name, p in found[rank]["parameters"].items()}
    assert parameters.keys() == local["parameters"].keys()
    assert all(torch.equal(parameter, local["parameters"][name]) for name, parameter in parameters.items())


def test_case_57_256_microbatches(launch: Launch) -> None:
    """More messages than any backend queues at once."""
    found = launch(4, worker.many_microbatches)
    assert [found[rank]["256"] for rank in range(4)] == [found[0]["local"]] * 4


def test_every_rank_owns_the_parameters_of_its_stage(launch: Launch) -> None:
    found = launch(4, worker.trained, "zb-h1")
    owned = [set(found[rank]["parameters"]) for rank in range(4)]
    assert sum(map(len, owned)) == len(set().union(*owned))
    assert "tokens.weight" in owned[0]
    assert "head.weight" in owned[3]


def test_tied_weight_is_made_equal_and_stays_equal(launch: Launch) -> None:
    name = "transformer.wte.weight"
    found, local = launch(3, worker.tied), launch(1, worker.trained_alone, gpt2, 3, 4, 5)[0]
    first, last = (found[rank]["parameters"][name] for rank in (0, 2))
    assert torch.equal(first, last)
    assert torch.equal(first, local["parameters"][name])
    assert found[2]["losses"] == local["losses"]


def test_parameter_that_several_ranks_read_is_made_equal(launch: Launch) -> None:
    """Also a frozen one, and one that gets its gradient on a single rank."""
    found = launch(3, worker.shared)
    assert found[0]["losses"] == found[2]["losses"] == found[0]["local"]
    for rank in (0, 2):  # made equal on the ranks that read them, and still other on rank 1
        (told,) = found[rank]["warnings"]
        assert told.startswith(f"{DIFFERENT} frozen (rank 0 and rank 1), late (rank 0 and rank 1), ")


DIFFERENT = "ranks of one pipeline have different values of"
NINE = "0.weight (rank 0 and rank 1), 0.bias (rank 0 and rank 1), 2.weight (rank 0 and rank 1), ... and 9 more"
FIVE = "4.weight (rank 0 and rank 1), 4.bias (rank 0 and rank 1), 6.weight (rank 0 and rank 1), ... and 5 more"


@pytest.mark.parametrize(
    ("case", "different"),
    [("seeds", NINE), ("checkpoint", NINE), ("meta", ""), ("bound again", ""), ("checkpoint after bind", FIVE)],
)
def test_ranks_that_start_from_other_values_are_warned(launch: Launch, case: str, different: str) -> None:
    """Not where tensors have no data, nor where each rank has trained its own stages since an earlier bind."""
    expected = [
        f"{DIFFERENT} {different}. Each stage starts from the values of the rank that runs it: if one rank alone has "
        f"loaded a checkpoint, or each has a seed of its own, they make a model that no rank has. Seed every rank "
        f"alike and load the checkpoint on every rank before bind; leave tensors of other ranks' stages on the meta "
        f"device where that is meant"
    ]
    found = launch(3, worker.other_values)
    for rank in (0, 2):
        assert found[rank][case] == (expected if different else [])
        assert found[rank]["same"] == []


def test_random_numbers_follow_the_seed_of_rank_0(launch: Launch) -> None:
    found = launch(3, worker.seeded)
    assert found[0]["seeded"] == found[2]["seeded"] == found[0]["seeded local"]


def test_further_shapes_from_one_trace(launch: Launch) -> None:
    found = launch(3, worker.shapes)
    for rank in (0, 2):
        for loss, gradients, expected, wanted in found[rank]["steps"]:
            assert_same((loss, gradients), (expected, wanted), 1e-6)
        assert not [note for notes in found[rank]["notes"] for note in notes if "traced for" in note]
        measured, planned, (four_s, two_s, again_s) = found[rank]["profiles"]
        assert measured == planned
        assert two_s < four_s == again_s


def refusals(results: Results, case: str, kind: str) -> list[str]:
    """The messages of all ranks, which came soon."""
    for found in results.values():
        assert found[case]["type"] == kind, found[case]
        assert found[case]["seconds"] < SOON_S
    return [found[case]["text"] for found in results.values()]


@pytest.mark.parametrize(
    ("case", "rank", "parts"),
    [
        ("other order", 2, "the schedule, the programs"),
        ("other graph", 1, "the model or its loss, the stages, the programs"),
    ],
)
def test_another_plan_is_refused_on_every_rank(launch: Launch, case: str, rank: int, parts: str) -> None:
    messages = refusals(launch(4, worker.refusals_of_bind), case, "ZbfxError")
    assert len(set(messages)) == 1
    assert f"ranks [{rank}] hold another plan than rank 0; what differs: {parts}. Compile" in messages[0]


DISAGREEMENTS = {
    "other options": "on_nonfinite is 'keep' on rank 0, 'drop' on rank 1; timeout_s is 600.0 on rank 0, 60.0 on rank 1",
    "unknown option": "on_nonfinite is one of ('keep', 'drop', 'raise'); found 'dorp'",
    "other arguments": "check is False on rank 0, True on rank 3",
    "other calls": "rank 0 is at compile (the trace), rank 1 is at bind, rank 2 is at bind, rank 3 is at bind",
}


@pytest.mark.parametrize(("case", "found"), DISAGREEMENTS.items(), ids=DISAGREEMENTS.keys())
def test_ranks_that_ask_for_different_things_hear_of_it(launch: Launch, case: str, found: str) -> None:
    for message in refusals(launch(4, worker.disagreements), case, "ZbfxError"):
        assert found in message


@pytest.mark.parametrize("case", ["other batch", "other evaluation"])
def test_ranks_with_different_batches_hear_of_it(launch: Launch, case: str) -> None:
    ranks = launch(4, worker.disagreements)
    for message in refusals(ranks, case, "InputError"):
        assert "rank 2 was given other values of inputs[0] than rank 0" in message
    after = [found["after other batch"] for found in ranks.values()]
    assert after == [[ranks[0]["alone"]] * 2] * 4


def test_step_without_its_process_groups_says_so(launch: Launch) -> None:
    for message in refusals(launch(4, worker.closed), "group gone", "ZbfxError"):
        assert "destroy_process_group was called after bind" in message


def test_compile_where_another_rank_has_ended_says_so(launch: Launch) -> None:
    for message in refusals(launch(3, worker.killed, ends={1}), "compile after", "PipelineFault"):
        assert "compile (the trace): waiting for another rank, which has ended or raised an error before" in message
        assert "or made other calls (every rank makes the same calls in the same order" in message


def test_what_one_rank_refuses_every_rank_refuses(launch: Launch) -> None:
    messages = refusals(launch(4, worker.refusals_of_bind), "no data", "ZbfxError")
    assert len(set(messages)) == 1
    assert "rank 3: 10.bias is on the meta device" in messages[0]


def test_rank_and_number_of_processes_must_fit(launch: Launch) -> None:
    found = launch(4, worker.refusals_of_bind)
    assert refusals(found, "wrong rank", "ZbfxError")[3].endswith("in torch.distributed, 3; found 0")
    for message in refusals(found, "wrong world", "ZbfxError"):
        assert "the pipeline has 3 ranks, torch.distributed has 4" in message


def test_a_closed_step_says_so(launch: Launch) -> None:
    for message in refusals(launch(4, worker.closed), "closed", "ZbfxError"):
        assert message == "this step was closed; bind the pipeline again to go on"


def test_training_resumes_from_what_all_ranks_saved(launch: Launch) -> None:
    """In all bits, with buffers that forwards write, dropout and the optimizer's state."""
    ranks = launch(4, worker.resumed)
    for rank, found in ranks.items():
        assert found["resumed"] == found["whole"][2:] == ranks[0]["whole"][2:]
        after = found["resumed, after"]
        assert set(after) == {name for name, _ in worker.normed().model.named_parameters() if name[0] == str(rank)} | {
            f"{rank}.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
        }
        assert all(torch.equal(after[name], wanted) for name, wanted in found["whole, after"].items())
        assert after[f"{rank}.1.num_batches_tracked"] == 12


def test_bad_batch_is_refused_before_anything_is_sent(launch: Launch) -> None:
    ranks = launch(4, worker.faults)
    for message in refusals(ranks, "bad batch", "InputError"):
        assert "expected shape (6, 8)" in message
        assert "found (7, 8)" in message
    assert {found["after bad batch"] for found in ranks.values()} == {ranks[0]["bound again"]}


def test_failure_reaches_every_rank_with_rank_step_and_action(launch: Launch) -> None:
    messages = refusals(launch(4, worker.faults), "fault", "PipelineFault")
    expected = "rank 2, step 1, action B2.1 (stage 2, microbatch 1): InjectedError: on purpose"
    assert messages == [expected] * 4


def test_step_after_a_failure_says_so(launch: Launch) -> None:
    for message in refusals(launch(4, worker.faults), "after fault", "PipelineFault"):
        assert "has failed before" in message
        assert "bind it again" in message
        assert "action B2.1" in message


def test_a_rank_that_ends_in_bind_is_not_waited_for_until_the_timeout(launch: Launch) -> None:
    results = launch(2, worker.ended_in_bind, ends={1})
    (message,) = refusals(results, "ended", "PipelineFault")
    assert "waiting for the other ranks in bind, one of which is lost" in message
    assert results[0]["late"] == results[0]["local"], "one that is late in a step is waited for"


def test_killed_rank_is_named_by_the_others(launch: Launch) -> None:
    for message in refusals(launch(3, worker.killed, ends={1}), "killed", "PipelineFault"):
        assert "waiting for message" in message
        assert "rank 1, which is lost" in message
