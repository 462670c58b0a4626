"""Loads the code of a rank's program before its first message: the program runs once without other ranks, in the memory
and on arguments as a step needs them. What other ranks would send is made up.
CUDA loads a kernel at its first call, and may wait meanwhile for all that the device has to do. Where that waits for a
message of a rank that waits for what this one would launch next, both wait for ever: the mean of the losses, a kernel
of a few microseconds, is enough. (CUDA programming guide, lazy loading, potential hazards.) What else may wait is done
here too: compiling, which takes seconds; asking the device for memory, and giving some back where it is short;
connections between replicas, which NCCL makes as they are used first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zbfx._torch.operators import schema_of
from zbfx._torch.switches import TorchDispatchMode
from zbfx.costs.made_up import REFUSALS, has_checks, made_up, made_up_values, positive_values
from zbfx.graphs import Phase, Role, Stage
from zbfx.program import ops
from zbfx.program.boxed import Boxed
from zbfx.program.calls import PhaseCall
from zbfx.program.messages import Message
from zbfx.rng import preserved_generators
from zbfx.runtime.runner import RankRunner


def load(
    runner: RankRunner,
    stage_of: Callable[[Phase], Stage],
    microbatches: Sequence[ops.Microbatch],
    step: int,
    device: torch.device,
) -> None:
    """Rehearse the step on these microbatches, and put back as it was what that writes. Takes no more of the device's
    memory than a step does. Collective over the replicas of the rank."""
    assert runner.pending is None, "gradients are bound before, and not once an optimizer step is settled"
    with preserved_generators(device), torch.no_grad(), put_back(written(runner)):
        rehearse(runner, stage_of, microbatches, step, device)


def written(runner: RankRunner) -> list[Tensor]:
    """What a step of the rank writes: gradients and buffers."""
    found = [tensor for call in runner.calls for tensor in (*call.accumulators, *updated(call))]
    found += [addition.tensor for addition in runner.additions if addition.tensor is not None]
    return list({id(tensor): tensor for tensor in found}.values())


def updated(call: PhaseCall) -> list[Tensor]:
    pairs = zip(call.phase.ports, call.ports, strict=True)
    found = [tensor for port, tensor in pairs if port.role is Role.BUFFER and port.name in call.phase.updates]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


@contextmanager
def put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors the values that they have now when it is over, from the host's memory."""
    before = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, old in before:
            tensor.copy_(old)


def rehearse(
    runner: RankRunner,
    stage_of: Callable[[Phase], Stage],
    microbatches: Sequence[ops.Microbatch],
    step: int,
    device: torch.device,
) -> None:
    """Run the program on these microbatches, but for its look at an optimizer step. It writes gradients and buffers."""
    positive = {name for call in runner.calls for name in positive_values(call.phase)}
    transport = Rehearsal(runner.transport, runner.program.messages, positive, device)
    watched: list[Any] | None = None if runner.watched is None else []
    first, end = runner.program.verdict
    with ExitStack() as stack:
        stack.enter_context(swapped(runner, transport=transport, recorder=None, watched=watched))
        for call in runner.calls:
            run = attempted(call, stage_of(call.phase), positive, device)
            stack.enter_context(swapped(call, run=run, is_checked=False))  # what is made up proves nothing
        environment = runner.given(microbatches)
        for positions in (range(first), range(end, len(runner.nodes))):
            for wait in runner.execute(positions, environment, step):
                raise AssertionError(f"nothing to wait for; found {wait}")


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


def attempted(call: PhaseCall, stage: Stage, positive: Collection[str], device: torch.device) -> Boxed:
    """What the call runs, without checks of values; where made-up values make it raise, its results are made up. What
    it has not come to is loaded by a step then."""
    run, instead = call.run, results_of(call, stage, positive, device)
    checks = has_checks(call.phase)

    def attempt(box: list[Any]) -> Any:
        try:
            with Unchecked() if checks else nullcontext():
                return run(box)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except REFUSALS:
            return instead()

    return attempt


class Unchecked(TorchDispatchMode):
    """Meanwhile operators that only check values, as torch.linalg does, let all pass. So one function, compiled with
    its checks, serves here and in steps."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = schema_of(func)
        if schema is not None and not schema.returns and not schema.is_mutable:
            return None
        return func(*args, **(kwargs or {}))


def results_of(
    call: PhaseCall, stage: Stage, positive: Collection[str], device: torch.device
) -> Callable[[], list[Any]]:
    """Makes up what a phase returns: its results and the loss."""

    def make() -> list[Any]:
        names = call.phase.results
        made = made_up_values(stage, names, positive, device)
        (returned,) = call.phase.module.graph.output_node().args
        losses = [made_up(node.meta["val"], device) for node in returned[len(names) :]]  # type: ignore[index,union-attr]
        return [*(made[name] for name in names), *losses]

    return make


@dataclass
class Rehearsal:
    """A transport without other ranks: what is received is made up, and holds memory as soon as it is posted; what is
    sent holds it until it is released. Sums over replicas are made, of gradients that nobody reads."""

    real: ops.Transport
    messages: Mapping[str, Message]
    positive: Collection[str]
    device: torch.device
    posted: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    sent: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.real.name}, rehearsing"

    def post(self, key: str) -> None:
        message = self.messages[key]
        self.posted[key] = tuple(
            layout.empty(self.device).fill_(0.02 if layout.dtype.is_floating_point else int(name in self.positive))
            for name, layout in zip(message.names, message.layouts, strict=True)
        )

    def posted_once(self, key: str) -> None:
        raise AssertionError("nothing to correct")

    def ready(self, key: str) -> bool:
        return True

    def receive(self, key: str) -> tuple[Tensor, ...]:
        return self.posted.pop(key)

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        layouts = self.messages[key].layouts
        self.sent[key] = tuple(ops.laid_out(value, layout) for value, layout in zip(values, layouts, strict=True))

    def release(self, key: str) -> None:
        del self.sent[key]

    def reduce(self, key: str, gradients: Tensor) -> None:
        self.real.reduce(key, gradients)

    def reduced(self, key: str) -> None:
        self.real.reduced(key)

    def gather(self, key: str, parameters: Tensor) -> None:
        self.real.gather(key, parameters)

    def gathered(self, key: str) -> None:
        self.real.gathered(key)

    def finish(self) -> None:
        self.sent.clear()

    def drop(self) -> None:
        self.posted.clear()
        self.sent.clear()

    def join(self) -> set[str]:
        raise AssertionError("what is captured has been rehearsed")
