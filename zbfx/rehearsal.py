"""A rank's program run once for what lies around its phases: messages made up, phases that only hand out made-up
results, nothing written that a step reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbfx import comm
from zbfx.calls import AddToGradient, BoundTensor, PhaseCall
from zbfx.graphs import Phase
from zbfx.made_up import made_up
from zbfx.messages import Message
from zbfx.run import RankRunner


def rehearse(runner: RankRunner, device: torch.device) -> None:
    """Run the program but for its look at an optimizer step: losses are combined, messages laid out, values watched and
    gradients of several stages added up as in a step."""
    transport = Rehearsal(runner.program.messages, device)
    first, end = runner.program.verdict
    with stand_ins(runner, device), swapped(runner, transport=transport, recorder=None):
        environment = runner.given([comm.Microbatch({}, 0)] * len(runner.nodes))
        for positions in (range(first), range(end, len(runner.nodes))):
            for wait in runner.execute(positions, environment, step=0):
                raise AssertionError(f"nothing to wait for; found {wait}")


@contextmanager
def stand_ins(runner: RankRunner, device: torch.device) -> Iterator[None]:
    """Take the place of the phases, and of the tensors that the program reads or writes."""
    with ExitStack() as stack:
        for module in runner.program.module.modules():
            if isinstance(module, PhaseCall):
                stack.enter_context(swapped(module, run=results_of(module.phase, device), ports=[], accumulators=[]))
            elif isinstance(module, BoundTensor | AddToGradient):
                named = runner.tensors.named.get(getattr(module, "name", ""))
                tensor = torch.zeros(0, device=device) if named is None else torch.zeros_like(named)
                stack.enter_context(swapped(module, tensor=tensor))
        if runner.program.chain.after is None:
            stack.enter_context(swapped(runner.bound("loss"), run=runner.combine))
        if runner.watched is not None:
            stack.enter_context(swapped(runner, watched=[]))
        yield


@contextmanager
def swapped(target: Any, **values: Any) -> Iterator[None]:
    """Give attributes other values for a while."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def results_of(phase: Phase, device: torch.device) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A phase that only makes up its results."""
    (returned,) = phase.module.graph.output_node().args
    fakes = [node.meta["val"] for node in returned]  # type: ignore[union-attr]
    return lambda box: tuple(made_up(fake, device) for fake in fakes)


@dataclass
class Rehearsal:
    """A transport without other ranks: what is received is made up, what is sent is laid out and dropped."""

    messages: Mapping[str, Message]
    device: torch.device
    name: str = "rehearsal"
    sent: Collection[str] = ()

    def post(self, key: str) -> None: ...

    def posted_once(self, key: str) -> None: ...

    def ready(self, key: str) -> bool:
        return True

    def receive(self, key: str) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self.device).zero_()
            for layout in self.messages[key].layouts
        )

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        for value, layout in zip(values, self.messages[key].layouts, strict=True):
            comm.laid_out(value, layout)

    def release(self, key: str) -> None: ...

    def reduce(self, key: str, gradients: Tensor) -> None: ...

    def reduced(self, key: str) -> None: ...

    def gather(self, key: str, parameters: Tensor) -> None: ...

    def gathered(self, key: str) -> None: ...

    def finish(self) -> None: ...

    def drop(self) -> None: ...

    def join(self) -> set[str]:
        return set()
