"""What a pipeline must equal: plain eager autograd that accumulates gradients over microbatches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbfx.pipeline
from tests.support.models import Maker, Problem
from zbfx.costs import estimate
from zbfx.graphs import Joint, Placed, Stage
from zbfx.passes.canonicalize import canonicalize
from zbfx.passes.extract import extract
from zbfx.passes.partition import partition
from zbfx.passes.split import split
from zbfx.program.messages import Message
from zbfx.schedule import plan
from zbfx.schedule.beside import run_beside
from zbfx.trace.tracer import trace

Gradients = Mapping[str, Tensor | None]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def cut(tree: Any, microbatches: int) -> list[Any]:
    """Every tensor of a nested structure cut along dimension 0."""
    leaves, structure = pytree.tree_flatten(tree)
    columns = [
        list(leaf.chunk(microbatches)) if isinstance(leaf, Tensor) and leaf.ndim else [leaf] * microbatches
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[k] for column in columns], structure) for k in range(microbatches)]


def loss_of(problem: Problem, model: nn.Module, inputs: Any, targets: Any, kwargs: Any) -> Tensor:
    output = model(*inputs, **kwargs)
    if problem.loss_fn is not None:
        return problem.loss_fn(output, *targets)
    return output if isinstance(output, Tensor) else output.loss


def reference(problem: Problem, microbatches: int, model: nn.Module | None = None) -> tuple[Tensor, Gradients]:
    """Mean loss and gradients of plain autograd, on a copy of the model unless one is given."""
    model = copy.deepcopy(problem.model) if model is None else model
    losses = []
    for inputs, targets, kwargs in cut((problem.inputs, problem.targets, problem.kwargs), microbatches):
        loss = loss_of(problem, model, inputs, targets, kwargs)
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean(), gradients(model)


def gradients(model: nn.Module) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compiled(problem: Problem, stages: int, microbatches: int, **options: Any) -> zbfx.Pipeline:
    inputs, targets, kwargs = cut((problem.inputs, problem.targets, problem.kwargs), microbatches)[0]
    return zbfx.compile(
        problem.model,
        stages=stages,
        microbatches=microbatches,
        example_inputs=inputs,
        example_targets=targets,
        example_kwargs=kwargs,
        loss_fn=problem.loss_fn,
        **{"schedule": "zb-h1", **options},
    )


@contextmanager
def one_trace(found: MutableMapping[nn.Module, Any] | None = None) -> Iterator[None]:
    """Inside, `zbfx.compile` traces a model once, whatever else it is asked for: its example stays as it is. `found`
    keeps traces from one such context to the next."""
    found = {} if found is None else found
    traced = vars(zbfx.pipeline)["trace"]  # perhaps known from a model like it: known_traces.py

    def remembered(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if model not in found:
            found[model] = traced(model, *args, **kwargs)
        return found[model]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbfx.pipeline.trace", remembered)
        yield


TRACES: MutableMapping[nn.Module, Any] = WeakKeyDictionary()  # of models that tests share


@functools.cache
def shared_problem(make: Maker, microbatches: int, dtype: torch.dtype) -> Problem:
    with default_dtype(dtype):
        return make(microbatches)


@functools.cache
def _shared(make: Maker, stages: int, microbatches: int, dtype: torch.dtype, options: Any) -> zbfx.Pipeline:
    with default_dtype(dtype), one_trace(TRACES):
        return compiled(shared_problem(make, microbatches, dtype), stages, microbatches, **dict(options))


def shared(make: Maker, stages: int, microbatches: int, **options: Any) -> zbfx.Pipeline:
    """A pipeline that is compiled once for all tests that ask for it, in the default dtype. Those of one model are made
    from one trace. Tests may run it, and leave its model the values that they find."""
    return _shared(make, stages, microbatches, torch.get_default_dtype(), tuple(sorted(options.items())))


def rescheduled(pipe: zbfx.Pipeline, microbatches: int, schedule: Any) -> zbfx.Pipeline:
    """The same stages in another order, without tracing again."""
    planned = plan(pipe.schedule.costs, microbatches, schedule=schedule)
    reduction = replace(pipe.compiled.reduction, microbatches=microbatches)
    return with_other(pipe, schedule=planned, reduction=reduction)


def with_other(pipe: zbfx.Pipeline, **parts: Any) -> zbfx.Pipeline:
    """The pipeline with other parts of what it was compiled to, and programs that follow from them."""
    return replace(pipe, compiled=replace(pipe.compiled, **parts))


def activations(pipe: zbfx.Pipeline) -> list[Message]:
    """What travels between actions: activations and their gradients, neither sums of shared ones nor the loss."""
    messages = {m.key: m for program in pipe.programs for m in program.messages.values()}
    return [message for message in messages.values() if message.producer is not None]


def beside(pipe: zbfx.Pipeline) -> zbfx.Pipeline:
    """The pipeline with as many Ws beside Bs as would pay if they cost nothing there."""
    free = [replace(stage, beside_s=stage.backward_input_s) for stage in pipe.schedule.costs.stages]
    costs = replace(pipe.schedule.costs, stages=tuple(free))
    schedule = run_beside(replace(pipe.schedule, costs=costs), frozenset(s.index for s in pipe.stages if s.runs_beside))
    return with_other(pipe, schedule=schedule)


def stepped(problem: Problem, pipe: zbfx.Pipeline, **options: Any) -> tuple[Tensor, Gradients]:
    """Loss and gradients of one local step; the model's own `.grad` is cleared before."""
    problem.model.zero_grad()
    loss = pipe.run_local(**options)(*problem.inputs, *problem.targets, **problem.kwargs)
    return loss, gradients(problem.model)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest entry of what is expected."""
    assert found.shape == expected.shape
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() / scale if scale else found.abs().max().item()


def assert_same(found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients], tolerance: float) -> None:
    """Loss and every gradient within `tolerance`, relative to the largest entry; 0 asks for equal bits."""
    assert found[1].keys() == expected[1].keys()
    errors = {"loss": relative_error(found[0], expected[0])}
    for name, wanted in expected[1].items():
        gradient = found[1][name]
        assert (gradient is None) == (wanted is None), f"{name}: found {gradient}, expected {wanted}"
        if gradient is not None and wanted is not None:
            errors[name] = relative_error(gradient, wanted)
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


def traced(problem: Problem, device: str = "cpu") -> Joint:
    """The canonical joint graph of the problem's batch, taken as one microbatch."""
    joint, _ = trace(
        problem.model,
        problem.loss_fn,
        problem.inputs,
        dict(problem.kwargs),
        problem.targets,
        device=torch.device(device),
    )
    return canonicalize(joint)


def cut_into(joint: Joint, stages: int, cuts: Sequence[str] | None = None) -> Placed:
    seconds = functools.partial(estimate.node_s, hardware=estimate.CPU)
    return partition(joint, range(stages), seconds=seconds, bytes_per_s=estimate.CPU.link_bytes_per_s, cuts=cuts)


def placed(problem: Problem, stages: int, cuts: Sequence[str] | None = None) -> Placed:
    return cut_into(traced(problem), stages, cuts)


def staged(problem: Problem, stages: int, cuts: Sequence[str] | None = None) -> tuple[Stage, ...]:
    return extract(split(placed(problem, stages, cuts)))


@functools.cache
def traced_model(make: Maker) -> Joint:
    """One of the models of tests/support/models.py as one microbatch; shared by the tests, which must not change it."""
    return traced(make(1))


@functools.cache
def placed_model(make: Maker, stages: int) -> Placed:
    return cut_into(traced_model(make), stages)


@functools.cache
def staged_model(make: Maker, stages: int) -> tuple[Stage, ...]:
    return extract(split(placed_model(make, stages)))
