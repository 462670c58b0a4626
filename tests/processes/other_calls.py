"""Scenarios of three ranks, one of which makes other calls, for test_history.py: functions of the rank, see
tests/support/pool.py. What is measured are seconds until a rank hears of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import zbfx
from tests.processes.worker import refusal
from tests.support.models import Problem, mlp, numbers
from tests.support.reference import compiled
from zbfx.comm import history
from zbfx.optim import PostValidated
from zbfx.runtime.step import Step

COMPARE_S = 1.0

Batch = tuple[Tensor, ...]
SMALL: Batch = (numbers(3, 8), numbers(3, 8))


@contextmanager
def comparisons(every_s: float, poll_s: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "COMPARE_S", every_s)
        patch.setattr(history, "LOOK_S", poll_s)
        yield


quick = comparisons(every_s=COMPARE_S, poll_s=0.1)


def small() -> tuple[Problem, zbfx.Pipeline]:
    problem = mlp(3)
    return problem, compiled(problem, 3, 3, check=False)


def ready(problem: Problem, pipe: zbfx.Pipeline, **options: Any) -> tuple[Step, Batch]:
    """A step after one call of each kind, whose first batches are compared, and its batch."""
    step, batch = pipe.bind(**options), (*problem.inputs, *problem.targets)
    step(*batch)
    step.evaluate(*batch)
    return step, batch


def first_call(rank: int) -> dict[str, Any]:
    """What is compared at once comes before anything that the watch says."""
    problem, pipe = small()
    step, batch = pipe.bind(), (*problem.inputs, *problem.targets)
    return refusal(lambda: (step.evaluate if rank == 1 else step)(*batch))


@quick
def one_evaluates(rank: int) -> dict[str, Any]:
    step, batch = ready(*small())
    found = refusal(lambda: (step.evaluate if rank == 1 else step)(*batch))
    return {**found, "after": refusal(lambda: step(*batch))}


@quick
def one_steps(rank: int) -> dict[str, Any]:
    step, batch = ready(*small())
    return refusal(lambda: (step if rank == 1 else step.evaluate)(*batch))


@quick
def new_shapes(rank: int) -> dict[str, Any]:
    step, batch = ready(*small(), on_new_shape="recompile")
    return refusal(lambda: step(*(SMALL if rank == 2 else batch)))


@quick
def known_shapes(rank: int) -> dict[str, Any]:
    step, batch = ready(*small(), on_new_shape="recompile")
    step(*SMALL)
    return refusal(lambda: step(*(batch if rank == 2 else SMALL)))


@quick
def one_step_fewer(rank: int) -> dict[str, Any]:
    step, batch = ready(*small())
    return refusal(step.close if rank == 0 else lambda: step(*batch))


@quick
def one_step_fewer_late(rank: int) -> dict[str, Any]:
    step, batch = ready(*small())

    def closed_late() -> None:
        time.sleep(2 * COMPARE_S)  # the others have told of their call
        step.close()

    return refusal(closed_late if rank == 0 else lambda: step(*batch))


@quick
def one_profiles(rank: int) -> dict[str, Any]:
    step, batch = ready(*small())
    return refusal(lambda: (step.profile if rank == 0 else step)(*batch))


@quick
def one_trains(rank: int) -> dict[str, Any]:
    step, batch = ready(*small())
    optimizer = PostValidated(torch.optim.SGD(step.parameters()), step)
    step(*batch)

    def trained() -> None:
        if rank != 1:
            optimizer.step()  # the first rank of the chain needs nothing from others for it
        step(*batch)

    return refusal(trained)


@quick
def other_arguments(rank: int) -> dict[str, Any]:
    """Ranks that call the same with other numbers, of which each would make a wrong step without a word."""
    problem, pipe = small()
    results: dict[str, Any] = {"seed": refusal(lambda: pipe.bind(seed=3 + rank % 2))}

    step, batch = pipe.bind(seed=3), (*problem.inputs, *problem.targets)
    step.count = 7 if rank == 1 else 0
    results["count"] = refusal(lambda: step(*batch))

    step, batch = ready(problem, pipe)
    step.count = 7 if rank == 2 else 1
    results["count, later"] = refusal(lambda: step(*batch))

    step, batch = ready(problem, pipe)
    inner = torch.optim.SGD(step.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (rank % 2))
    results["max_norm"] = refusal(lambda: PostValidated(inner, step, max_norm=1.0 + rank // 2))
    results["max_norm of one"] = refusal(lambda: PostValidated(inner, step, max_norm=1.0 if rank else None))
    results["grad_scaler"] = refusal(lambda: PostValidated(inner, step, grad_scaler=scaler))
    results["wrong on one"] = refusal(lambda: PostValidated(step if rank == 1 else inner, step))  # type: ignore[arg-type]
    optimizer = PostValidated(inner, step, max_norm=1.0)
    results["loss"] = float(step(*batch))

    def divided() -> None:
        optimizer.step(divide_by=2.0 if rank == 0 else 1.0)
        optimizer.settle()

    results["divide_by"] = refusal(divided)
    return results


@comparisons(every_s=0.2, poll_s=0.05)
def slow_ranks(rank: int) -> dict[str, Any]:
    """Ranks that make the same calls: one is slow to make them, one inside them, and all refuse a batch in between."""
    step, batch = ready(*small())
    call = next(call for call in step.engine.runners[0].calls if call.phase.name == f"B{rank}")
    take = call.take

    def slowly(box: list[Any]) -> Any:
        time.sleep(0.3)
        return take(box)

    losses = [float(step(*batch))]
    if rank == 1:
        call.take = slowly  # type: ignore[method-assign]
    losses.append(float(step(*batch)))
    refused = refusal(lambda: step(numbers(7 + rank, 8), numbers(7 + rank, 8)))
    if rank == 0:
        time.sleep(1.0)
    losses += [float(step.evaluate(*batch)), float(step.run_split(halves(batch))), float(step(*batch))]
    time.sleep(0.5)
    ranks: Any = step.worker.ranks
    told = ranks.channels.history.told
    step.close()
    return {"losses": losses, "refused": refused, "told": told}


def halves(batch: Batch) -> list[tuple[Batch, dict[str, Any]]]:
    return [(pair, {}) for pair in zip(*(tensor.chunk(3) for tensor in batch), strict=True)]
