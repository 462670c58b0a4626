"""Gradients of another dtype than their parameters: what torch gives with `grad_dtype`, and how much less is lost."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.processes import precision_worker
from tests.support.live_bytes import measured_peaks
from tests.support.models import Problem, mean_squares, mlp, numbers
from tests.support.pool import Launch
from tests.support.reference import compiled, reference, relative_error
from zbfx.errors import InputError, TraceError, ZbfxError
from zbfx.optim import PostValidated
from zbfx.program.reductions import Bucket

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def narrow(problem: Problem) -> Problem:
    """The problem in bfloat16; floats of the batch too."""

    def cast(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in tensors)

    return replace(problem, model=problem.model.bfloat16(), inputs=cast(problem.inputs), targets=cast(problem.targets))


def plain(problem: Problem, microbatches: int, dtypes: Mapping[str, torch.dtype]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of torch itself, whose parameters have gradients of these dtypes."""
    model = copy.deepcopy(problem.model)
    for name, parameter in model.named_parameters():
        parameter.grad_dtype = dtypes.get(name, parameter.dtype)
    loss, _ = reference(problem, microbatches, model)
    return loss, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def weight(problem: Problem, layer: int = 0) -> Any:
    return problem.model.get_parameter(f"{layer}.weight")


def gradients(step: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in step.named_parameters()}


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype is gradient.dtype, name
        assert torch.equal(found[name], gradient), name


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v-order"])
def test_float32_gradients_of_bfloat16_parameters_have_torchs_bits(stages: int, schedule: str) -> None:
    problem = narrow(mlp(4))
    loss, expected = plain(problem, 4, dict.fromkeys(problem.model.state_dict(), F32))
    step = compiled(problem, stages, 4, schedule=schedule, grad_dtype=F32).run_local()
    torch.testing.assert_close(step(*problem.inputs, *problem.targets).to(loss.dtype), loss)
    assert_same_bits(gradients(step), expected)
    step(*problem.inputs, *problem.targets)  # adds to them
    assert_same_bits(gradients(step), {name: 2 * gradient for name, gradient in expected.items()})


def test_grad_dtype_of_parameters_is_followed() -> None:
    """A wider dtype for one, a narrower one for another; a gradient is rounded before it is added, as autograd does."""
    problem = mlp(3)
    dtypes = {"0.weight": BF16, "4.bias": F64, "10.weight": BF16}
    for name, dtype in dtypes.items():
        problem.model.get_parameter(name).grad_dtype = dtype
    _, expected = plain(problem, 3, dtypes)
    pipe = compiled(problem, 2, 3)
    assert pipe.compiled.joint.grad_dtypes == dtypes
    assert zbfx.check(pipe)
    step = pipe.run_local()
    step(*problem.inputs, *problem.targets)
    found = gradients(step)
    assert_same_bits({name: found[name] for name in dtypes}, {name: expected[name] for name in dtypes})
    for name, gradient in expected.items():  # whether products are rounded before they are added is up to the kernel
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8)


def test_the_argument_widens_and_never_narrows() -> None:
    problem = mlp(2)
    first, second = problem.model.get_submodule("0"), problem.model.get_submodule("2")
    first.double().register_forward_hook(lambda module, args, output: output.float())
    second.bfloat16().register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    second.register_forward_hook(lambda module, args, output: output.float())
    problem = replace(problem, inputs=(problem.inputs[0].double(),))
    step = compiled(problem, 2, 2, grad_dtype=F32).run_local()
    step(*problem.inputs, *problem.targets)
    found = {name.partition(".")[0]: gradient.dtype for name, gradient in gradients(step).items()}
    assert found == {"0": F64, "2": F32, "4": F32, "6": F32, "8": F32, "10": F32}


def test_of_64_microbatches_half_of_the_error_is_gone() -> None:
    """Against float64, over all parameters; bfloat16 sums lose more with every microbatch."""
    count = 64
    problem = mlp(count, width=16)
    model = problem.model
    for parameter in model.parameters():  # float64 starts from what bfloat16 holds
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)
    inputs, targets = (tuple(t.bfloat16().double() for t in group) for group in (problem.inputs, problem.targets))
    exact = replace(problem, model=copy.deepcopy(model).double(), inputs=inputs, targets=targets)
    _, truth = plain(exact, count, {})
    errors = {}
    for dtype in (None, F32):
        given = narrow(replace(problem, model=copy.deepcopy(model)))
        step = compiled(given, 2, count, schedule="1f1b", grad_dtype=dtype, check=False).run_local()
        step(*given.inputs, *given.targets)
        found = torch.cat([(g.double() - truth[name]).flatten() for name, g in gradients(step).items()])
        errors[dtype] = float(found.norm())
    print(f"error of gradients, bfloat16 sums {errors[None]:.3g}, float32 sums {errors[F32]:.3g}")
    assert errors[F32] <= errors[None] / 2, errors


class Tied(nn.Module):
    """Layers between two uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), mlp(1).model

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.inner(self.first(x)), self.first.weight)


def test_shared_parameters_and_other_shapes_and_evaluation() -> None:
    """A tied weight's sums travel between its stages in float32, for every shape."""
    problem = narrow(Problem(Tied(), mean_squares, (numbers(8, 8),), (numbers(8, 8, seed=2),)))
    step = compiled(problem, 2, 4, grad_dtype=F32).run_local(on_new_shape="recompile")
    more = replace(problem, inputs=(numbers(16, 8).bfloat16(),), targets=(numbers(16, 8, seed=2).bfloat16(),))
    for given in (problem, more):
        _, expected = plain(given, 4, dict.fromkeys(given.model.state_dict(), F32))
        for parameter in step.parameters():
            parameter.grad = None
        step(*given.inputs, *given.targets)
        tied = gradients(step).pop("first.weight")
        assert relative_error(tied, expected.pop("first.weight")) < 1e-2  # its terms are added unrounded
        assert_same_bits({name: g for name, g in gradients(step).items() if name in expected}, expected)
        before = {name: gradient.clone() for name, gradient in gradients(step).items()}
        step.evaluate(*given.inputs, *given.targets)
        assert_same_bits(gradients(step), before)


@pytest.mark.parametrize("rollback", ["exact", "arithmetic"])
def test_optimizers_and_clipping_see_float32_gradients(rollback: str) -> None:
    """Steps that are clipped after the fact equal those of one process with torch's own clipping."""
    problem = narrow(mlp(3))
    twin = copy.deepcopy(problem)
    step = compiled(problem, 2, 3, grad_dtype=F32).run_local()
    optimizer = PostValidated(torch.optim.SGD(step.parameters(), lr=0.5), step, max_norm=0.05, rollback=rollback)
    for parameter in twin.model.parameters():
        parameter.grad_dtype = F32
    plainly = torch.optim.SGD(twin.model.parameters(), lr=0.5)
    for _ in range(4):
        step(*problem.inputs, *problem.targets)
        optimizer.step()
        optimizer.zero_grad()
        reference(twin, 3, twin.model)
        nn.utils.clip_grad_norm_(twin.model.parameters(), 0.05)
        plainly.step()
        plainly.zero_grad()
    optimizer.settle()
    assert optimizer.counts.clipped == 4
    for name, parameter in problem.model.named_parameters():
        torch.testing.assert_close(parameter, twin.model.get_parameter(name), rtol=2e-2, atol=2e-3)
    step(*problem.inputs, *problem.targets)
    norm = step.clip_grad_norm_(1e-3)
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients(step).values())
    assert float(norm) > 1e-3
    assert squares**0.5 == pytest.approx(1e-3, rel=1e-4)


def test_a_scaler_takes_float16_parameters_with_float32_gradients() -> None:
    problem = mlp(2)
    half = [tuple(tensor.half() for tensor in group) for group in (problem.inputs, problem.targets)]
    problem = replace(problem, model=problem.model.half(), inputs=half[0], targets=half[1])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    step = compiled(problem, 2, 2, grad_dtype=F32).run_local()
    optimizer = PostValidated(torch.optim.SGD(step.parameters(), lr=0.1), step, grad_scaler=scaler)
    loss = step(*problem.inputs, *problem.targets)
    optimizer.step()
    optimizer.settle()
    optimizer.zero_grad()
    assert float(step(*problem.inputs, *problem.targets)) < float(loss)
    assert optimizer.counts.skipped == 0


def test_memory_of_the_sums_is_counted() -> None:
    """Gradients take four bytes an element; what a step holds beside them is predicted to the byte."""
    problem = narrow(mlp(4))
    pipe = compiled(problem, 2, 4, grad_dtype=F32)
    rows = pipe.compiled.signature.split((*problem.inputs, *problem.targets), {}, 4)
    for parameter in problem.model.parameters():
        parameter.grad_dtype = F32
    counters = measured_peaks(pipe, rows)
    assert [memory.highest.peak_bytes for memory in pipe.memory] == [counter.peak for counter in counters]
    numel = sum(parameter.numel() for parameter in problem.model.parameters())
    assert sum(memory.static.gradients for memory in pipe.memory) == 4 * numel
    assert sum(memory.static.parameters for memory in pipe.memory) == 2 * numel
    assert sum(stage.static_bytes for stage in pipe.schedule.costs.stages) == 6 * numel


def test_replicas_sum_and_shard_float32_gradients(launch: Launch) -> None:
    """Two replicas of two ranks, with and without ZeRO-1, beside one process."""
    for found in launch(4, precision_worker.replicas_with_float32_gradients).values():
        for zero, (error, parameters_agree, dtypes) in found.items():
            assert error < 1e-6, zero
            assert parameters_agree, zero
            assert dtypes == {(BF16, F32)}, zero


def test_buckets_hold_gradients_and_parameters_of_one_dtype_each() -> None:
    problem = mlp(2)
    for layer in (0, 4):
        weight(problem, layer).grad_dtype = F64
    pipe = zbfx.replicas.replicated(compiled(problem, 1, 2).compiled, 2)
    buckets: list[Bucket] = [bucket for found in pipe.reductions for bucket in found.buckets]
    wide = {name for bucket in buckets if bucket.dtype is F64 for name in bucket.names}
    assert wide == {"0.weight", "4.weight"}
    assert {bucket.parameter_dtype for bucket in buckets} == {F32}


@pytest.mark.parametrize("found", [torch.int32, "float32", 4])
def test_dtypes_that_no_gradient_has_are_refused(found: Any) -> None:
    with pytest.raises(ZbfxError, match=r"grad_dtype is a floating-point torch.dtype, or None; found"):
        compiled(mlp(2), 2, 2, grad_dtype=found)


def test_a_parameter_that_names_no_dtype_is_refused() -> None:
    problem = mlp(2)
    weight(problem).grad_dtype = None
    with pytest.raises(TraceError, match=r"summed in one floating-point dtype; found 0\.weight\.grad_dtype = None"):
        compiled(problem, 2, 2)


def test_gradients_that_are_there_in_another_dtype_are_refused() -> None:
    problem = narrow(mlp(2))
    pipe = compiled(problem, 2, 2, grad_dtype=F32)
    weight(problem).grad = torch.zeros_like(weight(problem))
    match = r"compiled for gradients of torch.float32 at 0.weight, which is torch.bfloat16; found a gradient of"
    with pytest.raises(InputError, match=match):
        pipe.run_local()
    weight(problem).grad = None
    pipe.run_local()(numbers(4, 8).bfloat16(), *problem.targets)
    assert weight(problem).grad.dtype is F32


def test_the_loss_does_not_depend_on_grad_dtype() -> None:
    problem = narrow(Problem(nn.Linear(4, 4), mean_squares, (numbers(4, 4),), (numbers(4, 4, seed=2),)))
    losses = []
    for dtype in (None, F32):
        losses.append(compiled(problem, 1, 2, grad_dtype=dtype).run_local()(*problem.inputs, *problem.targets))
        problem.model.zero_grad()
    assert torch.equal(*losses)


def test_the_loss_of_a_batch_is_not_rounded_to_half_precision() -> None:
    """Its microbatches' losses are in bfloat16, and their mean in float32."""
    problem = narrow(mlp(4))
    step = compiled(problem, 2, 4).run_local()
    loss = step(*problem.inputs, *problem.targets)
    assert {value.dtype for value in step.losses} == {torch.bfloat16}
    assert loss.dtype is torch.float32
    assert torch.equal(loss, torch.stack([value.float() for value in step.losses]).mean())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_half_precision_does_not_round_what_sums_are_divided_by(dtype: torch.dtype) -> None:
    """Losses of a sum and a count; compile's check compares them with those of the model. 1 / 96 has no exact value."""
    torch.manual_seed(0)
    model, inputs, classes = nn.Linear(4, 3).to(dtype), torch.randn(96, 4).to(dtype), torch.randint(3, (96,))

    def loss_fn(output: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(output, classes, reduction="sum"), (classes != -100).sum()

    examples: dict[str, Any] = {"example_inputs": (inputs[:32],), "example_targets": classes[:32]}
    step = zbfx.compile(model, stages=1, microbatches=3, loss_fn=loss_fn, **examples).run_local()
    loss = step(inputs, classes)
    sums = torch.stack(step.losses)
    assert (sums.dtype, loss.dtype) == (dtype, F32)
    torch.testing.assert_close(loss, sums.float().sum() / 96)
