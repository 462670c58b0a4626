"""Numbers that every forward changes, like a count of calls: a graph holds them as they were when it was traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx, nn

from zbfx.errors import TraceError, listed

LATER = 1009  # forwards: odd, and more than a thousand; a model may loop so many times

Numbers = Mapping[tuple[str, str], complex]


def numbers_of(module: nn.Module) -> Numbers:
    """The numbers that modules hold as plain attributes, by module and attribute."""
    return {
        (name, attribute): value
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, int | float | complex) and not isinstance(value, bool)
    }


def changed(before: Numbers, after: Numbers) -> Numbers:
    return {place: value for place, value in after.items() if place in before and value != before[place]}


def refuse_counters(
    before: Numbers,
    after: Numbers,
    graph: fx.GraphModule,
    fresh: Callable[[], nn.Module],
    capture: Callable[..., fx.GraphModule],
) -> None:
    """Raise `TraceError` if numbers that the forward of `graph` has changed, change in a later one too, and make it
    another graph. `fresh` gives the module as it was before, `capture` its graph."""
    if not (counted := changed(before, after)):
        return
    module = fresh()
    later = {place: value + (LATER if isinstance(value, int) else 0.1) for place, value in counted.items()}
    for (name, attribute), value in later.items():
        setattr(module.get_submodule(name), attribute, value)
    try:
        other = capture(module)
    except Exception:
        return  # no count, but what a first forward says to the next
    again = changed(later, numbers_of(module))
    if again and not same(graph, other):
        names = [f"{name.removeprefix('model').removeprefix('.')}.{n}".removeprefix(".") for name, n in again]
        raise TraceError(
            f"{listed(names)} changes in every forward, and what the forward computes depends on it: the graph would "
            "hold it as it was when traced. Keep it in a buffer and change that in place (self.count.add_(1)), or pass "
            "it as an input"
        )


def same(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two graphs have the same nodes and constants."""
    return str(one.graph) == str(other.graph) and all(
        torch.equal(constant, getattr(other, name))
        for name, constant in vars(one).items()
        if isinstance(constant, Tensor) and hasattr(other, name)
    )
