"""What the user calls: `step(*inputs, *targets, **kwargs) -> loss`, over processes or in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbfx import comm, rng
from zbfx.batch import Signature, TensorSpec
from zbfx.comm import Channels
from zbfx.errors import InputError, PipelineFault
from zbfx.loss import Reduction
from zbfx.plan import Schedule
from zbfx.run import RankRunner, Run
from zbfx.timeline import Profile, Recorder
from zbfx.verdict import checked_choice, problems, settle, snapshot


class Step:
    """One training step of a pipeline: forward, backward and gradients of a full batch.

    `step(*args, **kwargs)` takes the arguments of the example microbatch with the batch dimension `microbatches`
    times as long, the same on every rank, and returns the loss of the batch on every rank. Its gradients are added to
    `.grad` of `parameters()`. `seed` fixes the random numbers of all following steps. Where losses and gradients are
    checked (`on_nonfinite`), `verdict` says why the last step's gradients were dropped; None: they were not.
    """

    def __init__(
        self, signature: Signature, reduction: Reduction, device: torch.device, seed: int, on_nonfinite: str
    ) -> None:
        self.signature, self.reduction, self.device, self.seed = signature, reduction, device, seed
        self.microbatches = reduction.microbatches
        self.loss_gradient = torch.zeros((), dtype=reduction.dtype, device=device)
        self.on_nonfinite = checked_choice(on_nonfinite)
        self.verdict: str | None = None
        self.losses: tuple[Tensor, ...] = ()  # of the last step's microbatches, on the rank that computes them
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run_as_traced(self.signature.split(args, kwargs, self.microbatches))

    def run_split(self, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Tensor:
        """One step from microbatches that are cut already: (positional, keyword) arguments of each."""
        if len(batches) != self.microbatches:
            raise InputError(f"expected {self.microbatches} microbatches, found {len(batches)}")
        return self.run_as_traced([self.signature.split(args, kwargs, 1)[0] for args, kwargs in batches])

    def run_as_traced(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """The graphs hold their gradients and casts: neither autograd nor an autocast around the step adds any."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            names = [spec.name for spec in self.signature.tensors]
            self.loss_gradient.copy_(self.reduction.gradient([dict(zip(names, row, strict=True)) for row in rows]))
            if self.on_nonfinite == "keep":
                return self.run(rows)
            parameters = dict(self.named_parameters())
            before = snapshot(parameters)
            loss = self.run(rows)
            self.verdict = settle(self.problems(), before, parameters, self.on_nonfinite)
            return loss

    def run(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        raise AssertionError("a subclass runs the step")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        raise AssertionError("a subclass knows its parameters")

    def problems(self) -> list[str]:
        """What is not finite on any rank after a step."""
        raise AssertionError("a subclass looks at its gradients")

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def inputs(self, rows: Sequence[Sequence[Tensor]], names: set[str]) -> list[comm.Microbatch]:
        """The microbatches with the tensors that a rank reads, on its device."""
        specs = self.signature.tensors
        return [
            comm.Microbatch(
                {s.name: self.placed(t, s) for s, t in zip(specs, row, strict=True) if s.name in names},
                rng.mix(self.seed, self.count, index),
            )
            for index, row in enumerate(rows)
        ]

    def placed(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        """The tensor on this rank's device, with the strides that the graph was traced with."""
        return comm.laid_out(tensor.to(self.device), spec)


class LocalStep(Step):
    """All ranks of a pipeline in this process, one after the other as their messages allow: same results, no speed."""

    def __init__(self, runners: Sequence[RankRunner], **options: Any) -> None:
        super().__init__(**options)
        self.runners = runners

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        found = {name for runner in self.runners for name in runner.parameters}
        named = self.runners[0].tensors.named
        return ((name, t) for name, t in named.items() if name in found and isinstance(t, nn.Parameter))

    def run(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        runs = []
        for runner in self.runners:
            runner.start(self.loss_gradient)
            runs.append(runner.run(self.inputs(rows, runner.input_names), self.count))
        self.losses = next(losses for losses in take_turns(runs) if losses)
        self.count += 1
        return self.reduction.combine(self.losses, self.loss_gradient)

    def problems(self) -> list[str]:
        found = problems(0, self.losses, {})
        return found + [bad for runner in self.runners for bad in problems(runner.rank, (), runner.parameters)]


def take_turns(runs: Sequence[Run]) -> list[tuple[Tensor, ...]]:
    """Run each generator until it waits, in turn, until all have ended."""
    results: dict[int, tuple[Tensor, ...]] = {}
    position: dict[int, int] = {}
    while len(results) < len(runs):
        before = (len(results), dict(position))
        for index, run in enumerate(runs):
            if index not in results:
                try:
                    position[index] = next(run)
                except StopIteration as end:
                    results[index] = end.value
        assert before != (len(results), position), f"programs deadlock at nodes {position}"
    return [results[index] for index in range(len(runs))]


class RankStep(Step):
    """This process's rank of a pipeline over torch.distributed.

    When a rank fails, every rank raises `PipelineFault` with that rank's message. The step cannot be used after that.
    """

    def __init__(self, runner: RankRunner, channels: Channels, schedule: Schedule, loss_rank: int, **options: Any):
        super().__init__(**options)
        self.runner, self.channels, self.schedule, self.loss_rank = runner, channels, schedule, loss_rank
        self.fault: str | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.runner.parameters.items())

    def problems(self) -> list[str]:
        own = problems(self.runner.rank, self.losses, self.runner.parameters)
        everywhere: list[Any] = self.channels.gather(own)
        return sorted((found for rank in everywhere for found in rank), key=lambda text: "gradient" in text)

    def run(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        if self.fault is not None:
            raise PipelineFault(
                f"this pipeline has failed before and cannot go on; bind it again. It failed with: {self.fault}"
            )
        try:
            loss = self.execute(rows)
        except BaseException as error:
            self.runner.transport.drop()
            self.fault = self.channels.fail(error)
            if not isinstance(error, Exception):  # Ctrl-C and exit stay what they are
                raise
            raise PipelineFault(self.fault) from error
        self.count += 1
        return loss

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run one step (its gradients count) and return the measured timeline of all ranks, on every rank."""
        self.runner.recorder = Recorder(self.device)
        try:
            self.channels.barrier()
            self.runner.recorder.begin()
            self(*args, **kwargs)
            spans = self.channels.gather(tuple(self.runner.recorder.spans()))
        finally:
            self.runner.recorder = None
        return Profile(self.schedule, tuple(spans))  # type: ignore[arg-type]

    def execute(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        self.runner.start(self.loss_gradient)
        return self.run_program(rows)

    def run_program(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """The rank's program, and the loss from the rank that has it."""
        run = self.runner.run(self.inputs(rows, self.runner.input_names), self.count)
        self.losses = take_turns([run])[0]
        if self.losses:
            loss = self.reduction.combine(self.losses, self.loss_gradient)
        else:
            loss = torch.zeros((), dtype=self.reduction.dtype, device=self.device)
        self.channels.broadcast(loss, self.loss_rank)
        return loss
