"""Numbers that every forward changes, like a count of calls.

A graph would hold them as they were when it was traced, and so a model whose results depend on them is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx, nn

from zbfx.errors import TraceError, listed

FORWARDS_LATER = 1009  # forwards ahead: odd, beyond a warm-up of a thousand, and few enough for a loop

HeldNumbers = Mapping[tuple[str, str], complex]  # by module and attribute


def numbers_of(module: nn.Module) -> HeldNumbers:
    """The numbers that modules hold as plain attributes, by module and attribute."""
    return {
        (name, attribute): value
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, int | float | complex) and not isinstance(value, bool)
    }


def changed_numbers(before: HeldNumbers, after: HeldNumbers) -> HeldNumbers:
    """Those of `after` that were another number in `before`."""
    return {place: value for place, value in after.items() if place in before and value != before[place]}


def refuse_counters(
    before: HeldNumbers,
    after: HeldNumbers,
    graph: fx.GraphModule,
    fresh: Callable[[], nn.Module],
    capture: Callable[..., fx.GraphModule],
) -> None:
    """Raise `TraceError` if a forward changes numbers that decide what a later forward computes. `before` and `after`
    are the numbers around the forward that `graph` was traced from. `fresh` gives the module as it was before that
    forward, `capture` traces a module. The graph of a forward far ahead shows whether the numbers decide."""
    if not (counted := changed_numbers(before, after)):
        return
    module = fresh()
    later = {place: value + (FORWARDS_LATER if isinstance(value, int) else 0.1) for place, value in counted.items()}
    for (name, attribute), value in later.items():
        setattr(module.get_submodule(name), attribute, value)
    try:
        other = capture(module)
    except Exception:
        return  # no count, but a flag that a first forward leaves to the next
    again = changed_numbers(later, numbers_of(module))
    if again and not same(graph, other):
        names = [f"{name.removeprefix('model').removeprefix('.')}.{n}".removeprefix(".") for name, n in again]
        raise TraceError(
            f"{listed(names)} changes in every forward, and what the forward computes depends on it: the graph would "
            "hold it as it was when traced. Keep it in a buffer and change that in place (self.count.add_(1)), or pass "
            "it as an input"
        )


def same(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    return str(one.graph) == str(other.graph) and all(
        torch.equal(constant, getattr(other, name))
        for name, constant in vars(one).items()
        if isinstance(constant, Tensor) and hasattr(other, name)
    )
