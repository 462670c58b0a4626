"""Microbatches padded to few lengths: losses and gradients are those without padding, or the buckets are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbfx
from tests.support.reference import default_dtype
from zbfx.compiled import Mixed
from zbfx.errors import InputError, ZbfxError
from zbfx.runtime.buckets import Buckets, quarter_power

VOCABULARY, WIDTH = 11, 8
IGNORED = -100


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.into, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))


def model_of(causal: bool = True) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(causal) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def by_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def rows_of(lengths: tuple[int, ...]) -> list[tuple[tuple[Tensor, Tensor], dict[str, Any]]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCABULARY, (1, length), generator=generator) for length in lengths]
    return [((row, row), {}) for row in ids]


def pipeline(model: nn.Module) -> zbfx.Pipeline:
    ((ids, targets), _) = rows_of((9,))[0]
    return zbfx.compile(
        model,
        stages=2,
        microbatches=2,
        example_inputs=(ids,),
        example_targets=(targets,),
        loss_fn=by_tokens,
        schedule="1f1b",
        check=False,
    )


def step_of(model: nn.Module, buckets: Buckets | None, **options: Any) -> Any:
    return pipeline(model).run_local(**{"on_new_shape": "symbolic", "buckets": buckets, **options})


def loss_of(model: nn.Module, rows: list[Any]) -> Tensor:
    """By plain autograd, over all tokens of the rows."""
    sums = [torch.stack(by_tokens(model(ids), targets)) for (ids, targets), _ in rows]
    total, count = torch.stack(sums).sum(0)
    return total / count


def sixes(length: int) -> int:
    return -(-length // 6) * 6


@default_dtype(torch.float64)
def test_padding_changes_neither_loss_nor_gradients_and_shapes_are_few() -> None:
    model = model_of()
    plain = copy.deepcopy(model)
    rows = rows_of((2, 5, 6, 7, 11, 12))
    step = step_of(model, Buckets({"inputs[0]": (1, 0), "targets[0]": (1, IGNORED)}, rounded=sixes))
    loss = step.run_split(rows)
    expected = loss_of(plain, rows)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-12, msg=name)
    mixed = [pipe for pipe in step.pipelines if isinstance(pipe, Mixed) and pipe.trains]
    assert {form.signature.tensors[0].shape for form in mixed[-1].members} == {(1, 6), (1, 12)}
    torch.testing.assert_close(step.evaluate_split(rows), expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("causal", "label"), [(True, 0), (False, IGNORED)], ids=["labels that count", "attention that looks ahead"]
)
def test_padding_that_changes_the_loss_is_refused_before_the_first_step(causal: bool, label: int) -> None:
    buckets = Buckets({"inputs[0]": (1, 0), "targets[0]": (1, label)}, rounded=sixes)
    model = model_of(causal)
    step = step_of(model, buckets)
    with pytest.raises(InputError, match="padding changes the loss"):
        step.run_split(rows_of((5, 7)))
    with pytest.raises(InputError, match="padding changes the loss"):
        step.run_split(rows_of((5, 7)))
    assert step.count == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_padding_is_compared_on_the_first_call_that_pads_evaluations_too() -> None:
    counts = Buckets({"inputs[0]": (1, 0), "targets[0]": (1, 0)}, rounded=sixes)
    step = step_of(model_of(), counts)
    step.run_split(rows_of((6, 12)))
    step.evaluate_split(rows_of((6,)))
    for call in (step.evaluate_split, step.run_split):
        with pytest.raises(InputError, match="padding changes the loss"):
            call(rows_of((6, 7)))
    assert step.count == 1


def test_a_loss_that_is_not_finite_says_nothing_of_padding() -> None:
    counts = Buckets({"inputs[0]": (1, 0), "targets[0]": (1, 0)}, rounded=sixes)
    model = model_of()
    step = step_of(model, counts)
    weight = model[-1].weight  # type: ignore[index]
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    assert step.evaluate_split(rows_of((5,))).isnan()
    with torch.no_grad():
        weight.copy_(before)
    with pytest.raises(InputError, match="padding changes the loss"):
        step.evaluate_split(rows_of((5,)))


def test_padding_is_compared_once() -> None:
    step = step_of(model_of(), Buckets({"inputs[0]": (1, 0), "targets[0]": (1, IGNORED)}, rounded=sixes))
    step.run_split(rows_of((5, 7)))
    evaluating = [pipe for pipe in step.pipelines if not pipe.trains]
    step.run_split(rows_of((3, 2)))
    assert [pipe for pipe in step.pipelines if not pipe.trains] == evaluating
    assert len(evaluating) == 2


def test_nothing_is_padded_by_default_without_compiled_code() -> None:
    step = step_of(model_of(), Buckets({"inputs[0]": (1, 0), "targets[0]": (1, IGNORED)}))
    step.run_split(rows_of((5, 7)))
    (mixed,) = (pipe for pipe in step.pipelines if isinstance(pipe, Mixed) and pipe.trains)
    assert {form.signature.tensors[0].shape for form in mixed.members} == {(1, 5), (1, 7)}


def test_lengths_of_compiled_code() -> None:
    assert [quarter_power(length) for length in (64, 65, 76, 77, 96, 128, 129, 3000)] == [
        64, 80, 80, 80, 96, 128, 160, 3448,
    ]  # fmt: skip
    assert len({quarter_power(length) for length in range(64, 4097)}) == 25
    assert all(length <= quarter_power(length) < 1.19 * length + 8 for length in range(1, 5000))
    pad = {"inputs[0]": (1, 0)}
    assert Buckets(pad).added(70, compiles=True) == 10
    assert Buckets(pad, most=72).added(70, compiles=True) == 2
    assert Buckets(pad, most=60).added(70, compiles=True) == 0


def test_what_is_refused() -> None:
    cases: Any = (
        ({"ids": (1, 0)}, {}, r"names tensors of a microbatch: inputs\[0\], targets\[0\]; found ids"),
        ({}, {}, "found none"),
        ({"inputs[0]": (2, 0)}, {}, "along a dimension of its shape"),
        ({"inputs[0]": (0, 0)}, {}, "not its batch's"),
        ({"inputs[0]": (1, 0)}, {"on_new_shape": "refuse"}, "buckets are for microbatches of other shapes"),
    )
    for pad, options, found in cases:
        with pytest.raises(ZbfxError, match=found):
            step_of(model_of(), Buckets(pad), **options)
    others: Any = (
        (3, {}, "is a dict from a tensor's name .*; found int 3"),
        ({"inputs[0]": 1}, {}, r"is a dict .*; found 1 for inputs\[0\]"),
        ({"inputs[0]": (1,)}, {}, r"found \(1,\) for"),
        ({"inputs[0]": ((1, 0), (1, 1))}, {}, r"found \(\(1, 0\), \(1, 1\)\) for"),
        ({"inputs[0]": [(1, 0), [1]]}, {}, r"found \[\(1, 0\), \[1\]\] for"),
        ({"inputs[0]": []}, {}, r"found \[\] for"),
        ({"inputs[0]": (1, "x")}, {}, "a number that torch.int64 holds; found 'x'"),
        ({"inputs[0]": (1, 0.5)}, {}, "a number that torch.int64 holds; found 0.5"),
        ({"inputs[0]": (1, 2**63)}, {}, "a number that torch.int64 holds; found 9223372036854775808"),
        ({"inputs[0]": (1, 0)}, {"base": 0}, r"Buckets\(base=...\) is .*>= 1; found 0"),
        ({"inputs[0]": (1, 0)}, {"most": "x"}, r"Buckets\(most=...\) is .*; found 'x'"),
        ({"inputs[0]": (1, 0)}, {"rounded": 6}, r"Buckets\(rounded=...\) is a function .*; found int 6"),
    )
    for pad, fields, found in others:
        with pytest.raises(ZbfxError, match=found):
            step_of(model_of(), Buckets(pad, **fields))
    with pytest.raises(ZbfxError, match=r"buckets is a zbfx.Buckets, or None; found int 3"):
        step_of(model_of(), 3)  # type: ignore[arg-type]
    step = step_of(model_of(), Buckets({"inputs[0]": (1, 0)}, rounded=lambda length: length - 1))
    with pytest.raises(InputError, match="gives a whole number that is no less: found 4 for 5"):
        step.run_split(rows_of((5,)))


def test_models_that_write_buffers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(4), nn.Linear(3, 3))
    x = torch.zeros(2, 4, 3)
    pipe = zbfx.compile(
        model, stages=2, microbatches=2, example_inputs=(x,), example_targets=(x,), loss_fn=F.mse_loss, check=False
    )
    with pytest.raises(ZbfxError, match=r"the forward writes .*running_mean"):
        pipe.run_local(on_new_shape="symbolic", buckets=Buckets({"inputs[0]": (2, 0)}))
