"""Three ranks over gloo, one of which makes other calls, for test_history.py: `python -m tests.support.other_calls 3
<scenario> <folder>`. Each case binds the pipeline anew; what is measured are seconds until a rank hears of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zbfx
from tests.processes.worker import main, refusal
from tests.support.models import Problem, mlp, numbers
from tests.support.reference import compiled
from zbfx.comm import history
from zbfx.optim import PostValidated
from zbfx.runtime.step import Step

COMPARE_S = 1.0

Batch = tuple[Tensor, ...]


def ready(problem: Problem, pipe: zbfx.Pipeline, **options: Any) -> tuple[Step, Batch]:
    """A step after one call of each kind, whose first batches are compared, and its batch."""
    step, batch = pipe.bind(**options), (*problem.inputs, *problem.targets)
    step(*batch)
    step.evaluate(*batch)
    return step, batch


def other_calls(rank: int) -> dict[str, Any]:
    history.COMPARE_S, history.LOOK_S = COMPARE_S, 0.1
    problem = mlp(3)
    pipe = compiled(problem, 3, 3)
    small = (numbers(3, 8), numbers(3, 8))
    results: dict[str, Any] = {}

    step, batch = pipe.bind(), (*problem.inputs, *problem.targets)
    results["first"] = refusal(lambda: (step.evaluate if rank == 1 else step)(*batch))

    step, batch = ready(problem, pipe)
    results["step, evaluate"] = refusal(lambda: (step.evaluate if rank == 1 else step)(*batch))
    results["after"] = refusal(lambda: step(*batch))

    step, batch = ready(problem, pipe)
    results["evaluate, step"] = refusal(lambda: (step if rank == 1 else step.evaluate)(*batch))

    step, batch = ready(problem, pipe, on_new_shape="recompile")
    results["new shapes"] = refusal(lambda: step(*(small if rank == 2 else batch)))

    step, batch = ready(problem, pipe, on_new_shape="recompile")
    step(*small)
    results["known shapes"] = refusal(lambda: step(*(batch if rank == 2 else small)))

    step, batch = ready(problem, pipe)
    results["one step fewer"] = refusal(step.close if rank == 0 else lambda: step(*batch))

    step, batch = ready(problem, pipe)

    def closed_late() -> None:
        time.sleep(2 * COMPARE_S)  # the others have told of their call
        step.close()

    results["one step fewer, late"] = refusal(closed_late if rank == 0 else lambda: step(*batch))

    step, batch = ready(problem, pipe)
    results["profile"] = refusal(lambda: (step.profile if rank == 0 else step)(*batch))

    step, batch = ready(problem, pipe)
    optimizer = PostValidated(torch.optim.SGD(step.parameters()), step)
    step(*batch)

    def trained() -> None:
        if rank != 1:
            optimizer.step()  # the first rank of the chain needs nothing from others for it
        step(*batch)

    results["optimizer"] = refusal(trained)
    return results


def other_arguments(rank: int) -> dict[str, Any]:
    """Ranks that call the same with other numbers, of which each would make a wrong step without a word."""
    history.COMPARE_S, history.LOOK_S = COMPARE_S, 0.1
    problem = mlp(3)
    pipe = compiled(problem, 3, 3)
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


def slow_ranks(rank: int) -> dict[str, Any]:
    """Ranks that make the same calls: one is slow to make them, one inside them, and all refuse a batch in between."""
    history.COMPARE_S, history.LOOK_S = 0.2, 0.05
    problem = mlp(3)
    pipe = compiled(problem, 3, 3)
    step, batch = ready(problem, pipe)
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
    ranks: Any = step.ranks
    told = ranks.channels.history.told
    step.close()
    return {"losses": losses, "refused": refused, "told": told}


def halves(batch: Batch) -> list[tuple[Batch, dict[str, Any]]]:
    return [(pair, {}) for pair in zip(*(tensor.chunk(3) for tensor in batch), strict=True)]


SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    "other-calls": other_calls,
    "other-arguments": other_arguments,
    "slow-ranks": slow_ranks,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]), SCENARIOS[sys.argv[2]], Path(sys.argv[3])))
