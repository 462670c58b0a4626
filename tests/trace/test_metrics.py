"""Metrics beside the loss, by every reduction, and several losses with counts, against plain autograd in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbfx
from tests.support.reference import default_dtype
from zbfx.metrics import MetricKind, MetricReduction

M, ROWS, WIDTH, CLASSES = 4, 3, 6, 5
IGNORED = -100


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        return self.head(self.second(hidden).tanh()), hidden


def sums(output: tuple[Tensor, Tensor], labels: Tensor) -> Any:
    """Two losses, each with a count of its own: over labels that count, and over all."""
    logits, hidden = output
    known = labels != IGNORED
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return (total, known.sum()), (hidden.square().sum(), torch.ones_like(labels).sum())


def measured(output: tuple[Tensor, Tensor], labels: Tensor) -> Any:
    logits, hidden = output
    known = labels != IGNORED
    return sums(output, labels), {
        "mean": logits.mean(),
        "mean of integers": known.sum(),
        "accuracy": ((logits.argmax(-1) == labels).sum(), known.sum()),
        "sum": zbfx.Metric(known.sum(0), "sum"),
        "of a hidden state": zbfx.Metric(hidden.abs().amax(0), "max"),  # of an earlier stage than the loss
        "last": zbfx.Metric(logits.argmax(-1), "last"),
        "narrow": zbfx.Metric(logits.bfloat16().square(), "sum"),
        "weights": zbfx.Metric(hidden.sum(0), count=known.sum().expand(WIDTH)),
    }


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (M * ROWS,))
    labels[[0, 1, 4, 5, 10]] = IGNORED
    return torch.randn(M * ROWS, WIDTH), labels


def compiled_for(loss_fn: Any, model: nn.Module, schedule: Any = "zb-h1", **options: Any) -> zbfx.Pipeline:
    x, labels = batch()
    example: dict[str, Any] = {"example_inputs": (x[:ROWS],), "example_targets": (labels[:ROWS],)}
    options = {"stages": 2, "microbatches": M, "schedule": schedule, **options}
    return zbfx.compile(model, loss_fn=loss_fn, **example, **options)


def expected_metrics(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        pairs = zip(x.split(ROWS), labels.split(ROWS), strict=True)
        found = [(*model(part), own) for part, own in pairs]
    logits, hidden, own = (torch.stack(column) for column in zip(*found, strict=True))
    known = own != IGNORED
    return {
        "mean": logits.mean((1, 2)).mean(),
        "mean of integers": known.sum(1).double().mean(),
        "accuracy": (logits.argmax(-1) == own).sum().double() / known.sum(),
        "sum": known.sum(),
        "of a hidden state": hidden.abs().amax((0, 1)),
        "last": logits[-1].argmax(-1),
        "narrow": logits.bfloat16().square().float().sum(0),
        "weights": hidden.sum((0, 1)) / known.sum(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v-order"])
def test_every_reduction_and_two_losses(schedule: str) -> None:
    """The gradient of sum(a) / count(a) + sum(b) / count(b) over the batch, whatever falls into which microbatch."""
    with default_dtype(torch.float64):
        torch.manual_seed(1)
        model, (x, labels) = Tower(), batch()
        plain = copy.deepcopy(model)
        (first, known), (second, rows) = sums(plain(x), labels)
        loss = first / known + second / rows
        loss.backward()
        step = compiled_for(measured, model, schedule, check=True).run_local()
        torch.testing.assert_close(step(x, labels), loss.detach(), rtol=1e-12, atol=0.0)
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-14, msg=name)
        expected = expected_metrics(plain, x, labels)
        assert list(step.metrics) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(step.metrics[name], value, rtol=1e-12, atol=1e-14, msg=name)
        own = {**step.metrics}
        assert torch.equal(step.evaluate(x, labels), step(x, labels))
        assert all(torch.equal(step.metrics[name], value) for name, value in own.items())
        assert all(not value.requires_grad for value in own.values())


def test_steps_without_metrics_have_none() -> None:
    x, labels = batch()
    step = compiled_for(lambda out, own: F.cross_entropy(out[0], own.clamp(min=0)), Tower(), check=False).run_local()
    step(x, labels)
    assert step.metrics == {}


def test_narrow_counts_are_summed_wide() -> None:
    kind = MetricKind("accuracy", MetricReduction.MEAN, is_counted=True)
    found = kind.of_batch(torch.full((32,), 2048.0).half(), torch.full((32,), 4096.0).half())
    assert (found.dtype, found.item()) == (torch.float32, 0.5)  # 131,072 counted: float16 ends at 65,504


def test_nothing_counted_is_nan() -> None:
    def counted(output: Any, labels: Tensor) -> Any:
        none = (labels > CLASSES).sum()
        return output[0].square().mean(), {"share": (none.float(), none)}

    x, labels = batch()
    step = compiled_for(counted, Tower(), check=False).run_local()
    step(x, labels)
    assert step.metrics["share"].isnan()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"n": 3}, "a metric is a tensor .* found int for 'n'"),
        ({3: torch.ones(())}, "metrics have names, .* found the name 3"),
        ({"n": (torch.ones(()), 2)}, "a metric is a tensor .* found tuple for 'n'"),
    ],
)
def test_other_metrics_are_refused(metrics: Any, message: str) -> None:
    with pytest.raises(zbfx.TraceError, match=message):
        compiled_for(lambda out, _: (out[0].square().mean(), metrics), Tower(), check=False)


def test_other_arguments_of_a_metric_are_refused() -> None:
    one = torch.ones(())
    with pytest.raises(zbfx.ZbfxError, match="a metric's reduction is one of sum, mean, max, last; found 'median'"):
        zbfx.Metric(one, "median")
    with pytest.raises(zbfx.ZbfxError, match="a metric with a count is a mean, value over count; found"):
        zbfx.Metric(one, "sum", count=one)
    with pytest.raises(zbfx.ZbfxError, match=r"a metric's value is a tensor, made of the outputs .* found float 3"):
        zbfx.Metric(3.0)  # type: ignore[arg-type]
