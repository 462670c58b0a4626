"""Pipelines on GPUs: schedules, backends and transports agree, in bits where nothing is compiled; 200 steps; messages
by copy engines; ranks that fail; one GPU.

Run: pytest -m gpu tests/gpu/test_gpu.py (skipped without CUDA; GPU_TEST_LIMIT_S: seconds that each may take). On one
GPU two ranks share it, and NCCL stays out.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from zbfx.options import BACKENDS

ROOT = Path(__file__).parents[2]
LIMIT_S = float(os.environ.get("GPU_TEST_LIMIT_S", "280"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def launch(world: int, scenario: str, folder: Path, *arguments: str) -> list[Any]:
    """Every rank's result."""
    done = run(world, scenario, str(folder), *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def run(world: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "LIMIT_S": str(LIMIT_S - 15),
    }
    return subprocess.run(
        [*torchrun, "tests/gpu/gpu_worker.py", *arguments],
        cwd=ROOT,
        env=environment,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("world", [2, 4])
def test_schedules_backends_and_transports_agree(tmp_path: Path, world: int) -> None:
    """Whatever rank holds a parameter under a placement, its gradient is the one of 1F1B in one process."""
    ranks = launch(world, "equal", tmp_path)
    expected = ranks[0]["one process"]
    for case in ranks[0]:
        found = {name: value for rank in ranks for name, value in rank[case].items()}
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if "inductor" in case:
                assert error(value, expected[name]) < 2e-2, (case, name)
            else:
                assert torch.equal(value, expected[name]), (case, name, error(value, expected[name]))


def test_weights_that_are_cast_once_a_step_are_never_old(tmp_path: Path) -> None:
    """Prologues in captured graphs, too, read what was written in place since the last replay."""
    ranks = launch(2, "masters", tmp_path)
    expected = ranks[0].pop("one process")["losses"]
    assert not torch.equal(expected[0], expected[6])
    for rank in ranks:
        for backend, found in rank.items():
            print(backend, "held", found.get("held"), "predicted", found.get("predicted"))
            for loss, wanted in zip(found["losses"], expected, strict=True):
                assert error(loss, wanted) < 1e-2 if "inductor" in backend else torch.equal(loss, wanted), backend


def test_one_microbatch(tmp_path: Path) -> None:
    ranks = launch(2, "one microbatch", tmp_path)
    expected = ranks[0].pop("one process")
    for case in ranks[1]:
        found = {name: value for rank in ranks if case in rank for name, value in rank[case].items()}
        if case != "one process":
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in found.items()), case


@pytest.mark.parametrize("world", [2, 4])
def test_code_is_loaded_before_messages(tmp_path: Path, world: int) -> None:
    first, *others = launch(world, "loading", tmp_path)
    expected = first["zb-2p eager"][0]
    for case, (loss, *later) in first.items():
        assert len(later) == 3
        assert all(torch.equal(loss, again) for again in later), case
        assert error(loss, expected) < 1e-2 if "inductor" in case else torch.equal(loss, expected), case
    assert all(found == first for found in others)


def test_steps_of_unlike_microbatches_equal_plain_autograd(tmp_path: Path) -> None:
    """With every backend, before and after steps of the example's shape and number, which are captured where others
    are."""
    for errors in launch(2, "unlike", tmp_path):
        assert errors.keys() == BACKENDS.keys()
        assert max(errors.values()) < 1e-9, errors


def test_forwards_are_compiled_and_captured_as_steps_are(tmp_path: Path) -> None:
    """Outputs, evaluations and metrics are the same each time, and those of eager in bits where nothing is compiled."""
    first, other = launch(2, "outputs", tmp_path)
    expected = first["eager"][0]
    for backend, rows in first.items():
        assert rows[-1].pop("captured") == [BACKENDS[backend].captures] * 3
        other[backend][-1].pop("captured")
        for row, there in zip(rows, other[backend], strict=True):
            assert row.keys() == expected.keys()
            assert all(torch.equal(value, there[name]) for name, value in row.items()), backend
            for name, value in row.items():
                assert torch.equal(value, rows[0][name]), (backend, name)
                if BACKENDS[backend].compiles:
                    assert error(value, expected[name]) < 5e-2, (backend, name)
                else:
                    assert torch.equal(value, expected[name]), (backend, name)


def test_captured_steps_are_saved_and_loaded(tmp_path: Path) -> None:
    """Saved by two ranks, at once and beside further steps, and loaded by one that has trained: all bits, and the next
    losses."""
    ranks = launch(2, "checkpointed", tmp_path)
    (one,) = launch(1, "checkpointed", tmp_path)
    assert all(all(found.pop("captured")["engines"]) for found in (*ranks, one))
    saved = {name: value for rank in ranks for name, value in rank["saved"]["state"].items()}
    assert one.keys() == {"at once", "aside"}
    for found in one.values():
        assert found["state"].keys() == saved.keys()
        assert all(torch.equal(value, saved[name]) for name, value in found["state"].items())
        assert torch.equal(found["losses"], ranks[0]["saved"]["losses"])
        assert found["count"] == ranks[0]["saved"]["count"] == 6


def test_steps_do_not_wait_for_the_device(tmp_path: Path) -> None:
    first, other = launch(2, "unwaited", tmp_path)
    losses = [loss for case in first.values() for loss in case]
    assert len(losses) >= 36
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert other == first


def test_memory_is_asked_for_while_messages_wait(tmp_path: Path) -> None:
    first, other = launch(2, "emptied", tmp_path)
    for case, losses in first.items():
        assert len(losses) == 8
        assert all(error(loss, losses[0]) < 1e-3 for loss in losses), case
    assert other == first


def test_profiles(tmp_path: Path) -> None:
    """With Ws that run on a second stream to the end of the step."""
    ranks = launch(2, "profiled", tmp_path)
    for backend in BACKENDS:
        for planned, profiled, beside, same in (rank[backend] for rank in ranks):
            assert planned == profiled
            assert beside > 0
            assert same
    assert {*ranks[0]} == {*BACKENDS}


@two_gpus
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_hundred_steps(tmp_path: Path, backend: str) -> None:
    for found in launch(2, "steady", tmp_path, backend):
        assert found["allocated"][0] == found["allocated"][1]
        assert found["reserved"][0] == found["reserved"][1]
        assert found["slow"] == 0, found


@pytest.mark.parametrize("world", [2, 4])
def test_optimizer_steps_without_a_barrier(tmp_path: Path, world: int) -> None:
    """Equal in bits to those with one, on every backend, decided by the process and by the device."""
    for rank in launch(world, "optimizer", tmp_path):
        for case, found in rank.items():
            setting, _, sync = case.rpartition(" ")
            if sync == "True":
                continue
            expected = rank[f"{setting} True"]
            assert torch.equal(found["losses"], expected["losses"]), case
            for name, value in found["parameters"].items():
                assert torch.equal(value, expected["parameters"][name]), (case, name)
            assert found["counts"]["skipped"] == expected["counts"]["skipped"] == 2, case
            assert found["counts"]["clipped"] == expected["counts"]["clipped"], case
            assert found["counts"]["clipped"] == 6 or " 0.01 " not in case, case
            assert found["counts"]["clipped"] == 0 or " 1000.0 " not in case, case
            assert found["counts"]["repeated"] >= expected["counts"]["clipped"], case


def test_one_gpu(tmp_path: Path) -> None:
    (rank,) = launch(1, "alone", tmp_path)
    for case, values in rank.items():
        for name, value in values.items():
            assert error(value, rank["plain"][name]) < 2e-2, (case, name)
            if "inductor" not in case and case != "plain":
                assert torch.equal(value, rank["one process"][name]), (case, name)


def test_values_and_places_of_parameters(tmp_path: Path) -> None:
    """Captured steps follow a model that was moved away and back."""
    for index, rank in enumerate(launch(2, "started", tmp_path)):
        (seeds,), same = rank["warnings"]
        assert seeds.startswith("ranks of one pipeline have different values of ")
        assert "(rank 0 and rank 1)" in seeds
        assert same == []
        assert rank["hashes"][0] == rank["hashes"][1]
        assert f"the pipeline was bound on cuda:{index % torch.cuda.device_count()}; found " in rank["refusal"]
        assert "on cpu. Move the model back (model.to('cuda" in rank["refusal"]
        assert rank["captured"].keys() == rank["eager"].keys()
        assert all(torch.equal(value, rank["eager"][name]) for name, value in rank["captured"].items())


def test_messages_by_copies(tmp_path: Path) -> None:
    assert launch(2, "lines", tmp_path) == [[True] * 6] * 2


def test_no_lines_between_hosts(tmp_path: Path) -> None:
    assert launch(2, "apart", tmp_path) == [(0, 0)] * 2


FAILED = ", for its device waits for a rank that has failed. rank 1"
MISSING = ": its device has waited for other ranks for "


@pytest.mark.parametrize(
    ("scenario", "backend", "reason"),
    [
        ("failing", "eager", f"{FAILED}, step 2, action W1.0 (stage 1, microbatch 0): ZeroDivisionError"),
        ("failing", "cudagraph", f"{FAILED}: ZeroDivisionError"),
        ("missing", "eager", MISSING),
        ("missing", "cudagraph", MISSING),
    ],
)
def test_a_process_whose_device_waits_in_vain_ends(tmp_path: Path, scenario: str, backend: str, reason: str) -> None:
    done = run(2, scenario, str(tmp_path), backend)
    assert done.returncode != 0
    assert f"zbfx: rank 0 ends{reason}" in done.stderr, done.stderr[-4000:]


FAULT_S = 15.0
SAID = {
    "cuda error": "CUDA error: device-side assert triggered",
    "out of memory": "OutOfMemoryError: CUDA out of memory",
    "raise": "ZeroDivisionError: division by zero",
    "killed": "rank 1: its process has ended",
}
FAULTS = [
    *[(backend, failure, "later step") for backend in ("eager", "inductor") for failure in SAID],
    *[("eager", failure, "first step") for failure in SAID],
    *[("cudagraph", failure, "later step") for failure in ("cuda error", "raise", "killed")],
    *[("eager", failure, "optimizer") for failure in ("cuda error", "raise")],
    *[("eager", failure, "between calls") for failure in ("cuda error", "raise", "killed")],
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("backend", "failure", "place"), FAULTS)
def test_a_failure_reaches_every_rank(tmp_path: Path, backend: str, failure: str, place: str) -> None:
    """Both ranks have printed the first one's message, and ended, within seconds; NCCL between them where there are two
    GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not torchrun, which ends the others once one has ended; its store, as there, lives in a process that is no rank.
    store = f"TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False)"
    serve = f"import torch.distributed as dist, time; store = dist.{store}; time.sleep(100)"
    command = [sys.executable, "tests/gpu/gpu_worker.py", "fault", str(tmp_path), backend, failure, place]
    with ExitStack() as stack:
        server = stack.enter_context(subprocess.Popen([sys.executable, "-c", serve]))
        stack.callback(server.kill)
        ranks = []
        for rank in range(2):
            errors = stack.enter_context((tmp_path / f"stderr {rank}").open("w"))
            told = {**os.environ, **environment(rank, port)}
            ranks.append(stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=told, stderr=errors)))
            stack.callback(ranks[rank].kill)
        for process in ranks:
            process.wait(100)
        ended = time.time()
    said = [(tmp_path / f"stderr {rank}").read_text() for rank in range(2)]
    for rank in range(2):
        if rank == 0 or failure != "killed":
            line = next((line for line in said[rank].splitlines() if line.startswith("zbfx: ")), "")
            assert "rank 1" in line, said[rank][-4000:]
            assert SAID[failure] in said[rank], said[rank][-4000:]
        assert ranks[rank].returncode != 0
    assert ended - float((tmp_path / "begun").read_text()) < FAULT_S, said


def environment(rank: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "LIMIT_S": "90",
    }
