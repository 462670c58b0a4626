"""A call that runs the forward alone, from its arguments to what the user gets. In: a step, what is wanted of a model,
and how outputs come. Out: the results of the batch, and the outputs as they were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from zbfx.errors import ZbfxError, listed
from zbfx.runtime.delivery import Delivery
from zbfx.runtime.engine import Batch, BatchResults, Engine, T
from zbfx.runtime.engines import Engines
from zbfx.runtime.optimizer import Optimizer
from zbfx.trace.wanted import Wanted

OWN_ARGUMENTS = {  # by call, beside the model's
    "evaluate": ("outputs", "everywhere", "join"),
    "forward": ("outputs", "train", "everywhere", "join"),
}


class Forwarding(Protocol):
    """A step, as these functions need it."""

    optimizer: Optimizer | None
    engines: Engines

    def refuse_ended(self) -> None: ...
    def begin(self, call: str, *, batch: bool = False) -> None: ...
    def admit(self, take: Callable[[], Batch], *, evaluation: bool = False) -> Batch: ...
    def run(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> BatchResults: ...
    def guarded(self, work: Callable[[], T]) -> T: ...


def forwarded(
    step: Forwarding, call: str, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Wanted, delivery: Delivery
) -> tuple[BatchResults, Any]:
    """What a forward makes of a batch, and the outputs, None if there are none wanted."""
    step.refuse_ended()
    refuse_two_meanings(call, step.engines.first.pipe.signature.keywords)
    if step.optimizer is not None:
        step.optimizer.settle()
    asked = "" if wanted.selection is None else f" of {wanted.selection.told}"
    mode = "" if wanted.in_eval else " in train mode"
    step.begin(f"{call}{asked}{mode}{' everywhere' if delivery.everywhere else ''}", batch=True)
    take = partial(step.engines.forward_batch, args, kwargs, wanted, delivery)
    engine, rows = step.admit(take, evaluation=wanted.in_eval)
    results = step.run(engine, rows)
    if wanted.selection is None:
        return results, None
    return results, step.guarded(lambda: delivery.of(engine, results))


def refuse_two_meanings(call: str, keywords: Sequence[str]) -> None:
    """Raises `ZbfxError` if the model takes keyword arguments that are also the call's."""
    if taken := [name for name in OWN_ARGUMENTS[call] if name in keywords]:
        raise ZbfxError(
            f"{listed(taken)} is an argument of step.{call}, and a keyword argument of the model in the example: which "
            f"one is meant cannot be told. Pass the model's by position, in example_inputs and here"
        )
