"""An example that the model itself fails on is refused as such; so is one of a dtype that only real kernels refuse."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.cases.common import line_of
from tests.support.models import mlp, numbers
from tests.support.reference import compiled
from zbfx import TraceError

FIT = "Give example_inputs and example_kwargs as the model's forward takes them, and example_targets as loss_fn does"
X, T = numbers(4, 16).float(), torch.tensor([0, 9, 3, 3])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.ones(8, 10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x)) @ self.weight


def refusal(**options: Any) -> str:
    arguments: dict[str, Any] = {"example_inputs": (X,), "example_targets": T, "loss_fn": nn.functional.cross_entropy}
    with pytest.raises(TraceError) as caught:
        zbfx.compile(Net(), stages=2, microbatches=2, schedule="zb-h1", **{**arguments, **options})
    return str(caught.value)


@pytest.mark.parametrize(
    ("example", "part", "reason"),
    [
        ({"example_inputs": ()}, "the model", "missing 1 required positional argument: 'x'"),
        ({"example_inputs": (None,)}, "the model", "must be Tensor, not NoneType"),
        ({"example_inputs": ("a",)}, "the model", "must be Tensor, not str"),
        ({"example_inputs": ([],)}, "the model", "must be Tensor, not list"),
        ({"example_inputs": (X[:, :3],)}, "the model", "must have same reduction dim, but got [4, 3] X [16, 8]"),
        ({"example_kwargs": {"foo": 1}}, "the model", "got an unexpected keyword argument 'foo'"),
        ({"example_inputs": (X[:0],)}, "loss_fn", "Expected input batch_size (0) to match target batch_size (4)"),
        ({"example_targets": T[:3]}, "loss_fn", "Expected input batch_size (4) to match target batch_size (3)"),
        ({"example_targets": T.float()}, "loss_fn", "int64"),
        ({"example_targets": None}, "loss_fn", "must be Tensor, not NoneType"),
        ({"example_targets": (T, T)}, "loss_fn", "weight tensor should be defined"),
    ],
)
def test_example_that_the_plain_model_fails_on(
    example: dict[str, Any], part: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    message = refusal(**example)
    assert message.startswith(f"the arguments of the example do not fit {part}, which fails on them without zbfx too: ")
    assert reason in message
    assert FIT in message
    assert "unknown line" not in message
    assert "operator of its own" not in message
    if "reduction dim" in reason:
        assert f"{line_of(Net.forward, 'self.body(x)')} `return" in message
        assert " in body. Give" in message
    assert not [record for record in caplog.records if record.name == logger.name]
    assert logger.level == level


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"check": False}], ids=["checked", "unchecked"])
def test_dtype_that_only_real_kernels_refuse(dtype: torch.dtype, options: dict[str, Any]) -> None:
    message = refusal(example_inputs=(X.to(dtype),), **options)
    assert message.startswith("the arguments of the example do not fit the model: aten.addmm gets tensors of ")
    assert str(dtype) in message
    assert "torch.float32" in message
    assert line_of(Net.forward, "self.body(x)") in message
    assert "model.to(dtype)" in message


def test_layers_of_torch_alone_are_named_by_lines_of_theirs() -> None:
    """No line of the stack is the model's: neither are those of decorators, nor that of who compiles it."""
    with pytest.raises(TraceError) as caught:
        zbfx.compile(
            nn.Sequential(nn.Linear(16, 10)),
            stages=1,
            microbatches=2,
            example_inputs=(X.double(),),
            example_targets=T,
            loss_fn=nn.functional.cross_entropy,
        )
    assert f" at {nn.modules.linear.__file__}:" in str(caught.value)
    assert __file__ not in str(caught.value)
    assert " in 0, and takes one dtype" in str(caught.value)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, bidirectional: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(4, 6, num_layers=2, bidirectional=bidirectional)
        self.head = nn.Linear(12 if bidirectional else 6, 10)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, feature) -> (batch, class)
        return self.head(self.layer(x.transpose(0, 1))[0][-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_train(kind: Any, bidirectional: bool) -> None:
    """In float32, where the CPU library has a fused layer for LSTMs, which is no graph that can be split."""
    plain, model = Recurrent(kind, bidirectional), Recurrent(kind, bidirectional)
    x, targets = numbers(4, 3, 4).float(), T
    pipe = zbfx.compile(
        model,
        stages=2,
        microbatches=2,
        schedule="zb-h1",
        loss_fn=nn.functional.cross_entropy,
        example_inputs=(x[:2],),
        example_targets=targets[:2],
    )
    assert pipe.schedule.notes == ()  # all is split
    step = pipe.run_local()
    loss = step(x, targets)
    expected = nn.functional.cross_entropy(plain(x), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(step.evaluate(x, targets), expected.detach(), rtol=1e-6, atol=0)
    assert torch.backends.mkldnn.enabled


def test_a_later_batch_that_does_not_fit_is_none_of_the_examples() -> None:
    """Only the model's forward knows that rows of this width do not fit; the example did."""
    problem = mlp(2)
    step = compiled(problem, 1, 2, check=False).run_local(on_new_shape="recompile")
    with pytest.raises(TraceError) as caught:
        step(numbers(4, 7), *problem.targets)
    message = str(caught.value)
    assert message.startswith("the arguments of this batch do not fit the model, which fails on them without zbfx too")
    assert "example" not in message
    assert "Give a batch that the model's forward and its loss take" in message
