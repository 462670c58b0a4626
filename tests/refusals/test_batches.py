"""Batches that a step refuses before it runs, and how a fault inside it is named."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.refusals.common import pipeline_of, step_refusal
from tests.support.models import Problem, mean_squares, mlp, numbers, squares
from tests.support.reference import compiled
from zbfx import InputError, PipelineFault

pytestmark = pytest.mark.usefixtures("known_traces")


def test_batch_that_does_not_divide() -> None:
    message = step_refusal(mlp, numbers(5, 8), numbers(5, 8))
    assert "inputs[0]" in message
    assert "(4, 8)" in message
    assert "2 microbatches of 2 each" in message
    assert "found (5, 8). Give a batch of that size, compile again" in message
    assert "drop_last" not in message


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_last_batch_that_is_shorter(rows: int) -> None:
    message = step_refusal(mlp, numbers(rows, 8), numbers(rows, 8))
    assert message == (
        f"inputs[0]: expected shape (4, 8) (2 microbatches of 2 each, as in the example), found ({rows}, 8). Leave out "
        f"a last batch that is shorter (DataLoader(..., drop_last=True)), compile again with another example "
        f"microbatch or microbatches=, or run sizes that divide into 2 microbatches with on_new_shape='recompile'"
    )


@pytest.mark.parametrize("on_new_shape", ["recompile", "symbolic"])
def test_new_shape_that_does_not_divide(on_new_shape: str) -> None:
    step = pipeline_of(mlp).run_local(on_new_shape=on_new_shape)
    with pytest.raises(InputError) as caught:
        step(numbers(3, 8), numbers(3, 8))
    assert str(caught.value) == (
        "inputs[0]: expected 2 dimensions, dimension 0 divisible into 2 microbatches; found shape (3, 8). Leave out a "
        "last batch that is shorter (DataLoader(..., drop_last=True)), or pad it"
    )


def test_targets_that_are_too_short() -> None:
    message = step_refusal(mlp, numbers(4, 8), numbers(2, 8))
    assert "targets[0]" in message
    assert "found (2, 8)" in message


def test_other_inner_shape() -> None:
    assert "found (4, 7)" in step_refusal(mlp, numbers(4, 7), numbers(4, 8))


def test_other_dtype() -> None:
    message = step_refusal(mlp, numbers(4, 8).double(), numbers(4, 8))
    assert "expected dtype torch.float32" in message
    assert "found torch.float64" in message


def test_tensors_without_data_and_sparse_ones() -> None:
    x = numbers(4, 8).float()
    meta = "inputs[0]: expected a tensor with data, found one on the meta device"
    sparse = "inputs[0]: expected a dense tensor, found one of layout torch.sparse_coo. Pass .to_dense()"
    assert step_refusal(mlp, x.to("meta"), x) == meta
    assert step_refusal(mlp, x.to_sparse(), x) == sparse
    nested = "inputs[0]: expected a dense tensor, found a nested one. Pass .to_padded_tensor(0.0)"
    assert step_refusal(mlp, torch.nested.nested_tensor(list(x), layout=torch.jagged), x) == nested
    step = pipeline_of(mlp).run_local()
    for found, message in ((x.to("meta"), meta), (x.to_sparse(), sparse)):
        with pytest.raises(InputError) as caught:
            step.evaluate(found, x)
        assert str(caught.value) == message
    with pytest.raises(InputError) as caught:
        step.run_split([((x[:2].to("meta"), x[:2]), {})] * 2)
    assert str(caught.value) == meta
    with pytest.raises(InputError) as caught:
        zbfx.compile(mlp(2).model, stages=1, microbatches=2, loss_fn=mean_squares, example_inputs=(x.to_sparse(),))
    assert str(caught.value) == sparse


def test_missing_and_unknown_arguments() -> None:
    message = step_refusal(mlp, numbers(4, 8))
    assert "expected (inputs[0], targets[0])" in message
    assert "found (inputs[0])" in message
    assert "mask" in step_refusal(mlp, numbers(4, 8), numbers(4, 8), mask=numbers(4))


@pytest.mark.parametrize("value", [None, 3.0, "text", [1.0, 2.0]])
def test_something_else_where_a_tensor_was(value: Any) -> None:
    assert "inputs[0]" in step_refusal(mlp, value, numbers(4, 8))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Any = 1.0, mode: str | None = None) -> Tensor:
        return torch.tanh(self.layer(x)) * scale


@pytest.mark.parametrize(
    "given",
    [{"scale": 3.0, "mode": "a"}, {"scale": 2, "mode": "a"}, {"scale": 2.0, "mode": "b"}, {"scale": 2.0, "mode": None}],
)
def test_value_that_the_graph_holds_must_stay(given: dict[str, Any]) -> None:
    problem = Problem(Scaled(), squares, (numbers(4, 8),), (), {"scale": 2.0, "mode": "a"})
    message = step_refusal(problem, *problem.inputs, **given)
    changed = "mode" if given["mode"] != "a" else "scale"
    assert message.startswith(f"{changed} was {problem.kwargs[changed]!r} when the model was traced")
    assert f"found {given[changed]!r}" in message
    assert "Pass it as a tensor, or compile again" in message


def test_tensor_where_a_value_was() -> None:
    problem = Problem(Scaled(), squares, (numbers(4, 8),), (), {"scale": 2.0})
    assert "scale was 2.0" in step_refusal(problem, *problem.inputs, scale=torch.tensor(2.0))


def test_tensor_that_every_microbatch_gets_whole() -> None:
    problem = Problem(Scaled(), squares, (numbers(4, 8),), (), {"scale": torch.ones(8)})
    pipe = zbfx.compile(
        problem.model,
        stages=1,
        microbatches=2,
        example_inputs=(numbers(2, 8),),
        example_kwargs={"scale": torch.ones(8)},
        loss_fn=squares,
        schedule="gpipe",
    )
    with pytest.raises(InputError, match="given to every microbatch whole") as caught:
        pipe.run_local()(numbers(4, 8), scale=torch.ones(4))
    assert "found (4,)" in str(caught.value)


def test_microbatches_that_are_cut_already() -> None:
    problem = mlp(2)
    step = compiled(problem, 2, 2).run_local()
    cut: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]]
    cut = [((x, y), {}) for x, y in zip(numbers(4, 8).chunk(2), numbers(4, 8, seed=2).chunk(2), strict=True)]
    loss = step.run_split(cut)
    assert torch.equal(loss, compiled(problem, 2, 2).run_local()(*problem.inputs, *problem.targets))
    with pytest.raises(InputError, match="expected 2 microbatches, found 1"):
        step.run_split(cut[:1])


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        (None, "found NoneType None"),
        ("ab", "found str 'ab'"),
        ([numbers(2, 8)] * 2, "found a tensor of shape (2, 8) for microbatch 0"),
        ([(numbers(2, 8), numbers(2, 8))] * 2, "found tuple (tensor("),
        ([((numbers(2, 8), numbers(2, 8)), {}), ((numbers(2, 8),), None)], "for microbatch 1"),
    ],
)
def test_microbatches_that_are_no_pairs(batches: Any, found: str) -> None:
    step = pipeline_of(mlp).run_local()
    with pytest.raises(InputError) as caught:
        step.run_split(batches)
    assert "run_split takes a list of (positional arguments, keyword arguments), like ((inputs, targets), {}), one" in (
        str(caught.value)
    )
    assert found in str(caught.value)


class Weighted(nn.Module):
    """The classes are as many as the rows of a microbatch, and so are their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["x"] - 2 * batch["z"])


def weighted(output: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets, weights)


@pytest.mark.parametrize("on_new_shape", ["refuse", "recompile"])
def test_tensor_that_is_as_long_as_a_microbatch_by_coincidence(on_new_shape: str) -> None:
    x, targets, weights = numbers(12, 8), torch.arange(12) % 4, torch.arange(4) + 1.0
    pipe = zbfx.compile(
        Weighted(),
        stages=1,
        microbatches=3,
        example_inputs=({"x": x[:4], "z": x[4:8]},),
        example_targets=(targets[:4], weights),
        loss_fn=weighted,
        schedule="gpipe",
    )
    step = pipe.run_local(on_new_shape=on_new_shape)
    for call in (step, step.evaluate):
        with pytest.raises(InputError) as caught:
            call({"x": x, "z": x}, targets, weights)
        message = str(caught.value)
        assert message.startswith(
            "targets[1]: expected 3 microbatches of 4 each, as in the example, found (4,), the shape"
        )
        assert (
            "If it has no batch dimension (class weights), compile with batch_dims= and None for targets[1]" in message
        )


def test_dicts_match_by_key() -> None:
    x, z = numbers(12, 8), numbers(12, 8, seed=3)
    problem = Problem(Weighted(), squares, ({"x": x, "z": z},))
    step = compiled(problem, 1, 3).run_local()
    expected = step({"x": x, "z": z})
    assert torch.equal(step({"z": z, "x": x}), expected)
    assert not torch.equal(step({"z": x, "x": z}), expected)
    for wrong in ({"x": x}, {"x": x, "z": z, "y": z}, {"x": x, "y": z}, [x, z]):
        with pytest.raises(InputError, match=r"expected \(inputs\[0\]\['x'\], inputs\[0\]\['z'\]\), found"):
            step(wrong)


def test_fault_in_a_local_step_names_rank_step_and_action(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mlp(2)
    step = compiled(problem, 2, 2).run_local()
    step(*problem.inputs, *problem.targets)
    call = next(call for call in step.engine.runners[1].calls if call.phase.name == "B1")
    monkeypatch.setattr(call, "take", failing)
    with pytest.raises(PipelineFault) as caught:
        step(*problem.inputs, *problem.targets)
    assert "rank 1, step 1, action B1.0 (stage 1, microbatch 0)" in str(caught.value)
    assert "ArithmeticError: on purpose" in str(caught.value)
    assert isinstance(caught.value.__cause__, ArithmeticError)


def failing(*_: Any) -> Any:
    raise ArithmeticError("on purpose")


def test_the_loss_is_a_plain_tensor_and_its_backward_is_refused() -> None:
    """Pickled, copied, added up; torch's error says that it has no graph, and gradients stay as they are."""
    problem = mlp(3)
    step = compiled(problem, 2, 3).run_local()
    loss = step(*problem.inputs, *problem.targets)
    before = [parameter.grad.clone() for parameter in step.parameters() if parameter.grad is not None]
    for copied in (copy.deepcopy(loss), pickle.loads(ForkingPickler.dumps(loss)), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(copied, loss)
    total = torch.zeros(())
    total += loss
    assert float(total) == loss.item() == loss.detach().numpy()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()
    after = [parameter.grad for parameter in step.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, before, after))
