"""Pipelines over real processes and gloo: the same bits as in one process, and no rank left waiting when one fails.

Run: pytest tests/processes/test_processes.py (CPU; one launch of four processes and one of three, see
tests/processes/worker.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.worker import normed
from tests.support.reference import assert_same

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
SOON_S = 20.0

Results = dict[int, dict[str, Any]]


def launch(
    world: int, scenario: str, folder: Path, survivors: set[int], module: str = "tests.processes.worker"
) -> Results:
    """Results of the ranks that end by themselves: the survivors. Nothing that was started is left behind."""
    command = [sys.executable, "-W", "error", "-m", module, str(world), scenario, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=LIMIT_S)
        finally:
            kill_group(process.pid)
    assert process.returncode == 0, errors
    results = {rank: torch.load(file) for rank in range(world) if (file := folder / f"{rank}.pt").exists()}
    assert set(results) == survivors, errors
    return results


def kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(4, "four-ranks", tmp_path_factory.mktemp("four"), {0, 1, 2, 3})


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(3, "three-ranks", tmp_path_factory.mktemp("three"), {0, 2})  # rank 1 is killed


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_twenty_steps_equal_in_bits_to_one_process(four: Results, schedule: str) -> None:
    local = four[0]["local"]
    assert len(local["losses"]) == 20
    assert local["losses"][-1] < 0.5 * local["losses"][0]
    assert [four[rank][schedule]["losses"] for rank in range(4)] == [local["losses"]] * 4
    parameters = {name: p for rank in range(4) for name, p in four[rank][schedule]["parameters"].items()}
    assert parameters.keys() == local["parameters"].keys()
    assert all(torch.equal(parameter, local["parameters"][name]) for name, parameter in parameters.items())


def test_case_57_256_microbatches(four: Results) -> None:
    """More messages than any backend queues at once."""
    assert [four[rank]["256"] for rank in range(4)] == [four[0]["256 local"]] * 4


def test_every_rank_owns_the_parameters_of_its_stage(four: Results) -> None:
    owned = [set(four[rank]["zb-h1"]["parameters"]) for rank in range(4)]
    assert sum(map(len, owned)) == len(set().union(*owned))
    assert "tokens.weight" in owned[0]
    assert "head.weight" in owned[3]


def test_tied_weight_is_made_equal_and_stays_equal(three: Results) -> None:
    name = "transformer.wte.weight"
    first, last = (three[rank]["tied"]["parameters"][name] for rank in (0, 2))
    assert torch.equal(first, last)
    assert torch.equal(first, three[0]["local"]["parameters"][name])
    assert three[2]["tied"]["losses"] == three[0]["local"]["losses"]


def test_parameter_that_several_ranks_read_is_made_equal(three: Results) -> None:
    """Also a frozen one, and one that gets its gradient on a single rank."""
    assert three[0]["shared"]["losses"] == three[2]["shared"]["losses"] == three[0]["shared"]["local"]
    for rank in (0, 2):  # made equal on the ranks that read them, and still other on rank 1
        (told,) = three[rank]["shared"]["warnings"]
        assert told.startswith(f"{DIFFERENT} frozen (rank 0 and rank 1), late (rank 0 and rank 1), ")


DIFFERENT = "ranks of one pipeline have different values of"
NINE = "0.weight (rank 0 and rank 1), 0.bias (rank 0 and rank 1), 2.weight (rank 0 and rank 1), ... and 9 more"
FIVE = "4.weight (rank 0 and rank 1), 4.bias (rank 0 and rank 1), 6.weight (rank 0 and rank 1), ... and 5 more"


@pytest.mark.parametrize(
    ("case", "different"),
    [("seeds", NINE), ("checkpoint", NINE), ("meta", ""), ("bound again", ""), ("checkpoint after bind", FIVE)],
)
def test_ranks_that_start_from_other_values_are_warned(three: Results, case: str, different: str) -> None:
    """Not where tensors have no data, nor where each rank has trained its own stages since an earlier bind."""
    expected = [
        f"{DIFFERENT} {different}. Each stage starts from the values of the rank that runs it: if one rank alone has "
        f"loaded a checkpoint, or each has a seed of its own, they make a model that no rank has. Seed every rank "
        f"alike and load the checkpoint on every rank before bind; leave tensors of other ranks' stages on the meta "
        f"device where that is meant"
    ]
    for rank in (0, 2):
        assert three[rank]["other values"][case] == (expected if different else [])
        assert three[rank]["other values"]["same"] == []


def test_random_numbers_follow_the_seed_of_rank_0(three: Results) -> None:
    assert three[0]["seeded"] == three[2]["seeded"] == three[0]["seeded local"]


def test_further_shapes_from_one_trace(three: Results) -> None:
    for rank in (0, 2):
        for loss, gradients, expected, wanted in three[rank]["shapes"]["steps"]:
            assert_same((loss, gradients), (expected, wanted), 1e-6)
        assert not [note for notes in three[rank]["shapes"]["notes"] for note in notes if "traced for" in note]
        measured, planned, (four_s, two_s, again_s) = three[rank]["shapes"]["profiles"]
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
def test_another_plan_is_refused_on_every_rank(four: Results, case: str, rank: int, parts: str) -> None:
    messages = refusals(four, case, "ZbfxError")
    assert len(set(messages)) == 1
    assert f"ranks [{rank}] hold another plan than rank 0; what differs: {parts}. Compile" in messages[0]


DISAGREEMENTS = {
    "other options": "timeout_s is 600.0 on rank 0, 60.0 on rank 1; on_nonfinite is 'keep' on rank 0, 'drop' on rank 1",
    "unknown option": "on_nonfinite is one of ('keep', 'drop', 'raise'); found 'dorp'",
    "other arguments": "check is False on rank 0, True on rank 3",
    "other calls": "rank 0 is at compile (the trace), rank 1 is at bind, rank 2 is at bind, rank 3 is at bind",
}


@pytest.mark.parametrize(("case", "found"), DISAGREEMENTS.items(), ids=DISAGREEMENTS.keys())
def test_ranks_that_ask_for_different_things_hear_of_it(four: Results, case: str, found: str) -> None:
    for message in refusals(four, case, "ZbfxError"):
        assert found in message


@pytest.mark.parametrize("case", ["other batch", "other evaluation"])
def test_ranks_with_different_batches_hear_of_it(four: Results, case: str) -> None:
    for message in refusals(four, case, "InputError"):
        assert "rank 2 was given other values of inputs[0] than rank 0" in message
    after = [found["after other batch"] for found in four.values()]
    assert after == [[four[0]["bound again"]] * 2] * 4


def test_step_without_its_process_groups_says_so(four: Results) -> None:
    for message in refusals(four, "group gone", "ZbfxError"):
        assert "destroy_process_group was called after bind" in message


def test_compile_where_another_rank_has_ended_says_so(three: Results) -> None:
    for message in refusals(three, "compile after", "PipelineFault"):
        assert "compile (the trace): waiting for another rank, which has ended or raised an error before" in message
        assert "or made other calls (every rank makes the same calls in the same order" in message


def test_what_one_rank_refuses_every_rank_refuses(four: Results) -> None:
    messages = refusals(four, "no data", "ZbfxError")
    assert len(set(messages)) == 1
    assert "rank 3: 10.bias is on the meta device" in messages[0]


def test_rank_and_number_of_processes_must_fit(four: Results) -> None:
    assert refusals(four, "wrong rank", "ZbfxError")[3].endswith("in torch.distributed, 3; found 0")
    for message in refusals(four, "wrong world", "ZbfxError"):
        assert "the pipeline has 3 ranks, torch.distributed has 4" in message


def test_a_closed_step_says_so(four: Results) -> None:
    for message in refusals(four, "closed", "ZbfxError"):
        assert message == "this step was closed; bind the pipeline again to go on"


def test_training_resumes_from_what_all_ranks_saved(four: Results) -> None:
    """In all bits, with buffers that forwards write, dropout and the optimizer's state."""
    for rank, results in four.items():
        found = results["resumed"]
        assert found["resumed"] == found["whole"][2:] == four[0]["resumed"]["whole"][2:]
        after = found["resumed, after"]
        assert set(after) == {name for name, _ in normed().model.named_parameters() if name[0] == str(rank)} | {
            f"{rank}.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
        }
        assert all(torch.equal(after[name], wanted) for name, wanted in found["whole, after"].items())
        assert after[f"{rank}.1.num_batches_tracked"] == 12


def test_bad_batch_is_refused_before_anything_is_sent(four: Results) -> None:
    for message in refusals(four, "bad batch", "InputError"):
        assert "expected shape (6, 8)" in message
        assert "found (7, 8)" in message
    assert {found["after bad batch"] for found in four.values()} == {four[0]["bound again"]}


def test_failure_reaches_every_rank_with_rank_step_and_action(four: Results) -> None:
    messages = refusals(four, "fault", "PipelineFault")
    expected = "rank 2, step 1, action B2.1 (stage 2, microbatch 1): ArithmeticError: on purpose"
    assert messages == [expected] * 4


def test_step_after_a_failure_says_so(four: Results) -> None:
    for message in refusals(four, "after fault", "PipelineFault"):
        assert "has failed before" in message
        assert "bind it again" in message
        assert "action B2.1" in message


def test_a_rank_that_ends_in_bind_is_not_waited_for_until_the_timeout(tmp_path: Path) -> None:
    results = launch(2, "meeting-ranks", tmp_path, {0})  # rank 1 is killed
    (message,) = refusals(results, "ended", "PipelineFault")
    assert "waiting for the other ranks in bind, one of which is lost" in message
    assert results[0]["late"] == results[0]["local"], "one that is late in a step is waited for"


def test_killed_rank_is_named_by_the_others(three: Results) -> None:
    for message in refusals(three, "killed", "PipelineFault"):
        assert "waiting for message" in message
        assert "rank 1, which is lost" in message
