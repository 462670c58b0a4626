"""Which dimension of a tensor is the batch's: named by the user, or guessed, and a guess that misleads is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.support.models import ids, numbers
from tests.support.reference import default_dtype, gradients
from zbfx import InputError, ZbfxError

M = 4
Call = tuple[tuple[Tensor, ...], dict[str, Any], tuple[Tensor, ...]]
double = default_dtype(torch.float64)


class Rotary(nn.Module):
    """Positions have three rows, the batch second, as in mRoPE; `extra` has the batch last, and a table has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, positions: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        turned = self.embedding(tokens) * torch.cos(positions[0] + positions[2])[..., None]
        turned = turned * extra["shift"].movedim(-1, 0)[:, None] + extra["table"].sum()
        return self.out(torch.tanh(self.layer(turned)).mean(1))


def weighted(output: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets, weights)


DIMS = ((0, 1), {"extra": {"table": None, "shift": -1}}, (0, None))


def call_of(rows: int, length: int = 5, table: int = 7) -> Call:
    """A batch of so many rows. The class weights are 3 long."""
    positions = torch.arange(length).expand(3, rows, length).clone() + torch.arange(rows)[:, None]
    extra = {"shift": numbers(4, rows), "table": numbers(table)}
    targets = torch.arange(rows) % 3
    return (ids(rows, length, vocabulary=9), positions), {"extra": extra}, (targets, torch.arange(3) + 1.0)


def part(call: Call, index: int, size: int) -> Call:
    """A microbatch, cut by hand."""
    (tokens, positions), kwargs, (targets, weights) = call
    rows = slice(index * size, (index + 1) * size)
    extra = {**kwargs["extra"], "shift": kwargs["extra"]["shift"][:, rows]}
    return (tokens[rows], positions[:, rows]), {"extra": extra}, (targets[rows], weights)


def expected(model: nn.Module, call: Call, count: int = M) -> tuple[float, Mapping[str, Tensor | None]]:
    """The mean loss of the microbatches and its gradients, by plain autograd."""
    plain = copy.deepcopy(model)
    total = 0.0
    for index in range(count):
        args, kwargs, targets = part(call, index, len(call[2][0]) // count)
        loss = weighted(plain(*args, **kwargs), *targets) / count
        loss.backward()
        total += float(loss.detach())
    return total, gradients(plain)


def compiled(model: nn.Module, example: Call, batch_dims: Any) -> zbfx.Pipeline:
    args, kwargs, targets = example
    return zbfx.compile(
        model,
        stages=2,
        microbatches=M,
        schedule="zb-h1",
        loss_fn=weighted,
        example_inputs=args,
        example_kwargs=kwargs,
        example_targets=targets,
        batch_dims=batch_dims,
        check=True,
    )


def assert_equal(model: nn.Module, found: Tensor, call: Call) -> None:
    loss, wanted = expected(model, call)
    assert float(found) == pytest.approx(loss, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-10, atol=1e-12)
    model.zero_grad()


@pytest.mark.slow
@double
@pytest.mark.parametrize("size", [1, 3], ids=["one row", "as long as weights and positions"])
@pytest.mark.parametrize("on_new_shape", ["refuse", "recompile", "symbolic"])
def test_dimensions_that_are_named(size: int, on_new_shape: str) -> None:
    """In steps, split steps and evaluations, with further lengths, rows, and lengths of the table, which stays whole
    even where it grows with the batch."""
    model = Rotary()
    step = compiled(model, part(call_of(size * M), 0, size), DIMS).run_local(on_new_shape=on_new_shape)
    others = [] if on_new_shape == "refuse" else [(size * M * 2, 5, 7), (size * M, 6, 7), (size * M * 2, 5, 7 * M * 2)]
    for sizes in ((size * M, 5, 7), *others):
        args, kwargs, targets = call = call_of(*sizes)
        assert_equal(model, step(*args, *targets, **kwargs), call)
        count = sizes[0] // size if sizes[1:] == (5, 7) else M  # evaluations take any number of the example's
        loss, _ = expected(model, call, count)
        assert float(step.evaluate(*args, *targets, **kwargs)) == pytest.approx(loss, rel=1e-12)
    call = call_of(size * M)
    cut = [part(call, index, size) for index in range(M)]
    assert_equal(model, step.run_split([((*args, *targets), kwargs) for args, kwargs, targets in cut]), call)


@double
def test_a_dimension_for_a_whole_part() -> None:
    """And keys of dicts in any order."""
    model = Rotary()
    for dims in (((0, 1), {"extra": {"shift": 1, "table": None}}, (0, None)), ((0, -2), *DIMS[1:])):
        args, kwargs, targets = call = call_of(M)
        step = compiled(model, part(call, 0, 1), dims).run_local()
        assert_equal(model, step(*args, *targets, **kwargs), call)
    layer = nn.Linear(3, 3)
    pipe = zbfx.compile(
        layer, stages=1, microbatches=2, example_inputs=(numbers(2, 3),), example_targets=torch.arange(2),
        loss_fn=nn.functional.cross_entropy, schedule="gpipe", batch_dims=(0, None, 0),
    )  # fmt: skip
    x, y = numbers(4, 3), torch.arange(4) % 3
    assert float(pipe.run_local()(x, y)) == pytest.approx(float(nn.functional.cross_entropy(layer(x), y).detach()))


def test_guess_from_the_example_cuts_what_it_did() -> None:
    """What is cut in the example is cut in every further shape, and what is whole stays whole."""
    model = nn.Linear(8, 8)

    def loss(output: Tensor, table: Tensor) -> Tensor:
        return (output * table.sum()).square().mean()

    pipe = zbfx.compile(
        model, stages=1, microbatches=2, example_inputs=(numbers(4, 8),), example_targets=numbers(3), loss_fn=loss,
        schedule="gpipe",
    )  # fmt: skip
    step = pipe.run_local(on_new_shape="recompile")
    for rows in (8, 6):  # of three rows a microbatch, as long as the table
        x, table = numbers(rows, 8), numbers(3)
        assert float(step(x, table)) == pytest.approx(float(loss(model(x), table).detach()), rel=1e-5)


def grown(size: int, rows: int) -> Callable[[str], Tensor]:
    model = nn.Embedding(9, 4)

    def loss(output: Tensor, positions: Tensor) -> Tensor:
        return (output.mean(1) * positions.sum()).square().mean()

    pipe = zbfx.compile(
        model, stages=1, microbatches=3, example_inputs=(ids(size, 5, vocabulary=9),),
        example_targets=numbers(3, size, 5), loss_fn=loss, schedule="gpipe",
    )  # fmt: skip

    def run(on_new_shape: str) -> Tensor:
        step = pipe.run_local(on_new_shape=on_new_shape)
        found: Tensor = step(ids(rows, 5, vocabulary=9), numbers(3, rows, 5))
        return found

    return run


@pytest.mark.slow
@pytest.mark.parametrize("on_new_shape", ["recompile", "symbolic"])
@pytest.mark.parametrize(("size", "rows"), [(1, 3), (2, 6), (1, 12), (2, 12), (4, 12)])
def test_whole_tensor_that_grows_with_the_batch_is_refused(size: int, rows: int, on_new_shape: str) -> None:
    with pytest.raises(InputError) as caught:
        grown(size, rows)(on_new_shape)
    assert str(caught.value).startswith(
        f"targets[0]: found shape (3, {rows}, 5) where the example has (3, {size}, 5). Its dimension 1 seems to be "
        f"that of the batch, which went from {size} to {rows}"
    )
    with pytest.raises(InputError, match="batch_dims= of compile" if rows == 3 * size else "expected shape"):
        grown(size, rows)("refuse")


@pytest.mark.parametrize("on_new_shape", ["recompile", "symbolic"])
def test_tensor_that_is_cut_by_coincidence_is_refused(on_new_shape: str) -> None:
    """Three rows of positions, and three rows in the example's microbatch: cut along those, they divide by three."""
    with pytest.raises(InputError) as caught:
        grown(3, 9)(on_new_shape)
    assert str(caught.value) == (
        "targets[0]: found shape (3, 9, 5) beside inputs[0], 9 long. In the example both are 3 long, and so both are "
        "cut along dimension 0. Compile with batch_dims=, with another dimension for targets[0], or None to give it to "
        "every microbatch whole"
    )


WRONG = {
    "no tuple": ({"tokens": 0}, "batch_dims is a tuple (inputs, kwargs, targets)"),
    "two parts": (((0, 1), (0, None)), "batch_dims is a tuple (inputs, kwargs, targets)"),
    "other structure": (((0, 1, 2), *DIMS[1:]), "batch_dims is a tuple (inputs, kwargs, targets)"),
    "other key": ((DIMS[0], {"more": 0}, DIMS[2]), "batch_dims is a tuple (inputs, kwargs, targets)"),
    "too far": (((2, 1), *DIMS[1:]), "found 2 for inputs[0], whose shape is (1, 5)"),
    "a text": (((0, "batch"), *DIMS[1:]), "found 'batch' for inputs[1], whose shape is (3, 1, 5)"),
    "a truth": (((True, 1), *DIMS[1:]), "found True for inputs[0], whose shape is (1, 5)"),
}


@double
@pytest.mark.parametrize("case", WRONG)
def test_wrong_dimensions_are_refused(case: str) -> None:
    dims, told = WRONG[case]
    with pytest.raises(ZbfxError) as caught:
        compiled(Rotary(), part(call_of(M), 0, 1), dims)
    assert told in str(caught.value)
