"""A call that runs the forward alone, from its arguments to what the user gets. In: a worker, what is wanted of a
model, and how outputs come. Out: the results of the batch, and the outputs as they were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from zbfx.errors import ZbfxError, listed
from zbfx.runtime.delivery import Delivery
from zbfx.runtime.engine import BatchResults
from zbfx.runtime.worker import Worker
from zbfx.trace.wanted import Wanted

OWN_ARGUMENTS = {  # by call, beside the model's
    "evaluate": ("outputs", "everywhere", "join"),
    "forward": ("outputs", "train", "everywhere", "join"),
}


def forwarded(
    worker: Worker, call: str, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Wanted, delivery: Delivery
) -> tuple[BatchResults, Any]:
    """What a forward makes of a batch, and the outputs, None if there are none wanted."""
    worker.refuse_ended()
    refuse_two_meanings(call, worker.engines.first.pipe.signature.keywords)
    worker.settle_optimizer()
    asked = "" if wanted.selection is None else f" of {wanted.selection.told}"
    mode = "" if wanted.in_eval else " in train mode"
    worker.begin(f"{call}{asked}{mode}{' everywhere' if delivery.everywhere else ''}", batch=True)
    take = partial(worker.engines.forward_batch, args, kwargs, wanted, delivery)
    engine, rows = worker.admit(take, evaluation=wanted.in_eval)
    results = worker.run(engine, rows)
    if wanted.selection is None:
        return results, None
    return results, worker.guarded(lambda: delivery.of(engine, results))


def refuse_two_meanings(call: str, keywords: Sequence[str]) -> None:
    """Raises `ZbfxError` if the model takes keyword arguments that are also the call's."""
    if taken := [name for name in OWN_ARGUMENTS[call] if name in keywords]:
        raise ZbfxError(
            f"{listed(taken)} is an argument of step.{call}, and a keyword argument of the model in the example: which "
            f"one is meant cannot be told. Pass the model's by position, in example_inputs and here"
        )
