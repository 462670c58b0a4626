"""Buffers that a backward writes, beside plain autograd in float64: custom Functions, hooks of tensors and modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbfx
from benchmarks.coverage.wide_parts import Noting, Saving
from tests.support.models import Problem, numbers, squares
from tests.support.reference import TRACES, assert_same, compiled, default_dtype, one_trace, reference, with_other
from zbfx import InvalidSchedule, TraceError
from zbfx.graphs import Role
from zbfx.plan import Action, Kind

WIDTH, MICROBATCHES, TOLERANCE = 4, 4, 1e-12


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


class Noted(nn.Module):
    """Four layers; in the middle `body(self, hidden)`. `amax` and `steps` are for the backward to write."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.body = body
        self.amax: Tensor
        self.register_buffer("amax", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.layers
        hidden = torch.tanh(second(torch.tanh(first(x))))
        return last(torch.tanh(third(self.body(self, hidden))))


def copied(self: Any, x: Tensor) -> Tensor:
    return Noting.apply(x, self.amax, lambda buffer, g: buffer.copy_(g.abs().amax()))


def saved(self: Any, x: Tensor) -> Tensor:
    return Saving.apply(x, self.amax)


def averaged(self: Any, x: Tensor) -> Tensor:
    """The order of microbatches shows in it."""
    return Noting.apply(x, self.amax, lambda buffer, g: buffer.mul_(0.9).add_(g.sum()))


def one_entry(self: Any, x: Tensor) -> Tensor:
    return Noting.apply(x, self.amax[1], lambda buffer, g: buffer.copy_(2 * buffer + g.sum()))


def twice(self: Any, x: Tensor) -> Tensor:
    """Two places of the model that add to one buffer."""
    x = Noting.apply(x, self.amax, lambda buffer, g: buffer.mul_(0.5).add_(g.sum()))
    return Noting.apply(torch.tanh(self.layers[0](x)), self.amax, lambda buffer, g: buffer.mul_(3).add_(g.sum()))


def counted(self: Any, x: Tensor) -> Tensor:
    """What is written depends on no gradient."""
    return Noting.apply(x, self.steps, lambda buffer, g: buffer.add_(1))


def of_the_forward(self: Any, x: Tensor) -> Tensor:
    """The value is the forward's; the backward writes it, and its gradient depends on the one before."""
    seen = x.detach().abs().amax()

    def note(buffer: Tensor, gradient: Tensor) -> None:
        gradient.mul_(1 + buffer[0])
        buffer.copy_(seen)

    return Noting.apply(x, self.amax, note)


def by_a_tensor_hook(self: Any, x: Tensor) -> Tensor:
    x = torch.tanh(x)
    x.register_hook(lambda g: g + 0 * self.amax.mul_(0.9).add_(g.abs().amax()).sum())
    return x


def by_a_hook_that_returns_nothing(self: Any, x: Tensor) -> Tensor:
    def hook(g: Tensor) -> None:
        self.amax.mul_(0.9).add_(g.sum())

    x = torch.tanh(x)
    x.register_hook(hook)
    return x


def by_a_new_tensor(self: Any, x: Tensor) -> Tensor:
    """The hook replaces the buffer."""

    def hook(g: Tensor) -> None:
        self.amax = 0.9 * self.amax + g.sum()

    x = torch.tanh(x)
    x.register_hook(hook)
    return x


def for_weights(self: Any, x: Tensor) -> Tensor:
    """What the buffer holds weighs a parameter's gradient alone: it is read in what would be a W."""
    weight = self.layers[1].weight * 1.0
    weight.register_hook(lambda g: g * (1 + self.amax.mul_(0.5).add_(g.sum()).sum()))
    return x @ weight


def beside_a_checkpoint(self: Any, x: Tensor) -> Tensor:
    """Code that recomputes is in the same backward as a hook that writes."""
    x = by_a_hook_that_returns_nothing(self, x)
    return checkpoint(lambda h: torch.tanh(self.layers[0](h)), x, use_reentrant=False)


def saved_in_a_checkpoint(self: Any, x: Tensor) -> Tensor:
    """The tensor that is written is one that the recomputed part has saved."""
    return checkpoint(saved, self, x, use_reentrant=False)


def saved_in_two_checkpoints(self: Any, x: Tensor) -> Tensor:
    def part(h: Tensor) -> Tensor:
        return Saving.apply(torch.tanh(self.layers[1](h)), self.amax)

    x = checkpoint(part, x, use_reentrant=False)
    return checkpoint(lambda h: part(h) + self.steps, x, use_reentrant=False)


BODIES = [
    copied,
    saved_in_a_checkpoint,
    saved_in_two_checkpoints,
    saved,
    averaged,
    one_entry,
    twice,
    counted,
    of_the_forward,
    by_a_tensor_hook,
    by_a_hook_that_returns_nothing,
    by_a_new_tensor,
    for_weights,
    beside_a_checkpoint,
]


def of(body: Callable[[Any, Tensor], Tensor]) -> Problem:
    return Problem(Noted(body), squares, (numbers(2 * MICROBATCHES, WIDTH),))


@cache
def shared_problem_of(body: Callable[[Any, Tensor], Tensor]) -> Problem:
    return of(body)


def agree(problem: Problem, stages: int, **options: Any) -> None:
    """Loss, gradients and buffers of two steps."""
    eager = copy.deepcopy(problem.model)
    step = compiled(problem, stages, MICROBATCHES, **options).run_local()
    for _ in range(2):
        eager.zero_grad()
        problem.model.zero_grad()
        expected = reference(problem, MICROBATCHES, eager)
        found = step(*problem.inputs), {name: p.grad for name, p in problem.model.named_parameters()}
        assert_same(found, expected, TOLERANCE)
    wanted = dict(eager.named_buffers())
    assert any(bool(buffer.any()) for buffer in wanted.values())
    for name, buffer in problem.model.named_buffers():
        torch.testing.assert_close(buffer, wanted[name], rtol=TOLERANCE, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("body", BODIES)
def test_backwards_write_buffers_microbatch_after_microbatch(
    body: Callable[[Any, Tensor], Tensor], stages: int, schedule: str
) -> None:
    with one_trace(TRACES):
        agree(shared_problem_of(body), stages, schedule=schedule, check=True)


def test_evaluation_leaves_buffers_of_the_backward_alone() -> None:
    problem = of(averaged)
    step = compiled(problem, 2, MICROBATCHES).run_local()
    step(*problem.inputs)
    before = problem.model.get_buffer("amax").clone()
    step.evaluate(*problem.inputs)
    assert bool(before.any())
    assert torch.equal(problem.model.get_buffer("amax"), before)


@pytest.mark.slow
def test_other_shapes_write_them_too() -> None:
    problem = of(averaged)
    eager = copy.deepcopy(problem.model)
    for on_new_shape in ("recompile", "symbolic"):
        pipe = compiled(problem, 2, MICROBATCHES)
        longer = Problem(problem.model, squares, (numbers(3 * MICROBATCHES, WIDTH),))
        reference(longer, MICROBATCHES, eager)
        pipe.run_local(on_new_shape=on_new_shape)(*longer.inputs)
        torch.testing.assert_close(problem.model.get_buffer("amax"), eager.get_buffer("amax"), rtol=TOLERANCE, atol=0)


def test_backwards_out_of_order_are_refused() -> None:
    orders = [
        [Action(kind, stage, k) for kind, ks in ((Kind.F, (0, 1, 2, 3)), (Kind.BW, (1, 0, 2, 3))) for k in ks]
        for stage in range(2)
    ]
    with pytest.raises(InvalidSchedule, match="ascending order of microbatches; found 1, 0, 2, 3"):
        compiled(of(averaged), 2, MICROBATCHES, schedule=orders)


def test_check_sees_a_buffer_that_the_backward_writes() -> None:
    """Where the graph writes another value than the model, or none, the check says so."""
    problem = of(averaged)
    pipe = compiled(problem, 2, MICROBATCHES, check=False)
    assert zbfx.check(pipe)
    graph = pipe.compiled.joint.graph
    update = next(
        value
        for value, port in zip(pipe.compiled.joint.output_values, pipe.compiled.joint.outputs, strict=True)
        if port.role is Role.BUFFER_UPDATE
    )
    with graph.inserting_after(update):
        other = graph.call_function(torch.ops.aten.mul.Tensor, (update, 1.01))
    other.meta = dict(update.meta)
    graph.output_node().replace_input_with(update, other)
    report = zbfx.check(with_other(pipe))
    assert [finding.name for finding in report.findings if "of the model itself" in finding.name] == [
        "buffer update amax of the model itself (a Python value that changes from call to call?)"
    ]


def reads_what_it_writes(self: Any, x: Tensor) -> Tensor:
    return copied(self, x + self.amax[0])


def writes_in_both(self: Any, x: Tensor) -> Tensor:
    self.amax.add_(x.detach().sum())
    return averaged(self, x)


def writes_a_parameter(self: Any, x: Tensor) -> Tensor:
    def note(_: Tensor, gradient: Tensor) -> None:
        self.layers[0].bias.data.mul_(0.5)

    return Noting.apply(x, self.amax, note)


GLOBAL, KEPT = torch.zeros(()), list[Any]()


def writes_a_global(self: Any, x: Tensor) -> Tensor:
    return Noting.apply(x, self.amax, lambda _, g: GLOBAL.copy_(g.sum()))


def looks(self: Any, x: Tensor) -> Tensor:
    x = torch.tanh(x)
    x.register_hook(lambda g: KEPT.append(g.shape))
    return x


def keeps(self: Any, x: Tensor) -> Tensor:
    def hook(g: Tensor) -> Tensor:
        self.last = g.detach()
        return g

    x = torch.tanh(x)
    x.register_hook(hook)
    return x


def keeps_in_a_function(self: Any, x: Tensor) -> Tensor:
    return Noting.apply(x, self.amax, lambda _, g: KEPT.append(g.norm()))


def keeps_beside_a_checkpoint(self: Any, x: Tensor) -> Tensor:
    return keeps(self, checkpoint(self.layers[0], x, use_reentrant=False))


def saved_in_a_checkpoint_and_written(self: Any, x: Tensor) -> Tensor:
    return averaged(self, saved_in_a_checkpoint(self, x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (keeps_beside_a_checkpoint, "a hook on gradients, at .*, changes no gradient and writes no buffer"),
        (saved_in_a_checkpoint_and_written, "writes into amax in a checkpointed part and outside of it"),
        (reads_what_it_writes, "the backward writes into amax, at .*test_backward_writes.py.* which the forward reads"),
        (writes_in_both, "the backward writes into amax, at .*, which the forward reads or writes"),
        (writes_a_parameter, r"writes in place into the parameter layers\.0\.bias, at"),
        (writes_a_global, "the backward writes in place into a tensor that the model does not hold"),
        (looks, "a hook on gradients, at .*test_backward_writes.py:.*, changes no gradient and writes no buffer"),
        (keeps, "a hook on gradients, at .*, changes no gradient and writes no buffer"),
        (keeps_in_a_function, r"the backward keeps a tensor of shape \(\) outside of the graph"),
    ],
)
@pytest.mark.filterwarnings("ignore:Error detected in")  # autograd's, on the way to the refusal
def test_what_no_step_would_do_is_refused(body: Callable[[Any, Tensor], Tensor], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        compiled(of(body), 2, MICROBATCHES)
    KEPT.clear()


def noting_hook(module: nn.Module, *gradients: Any) -> None:
    module.get_buffer("size").mul_(0.5).add_(gradients[-1][0].sum())


def looking_hook(module: nn.Module, *gradients: Any) -> None:
    KEPT.append(gradients[-1][0])


@pytest.mark.slow
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("stages", [1, 3])
def test_hooks_on_modules_write_their_buffers(register: str, stages: int) -> None:
    problem = of(lambda self, x: self.layers[1](x))
    layer = problem.model.get_submodule("layers.1")
    layer.register_buffer("size", torch.zeros(()))
    getattr(layer, register)(noting_hook)
    agree(problem, stages, check=True)
    getattr(layer, register)(looking_hook)
    with pytest.raises(TraceError, match=r"a hook on gradients, at .*test_backward_writes.py:\d+, changes no gradient"):
        compiled(problem, stages, MICROBATCHES)


def normalised(self: Any, x: Tensor) -> Tensor:
    return x * (self.layers[0].bias / self.layers[0].bias.norm())


def clipped(self: Any, x: Tensor) -> Tensor:
    return x * self.layers[0].bias.clamp(-0.3, 0.3)


def written_in_place(self: Any, x: Tensor) -> Tensor:
    weight = self.layers[0].bias * 2
    weight += 1
    return x * weight


def written_in_part(self: Any, x: Tensor) -> Tensor:
    weight = self.layers[0].weight.clone()
    weight[0] = 0.5
    return x @ weight


@pytest.mark.slow
@pytest.mark.parametrize("part", [normalised, clipped, written_in_place, written_in_part])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_checkpointed_values_of_parameters_alone(part: Callable[[Any, Tensor], Tensor], stages: int) -> None:
    problem = of(lambda self, x: checkpoint(lambda h: part(self, h), x, use_reentrant=False))
    problem.model.get_buffer("steps").add_(1)
    agree(problem, stages, check=True)
