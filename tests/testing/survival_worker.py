"""Scenarios of replicas of which processes end, for test_survival.py: functions of the rank, see
tests/support/pool.py."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.proofs.survival import WIDTH, batch, pipeline
from tests.processes.worker import refusal
from tests.support.models import Problem, mlp, token_loss
from tests.support.reference import compiled
from zbfx.comm import seats
from zbfx.comm.seats import Crew, Wire
from zbfx.errors import PipelineFault
from zbfx.optim import PostValidated
from zbfx.testing import faults


def refused(rank: int) -> dict[str, Any]:
    """What does not go on when a process ends, by name."""
    mesh, pipe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), pipeline(2)
    found: dict[str, Any] = {
        "zero": refusal(lambda: pipe.bind(mesh, survive=True, zero=1)),
        "nonfinite": refusal(lambda: pipe.bind(mesh, survive=True, on_nonfinite="drop")),
        "no bool": refusal(lambda: pipe.bind(mesh, survive=1)),  # type: ignore[arg-type]
    }
    single = compiled(mlp(3), 4, 3, check=False)
    found["one replica"] = refusal(partial(single.bind, survive=True))
    step = pipe.bind(mesh, survive=True)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    found["validated"] = refusal(lambda: PostValidated(optimizer, step))
    inputs, targets = batch(0, rank // 2)
    found["other shapes"] = refusal(lambda: step(inputs[:-1], targets[:-1]))
    found["after it"] = step(inputs, targets).item()
    step.close()
    return found


def ends(rank: int, *killed: int) -> dict[str, Any]:
    """These processes are killed in their second step; the others are asked for what needs all."""
    mesh, pipe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), pipeline(2)
    step = pipe.bind(mesh, survive=True, timeout_s=60.0)
    found: dict[str, Any] = {"losses": []}

    def train() -> None:
        for number in range(3):
            found["losses"].append(step(*batch(number, rank // 2)).item())

    with faults.injected(faults.Kill(), faults.BATCH, rank=rank if rank in killed else -1, after=1):
        found["train"] = refusal(train)
    found["evaluate"] = refusal(lambda: step.evaluate(*batch(0, 0)))
    step.close()
    found["closed"] = refusal(lambda: step(*batch(0, 0)))
    return found


def late(rank: int) -> dict[str, Any]:
    """Process 3 is killed in its second step, and process 0 is too late, once, to connect."""
    mesh, pipe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), pipeline(2)
    step, late_once = pipe.bind(mesh, survive=True, timeout_s=60.0), iter([rank == 0])

    def wire(*args: Any) -> Any:
        if next(late_once, False):
            raise RuntimeError("late")
        return Wire(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seats, "Wire", wire)
        patch.setattr(seats, "MEETING", timedelta(seconds=2))
        with faults.injected(faults.Kill(), faults.action("F1.1"), rank=3, after=1):
            losses = [step(*batch(number, rank // 2)).item() for number in range(3)]
    found = {"losses": losses, "generation": step.worker.survival.generation if step.worker.survival else 0}
    step.close()
    return found


def between_two_calls(rank: int) -> list[float]:
    """Process 3 is killed in its second step; the others have compared their batches by then, but for process 0."""
    mesh, pipe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), pipeline(2)
    step, compare, calls = pipe.bind(mesh, survive=True, timeout_s=30.0), Crew.are_alike, iter(range(100))

    def lost_once(crew: Crew, number: int) -> bool:
        found = compare(crew, number)
        if rank == 0 and next(calls) == 1:
            raise PipelineFault("lost", waited=True)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Crew, "are_alike", lost_once)
        with faults.injected(faults.Kill(), faults.action("F1.1"), rank=3, after=1):
            losses = [step(*batch(number, rank // 2)).item() for number in range(3)]
    step.close()
    return losses


def after_a_death(rank: int) -> dict[str, Any]:
    """Process 3 is killed in its second step. What all refuse afterwards ends nothing, and no sum outlives its step."""
    mesh, pipe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), pipeline(2)
    step = pipe.bind(mesh, survive=True, timeout_s=30.0)
    found: dict[str, Any] = {"losses": [], "refused": []}
    with faults.injected(faults.Kill(), faults.action("F1.1"), rank=3, after=1):
        for number in range(4):
            found["losses"].append(step(*batch(number, rank // 2)).item())
            found["refused"].append(refusal(lambda: step(torch.randn(1, WIDTH), torch.randn(1, WIDTH)))["type"])
    assert step.worker.survival is not None
    found["held"] = len(step.worker.survival.crew.joined)
    step.close()
    return found


def after_a_load(rank: int, folder: str, killed: int) -> dict[str, Any]:
    """A process is killed in the first step after a checkpoint was loaded, which has the buffers of each replica."""
    mesh, pipe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), pipeline(2)
    step = pipe.bind(mesh, survive=True, timeout_s=30.0)
    losses = [step(*batch(number, rank // 2)).item() for number in range(2)]
    step.save(folder)
    losses.append(step(*batch(2, rank // 2)).item())
    step.load(folder)
    with faults.injected(faults.Kill(), faults.action("F1.1"), rank=killed):
        losses += [step(*batch(number, rank // 2)).item() for number in range(2, 5)]
    found = {"losses": losses, "parameters": {}, "buffers": {name: b.clone() for name, b in step.named_buffers()}}
    step.close()
    return found


def raises(rank: int) -> dict[str, Any]:
    """An error is none of a process's end: it ends the pipeline on all, as without survival."""
    mesh, pipe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), pipeline(2)
    step = pipe.bind(mesh, survive=True, timeout_s=60.0)
    with faults.injected(faults.Raise(), faults.action("B1.0"), rank=3, after=1):
        step(*batch(0, rank // 2))
        return refusal(lambda: step(*batch(1, rank // 2)))


class Tied(nn.Module):
    """A head that is tied to the embedding, over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.second(self.first(self.embedding(ids)).tanh()) @ self.embedding.weight.T


def by_tokens(rank: int, killed: int | None) -> dict[str, Any]:
    """Microbatches weigh by their tokens in the batches of all replicas; a parameter has stages on both ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, generator = Tied(), torch.Generator().manual_seed(rank // 2)
    inputs, targets = torch.randint(11, (2, 6, 5), generator=generator)
    targets[: 2 + rank // 2, 2:] = -100
    pipe = compiled(Problem(model, token_loss, (inputs,), (targets,)), 2, 3, check=False)
    step = pipe.bind(mesh, survive=True, timeout_s=60.0)
    optimizer, losses = torch.optim.AdamW(step.parameters(), lr=1e-2), []
    with faults.injected(faults.Kill(), faults.action("W1.1"), rank=-1 if killed is None else killed, after=1):
        for _ in range(4):
            losses.append(step(inputs, targets).item())
            optimizer.step()
            optimizer.zero_grad()
    step.close()
    return {"losses": losses, "parameters": {name: p.detach() for name, p in step.named_parameters()}, "buffers": {}}
