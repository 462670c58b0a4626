"""A rank's program run once for what lies around its phases: messages are made up, and phases only hand out results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbfx import comm
from zbfx.calls import BoundTensor, PhaseCall
from zbfx.graphs import Stage
from zbfx.made_up import made_up, made_up_storage
from zbfx.messages import Message
from zbfx.run import RankRunner


def rehearse(runner: RankRunner, stages: Sequence[Stage], device: torch.device) -> None:
    """Run the program but for its look at an optimizer step: losses are combined, messages laid out, values watched and
    gradients of several stages added up as in a step. The latter are all that it changes."""
    transport = Rehearsal(runner.program.messages, device)
    first, end = runner.program.verdict
    _, *microbatches = runner.program.module.graph.find_nodes(op="placeholder")
    with stand_ins(runner, stages, device), swapped(runner, transport=transport, recorder=None):
        environment = runner.given([comm.Microbatch({}, 0) for _ in microbatches])
        for positions in (range(first), range(end, len(runner.nodes))):
            for wait in runner.execute(positions, environment, step=0):
                raise AssertionError(f"nothing to wait for; found {wait}")


@contextmanager
def stand_ins(runner: RankRunner, stages: Sequence[Stage], device: torch.device) -> Iterator[None]:
    """Take the place of the phases, and of tensors that are not bound yet."""
    with ExitStack() as stack:
        for module in runner.program.module.modules():
            if isinstance(module, PhaseCall):
                run = results_of(module, stages[module.phase.stage], device)
                stack.enter_context(swapped(module, run=run, ports=[], accumulators=[]))
            elif isinstance(module, BoundTensor) and module.tensor is None:
                named = runner.tensors.named.get(getattr(module, "name", ""))
                tensor = torch.zeros(0, device=device) if named is None else torch.zeros_like(named)
                stack.enter_context(swapped(module, tensor=tensor))
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


def results_of(call: PhaseCall, stage: Stage, device: torch.device) -> Callable[[list[Any]], Sequence[Any]]:
    """What a phase returns, made up: what others than its stage read, in the storages in which it would be, and the
    loss."""
    (returned,) = call.phase.module.graph.output_node().args
    fakes: list[Tensor] = [node.meta["val"] for node in returned]  # type: ignore[union-attr]
    storages: dict[str, list[int]] = defaultdict(list)
    for index in call.packing:
        if isinstance(index, int) and index < len(call.phase.results):
            storages[stage.storages[call.phase.results[index]][0]].append(index)

    def run(box: list[Any]) -> Sequence[Any]:
        results: list[Any] = [None] * len(call.phase.results)
        for members in storages.values():
            size = stage.storages[call.phase.results[members[0]]][1]
            for index, value in zip(members, made_up_storage([fakes[k] for k in members], size, device), strict=True):
                results[index] = value
        return [*results, *(made_up(loss, device) for loss in fakes[len(results) :])]

    return run


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
