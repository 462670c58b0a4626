"""Scenarios of two ranks, of which rank 1 has a fault, for test_faults_on_purpose.py: functions of the rank, see
tests/support/pool.py. Faults leave the processes alive, so they follow each other in one launch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.processes.faults import outcome
from tests.support.models import mlp
from tests.support.reference import compiled
from zbfx.comm.together import from_rank
from zbfx.testing import faults

TIMEOUT_S = 2.5  # where a rank stands still for longer
STANDS_S = 4.5

CASES: dict[str, tuple[faults.Fault, faults.Spot, int, int | None]] = {
    "corrupt": (faults.Corrupt(byte=3, bit=7), faults.SEND, 8, 1),
    "wrong batch": (faults.WrongBatch(), faults.BATCH, 1, 1),
    "disk full": (faults.DiskFull(), faults.SAVE, 0, 1),
    "raise as it saves": (faults.Raise(), faults.SAVE, 0, 1),
    "slow": (faults.Slow(0.01), faults.every(faults.Kind.B), 1, None),
    "clock jump": (faults.ClockJump(-86400.0), faults.OPTIMIZER, 1, 1),
    "hang": (faults.Hang(STANDS_S), faults.action("B1.1"), 1, 1),
    "stop": (faults.Stop(STANDS_S), faults.action("F1.0"), 1, 1),
}


def trained(folder: Path, **options: Any) -> list[float]:
    problem = mlp(3)
    step = compiled(problem, 2, 3, check=False).bind(**options)
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(step(*problem.inputs, *problem.targets).item())
        optimizer.step()
        optimizer.zero_grad()
    step.save(folder, optimizer=optimizer)
    step.close()
    return losses


def one_after_the_other(rank: int, *names: str) -> dict[str, Any]:
    """What each rank says of each fault, the losses where there are any, and whether the fault struck."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(from_rank(0, "folder", name))
        for case in names:
            fault, at, after, times = CASES[case]
            losses: list[float] = []
            timeout_s = TIMEOUT_S if isinstance(fault, faults.Hang | faults.Stop) else 60.0
            options = {"timeout_s": timeout_s, "checksums": True, "check_batches": 1}
            with faults.injected(fault, at, rank=1, after=after, times=times) as struck:
                found[case] = outcome(lambda: losses.extend(trained(folder / case, **options)))  # noqa: B023
            found[case] |= {"losses": losses, "struck": struck.times}
        found["none"] = {"losses": trained(folder / "none")}
        found["unseen"] = {"losses": unseen(folder)}
    return found


def unseen(folder: Path) -> list[float]:
    """The losses with a flipped bit and without checksums."""
    with faults.injected(faults.Corrupt(byte=3, bit=7), faults.SEND, rank=0, after=8):
        return trained(folder / "unseen")


def slowed(rank: int) -> dict[str, Any]:
    """A stage's Bs take longer from the 21st step on; the order is planned again for that."""
    problem = mlp(4)
    step = compiled(problem, 2, 4, schedule="auto", check=False).bind()
    losses: list[float] = []

    def steps() -> None:
        losses.extend(step(*problem.inputs, *problem.targets).item() for _ in range(40))

    with faults.injected(faults.Slow(0.005), faults.every(faults.Kind.B), rank=1, after=80, times=None):
        printed = outcome(steps)["printed"]
        drifts = {f"{drift.kind}{drift.stage}": drift.since_step for drift in step.pace[0].drifts.values()}
        step.replan()
        losses.append(step(*problem.inputs, *problem.targets).item())
    orders = [" ".join(map(str, order)) for order in step.pipelines[0].schedule.ranks]
    step.close()
    return {"printed": printed, "drifts": drifts, "orders": orders, "losses": losses}
