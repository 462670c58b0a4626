"""Every loss of torch.nn.functional, traced: loss and gradients are those of plain autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.support.models import numbers
from tests.support.reference import default_dtype
from zbfx.errors import TraceError
from zbfx.graphs import Role
from zbfx.trace.tracer import trace

ROWS, CLASSES = 6, 5
Loss = Callable[..., Tensor]

LENGTHS = [[3, 2], [2, 1]]  # of steps, and of letters
STEPS, LETTERS = map(torch.tensor, LENGTHS)
WORDS = torch.tensor([[1, 3], [4, 4]])
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
CLASS = torch.tensor([0, 4, -100, 2, 2, 1])
SIGN = torch.tensor([1, -1, 1, 1, -1, -1])
LABELS = torch.tensor(
    [[0, 1, -1, 2, 3], [-1, 0, 1, 2, 3], [4, 3, 2, 1, 0], [2, -1, -1, -1, -1], [3, 3, 1, -1, 0], [1, 0, 4, 2, -1]]
)
SHARES = torch.softmax(numbers(ROWS, CLASSES, seed=5).double(), -1)
VALUES = numbers(ROWS, CLASSES, seed=6).double()


def by_reduction(loss: Loss, *targets: Tensor, **options: Any) -> list[Any]:
    """The loss by its mean, its sum, and each entry weighed by a number of its own."""

    def weighed(output: Tensor, *others: Tensor) -> Tensor:
        each = loss(output, *others, reduction="none", **options)
        return (each * torch.linspace(0.2, 1.8, each.numel(), dtype=each.dtype).reshape(each.shape)).sum()

    name = f"{loss.__name__} {' '.join(options)}"
    found = [pytest.param(weighed, targets, id=f"{name} none")]
    for reduction in ("batchmean" if loss is F.kl_div else "mean", "sum"):
        reduced = lambda *values, reduction=reduction: loss(*values, reduction=reduction, **options)  # noqa: E731
        found.append(pytest.param(reduced, targets, id=f"{name} {reduction}"))
    return found


def halves(loss: Loss) -> Loss:
    """A loss of two outputs: the halves of one."""

    def of_halves(output: Tensor, *targets: Tensor, **options: Any) -> Tensor:
        return loss(*output.chunk(2), *targets, **options)

    of_halves.__name__ = loss.__name__
    return of_halves


def ctc_loss(output: Tensor, words: Tensor, *lengths: Tensor, **options: Any) -> Tensor:
    """Of two rows of three steps; without lengths, those of `LENGTHS`, as numbers."""
    log_probs = output.view(3, 2, CLASSES).log_softmax(-1)
    steps: Any
    letters: Any
    steps, letters = lengths or (tuple(row) for row in LENGTHS)
    return F.ctc_loss(log_probs, words, steps, letters, **options)


def thirds(loss: Loss) -> Loss:
    def of_thirds(output: Tensor, **options: Any) -> Tensor:
        return loss(*output.chunk(3), **options)

    of_thirds.__name__ = loss.__name__
    return of_thirds


def after(function: Callable[[Tensor], Tensor], loss: Loss) -> Loss:
    def composed(output: Tensor, *targets: Tensor, **options: Any) -> Tensor:
        return loss(function(output), *targets, **options)

    composed.__name__ = loss.__name__
    return composed


def of_scores(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Those of one row, without a dimension for rows."""
    return F.multilabel_margin_loss(output[0], target[0], **options)


def linear_cross_entropy(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.linear_cross_entropy(output, VALUES.to(output), target, **options)


CASES = [
    *by_reduction(after(torch.sigmoid, F.binary_cross_entropy), SHARES),
    *by_reduction(after(torch.sigmoid, F.binary_cross_entropy), SHARES, weight=WEIGHTS),
    *by_reduction(F.binary_cross_entropy_with_logits, SHARES),
    *by_reduction(F.binary_cross_entropy_with_logits, SHARES, weight=WEIGHTS, pos_weight=WEIGHTS),
    *by_reduction(halves(F.cosine_embedding_loss), SIGN[:3], margin=0.1),
    *by_reduction(ctc_loss, WORDS),
    *by_reduction(ctc_loss, WORDS, STEPS, LETTERS, blank=2),
    *by_reduction(ctc_loss, WORDS, STEPS, 0 * LETTERS + 2, zero_infinity=True),  # two steps cannot say 4, 4
    *by_reduction(ctc_loss, torch.tensor([1, 3, 4]), STEPS, LETTERS),
    *by_reduction(F.cross_entropy, CLASS),
    *by_reduction(F.cross_entropy, CLASS, weight=WEIGHTS, label_smoothing=0.1),
    *by_reduction(F.cross_entropy, CLASS.clamp_min(0), ignore_index=2),
    *by_reduction(F.cross_entropy, SHARES, weight=WEIGHTS),
    *by_reduction(F.hinge_embedding_loss, SIGN[:, None].expand(ROWS, CLASSES), margin=0.3),
    *by_reduction(F.huber_loss, VALUES, delta=0.4),
    *by_reduction(F.kl_div, SHARES),
    *by_reduction(F.kl_div, SHARES.log(), log_target=True),
    *by_reduction(F.l1_loss, VALUES),
    *by_reduction(halves(F.margin_ranking_loss), SIGN[:3, None].expand(3, CLASSES), margin=0.1),
    *by_reduction(F.mse_loss, VALUES),
    *by_reduction(F.multi_margin_loss, CLASS.clamp_min(0)),
    *by_reduction(F.multi_margin_loss, CLASS.clamp_min(0), p=2, margin=0.7, weight=WEIGHTS),
    *by_reduction(F.multilabel_margin_loss, LABELS),
    *by_reduction(of_scores, LABELS),
    *by_reduction(F.multilabel_soft_margin_loss, (LABELS > 0).double(), weight=WEIGHTS),
    *by_reduction(F.nll_loss, CLASS, weight=WEIGHTS),
    *by_reduction(F.poisson_nll_loss, SHARES, full=True),
    *by_reduction(after(torch.exp, F.poisson_nll_loss), SHARES, log_input=False),
    *by_reduction(F.smooth_l1_loss, VALUES, beta=0.4),
    *by_reduction(F.soft_margin_loss, SIGN[:, None].expand(ROWS, CLASSES)),
    *by_reduction(thirds(F.triplet_margin_loss), p=1.0),
    *by_reduction(thirds(F.triplet_margin_loss), swap=True),
    *by_reduction(thirds(F.triplet_margin_with_distance_loss), swap=True),
]
if hasattr(F, "linear_cross_entropy"):
    CASES += by_reduction(linear_cross_entropy, CLASS)

REFUSED = {"gaussian_nll_loss"}  # it looks at values


@pytest.mark.slow
@pytest.mark.parametrize(("loss_fn", "targets"), CASES)
def test_a_traced_loss_is_that_of_autograd(loss_fn: Loss, targets: tuple[Tensor, ...]) -> None:
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model, x = nn.Linear(CLASSES, CLASSES), numbers(ROWS, CLASSES).double()
    expected = loss_fn(model(x), *targets)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    joint, signature = trace(model, loss_fn, (x,), {}, targets, device=torch.device("cpu"))
    values = dict(zip((spec.name for spec in signature.tensors), (x, *targets), strict=True))
    values |= {name: parameter.detach() for name, parameter in model.named_parameters()}
    values |= {**joint.constants, "loss": torch.ones((), dtype=torch.float64)}
    found = fx.GraphModule(nn.Module(), joint.graph)(*(values[port.name] for port in joint.inputs))
    results = {port.name: value for port, value in zip(joint.outputs, found, strict=True)}
    assert [port.role for port in joint.outputs].count(Role.GRADIENT) == 2
    torch.testing.assert_close(results["loss"], expected.detach(), rtol=1e-12, atol=0.0)
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(results[name], gradient, rtol=1e-12, atol=1e-14)


def test_the_losses_are_all_there() -> None:
    names = {name for name in dir(F) if name.endswith(("loss", "cross_entropy", "_logits", "kl_div"))}
    covered = {str(case.id).partition(" ")[0] for case in CASES} - {"of_scores"}
    assert covered | REFUSED == names


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output, target, torch.exp(output))


def test_losses_that_look_at_values() -> None:
    x = numbers(ROWS, CLASSES)
    with pytest.raises(TraceError, match="decides by a tensor's value"):
        trace(nn.Linear(CLASSES, CLASSES), gaussian, (x,), {}, (x,), device=torch.device("cpu"))
