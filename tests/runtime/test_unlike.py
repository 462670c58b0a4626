"""Steps whose microbatches have other shapes and another number than was compiled for: losses and gradients are those
of plain autograd, in one process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbfx
from tests.support.models import numbers
from tests.support.reference import default_dtype
from zbfx.compiled import Mixed
from zbfx.errors import InputError
from zbfx.plan import CostTable, StageCost
from zbfx.runtime.mixing import most_by_rank
from zbfx.runtime.step import Step
from zbfx.trace.wanted import TRAINING, Request

pytestmark = pytest.mark.usefixtures("known_traces")

WIDTH, LENGTH, STAGES, M = 4, 5, 3, 3
Rows = list[tuple[tuple[Tensor, Tensor], dict[str, Any]]]


class Mixer(nn.Module):
    """Attention whose scale and mask depend on the length, and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.into, self.out, self.dropout = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, v = self.into(x).chunk(2, -1)
        mask = torch.ones(x.shape[1], x.shape[1]).tril() == 0
        weights = (q @ q.transpose(1, 2) / x.shape[1] ** 0.5).masked_fill(mask, -1e9).softmax(-1)
        return x + F.dropout(self.out(weights @ v), self.dropout, self.training)


def model_of(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mixer(dropout) for _ in range(STAGES)))


def by_tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    known = targets[..., 0] > 0
    return ((output - targets).square().sum(-1) * known).sum(), known.sum()


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def rows_of(lengths: Sequence[int], seed: int = 3) -> Rows:
    drawn = enumerate(lengths)
    return [
        ((numbers(2, length, WIDTH, seed=seed + k), numbers(2, length, WIDTH, seed=99 + k)), {}) for k, length in drawn
    ]


def pipeline(model: nn.Module, loss_fn: Any, stages: int = STAGES, **options: Any) -> zbfx.Pipeline:
    ((x, y), _) = rows_of([LENGTH])[0]
    return zbfx.compile(
        model,
        stages=stages,
        microbatches=M,
        example_inputs=(x,),
        example_targets=(y,),
        loss_fn=loss_fn,
        check=False,
        **{"schedule": "zb-h1", **options},
    )


def expected(model: nn.Module, loss_fn: Any, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    found = [loss_fn(plain(x), y) for (x, y), _ in rows]
    if isinstance(found[0], tuple):
        loss = sum(total for total, _ in found) / sum(count for _, count in found)
    else:
        loss = torch.stack(found).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def assert_equal(step: Step, model: nn.Module, loss_fn: Any, rows: Rows) -> None:
    model.zero_grad()
    loss, gradients = expected(model, loss_fn, rows)
    torch.testing.assert_close(step.run_split(rows), loss, rtol=0, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("on_new_shape", ["symbolic", "recompile"])
@pytest.mark.parametrize("loss_fn", [by_tokens, mean])
@default_dtype(torch.float64)
def test_any_lengths_and_any_number(on_new_shape: str, loss_fn: Any) -> None:
    model = model_of()
    step = pipeline(model, loss_fn).run_local(on_new_shape=on_new_shape)
    for lengths in ([7, 2, 5, 9], [3], [5, 5, 5], [5, 5], [9, 2, 2, 7, 5, 9, 3]):
        assert_equal(step, model, loss_fn, rows_of(lengths))
    mixing = step.worker.engines.mixing
    assert mixing.forms.misses == 5  # of five lengths
    assert mixing.engines.misses == 4  # those of the example's shape and number run as they were compiled
    assert_equal(step, model, loss_fn, rows_of([7, 2, 5, 9], seed=50))
    assert (mixing.engines.hits, mixing.engines.misses) == (1, 4)
    rows = rows_of([4, 6])
    torch.testing.assert_close(step.evaluate_split(rows), expected(model, loss_fn, rows)[0], rtol=0, atol=1e-10)


@pytest.mark.slow
@default_dtype(torch.float64)
def test_losses_and_random_numbers_follow_the_order_of_the_batch_and_not_of_the_plan() -> None:
    model = model_of(dropout=0.5)
    rows = rows_of([9, 2, 7, 3])
    whole = pipeline(model, by_tokens).run_local(on_new_shape="symbolic", seed=1)
    one = pipeline(model, by_tokens, stages=1).run_local(on_new_shape="symbolic", seed=1)
    for step in (whole, one):
        model.zero_grad()
        step.run_split(rows)
    (mixed,) = (pipe for pipe in whole.pipelines if isinstance(pipe, Mixed))
    assert sorted(mixed.order) != list(mixed.order)
    assert len(whole.losses) == 4
    torch.testing.assert_close(torch.stack(whole.losses), torch.stack(one.losses), rtol=0, atol=1e-10)


@default_dtype(torch.float64)
def test_buffers_are_written_in_the_order_of_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    rows: Rows = [((numbers(n, WIDTH, seed=n), numbers(n, WIDTH, seed=n + 1)), {}) for n in (9, 2, 7, 4)]
    ((x, y), _) = rows[1]
    options: dict[str, Any] = {"example_inputs": (x,), "example_targets": (y,), "loss_fn": mean, "check": False}
    step = zbfx.compile(model, stages=2, microbatches=2, **options).run_local(on_new_shape="recompile")
    step.run_split(rows)
    for (x, _), _ in rows:
        plain(x)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_limit_is_kept_by_every_order() -> None:
    """A wide one lets several microbatches in flight, a narrow one fewer; below one microbatch a step is refused."""
    model = model_of()
    lengths = [30, 8, 20, 25, 12, 30]
    limit = max(memory.peak_bytes for memory in pipeline(model, mean).memory) + 30_000
    step = pipeline(model, mean, mem_limit=limit, recompute="none").run_local(on_new_shape="symbolic")
    loss = step.run_split(rows_of(lengths))
    torch.testing.assert_close(loss, expected(model, mean, rows_of(lengths))[0], rtol=1e-5, atol=1e-6)
    engine = list(step.worker.engines.mixing.engines.kept.values())[-1]
    assert max(engine.held_bytes.values()) <= limit
    assert engine.held_bytes == {memory.rank: memory.peak_bytes for memory in engine.pipe.memory}
    with pytest.raises(InputError, match="no order of these microbatches stays within mem_limit"):
        step.run_split(rows_of([400]))
    step.run_split(rows_of(lengths))


def test_a_multiple_counts_the_microbatches_of_the_step() -> None:
    """What 1F1B would hold of these, not of the example's: else long ones run one after the other."""
    model, lengths = model_of(), [30, 28, 31, 27, 30, 29]
    plans, held = [], []
    for limit in (None, "2x", "1x"):
        step = pipeline(model, mean, mem_limit=limit, recompute="none", schedule="1f1b").run_local(
            on_new_shape="symbolic"
        )
        step.run_split(rows_of(lengths))
        (mixed,) = (pipe for pipe in step.pipelines if isinstance(pipe, Mixed))
        plans.append(mixed.schedule)
        held.append([memory.peak_bytes for memory in mixed.memory])
    saved = sorted(max(float(stage.saved_bytes) for stage in mixed.members[of].costs.stages) for of in mixed.of)
    static = [float(stage.static_bytes) for stage in plans[0].costs.stages]
    for multiple, schedule in ((2.0, plans[1]), (1.0, plans[2])):
        allowed = multiple * sum(saved[-STAGES:])
        assert max(peak - own for peak, own in zip(schedule.peak_bytes, static, strict=True)) <= allowed * (1 + 1e-9)
    assert plans[1].iteration_s < 1.01 * plans[0].iteration_s
    assert plans[2].iteration_s < 1.5 * plans[0].iteration_s
    assert sum(held[2]) < sum(held[1]) <= sum(held[0])


def test_a_step_that_was_planned_ahead_is_found() -> None:
    model = model_of()
    step = pipeline(model, mean).run_local(on_new_shape="symbolic")
    step.plan_split(rows_of([9, 2, 7], seed=5))
    engines = step.worker.engines.mixing.engines
    assert (engines.hits, engines.misses, step.count) == (0, 1, 0)
    loss = step.run_split(rows_of([9, 2, 7]))
    assert (engines.hits, engines.misses) == (1, 1)
    torch.testing.assert_close(loss, expected(model, mean, rows_of([9, 2, 7]))[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="found an empty list"):
        step.plan_split([])


def test_what_is_refused() -> None:
    step = pipeline(model_of(), mean).run_local(on_new_shape="symbolic")
    ((x, y), _) = rows_of([4])[0]
    cases: Any = (
        ([], "found an empty list"),
        ([((x.long(), y), {})], "expected dtype torch.float32 as in the example microbatch, found torch.int64"),
        ([((x * torch.ones((), requires_grad=True), y), {})], "to which no gradient would flow"),
        ([((x.requires_grad_(), y), {})], "requires a gradient"),
    )
    for rows, found in cases:
        with pytest.raises(InputError, match=found):
            step.run_split(rows)
    assert step.count == 0


@pytest.mark.slow
def test_a_kept_step_keeps_its_forms() -> None:
    """Else a form of another shape might get the identity of one that is gone."""
    mixing = pipeline(model_of(), mean).run_local(on_new_shape="symbolic").worker.engines.mixing
    call, request = rows_of([7])[0], Request(TRAINING, mixing.pipe.signature)
    mixing.batch([call], request)
    form = weakref.ref(next(iter(mixing.forms.kept.values())))
    mixing.forms.kept.clear()
    gc.collect()
    assert form() is not None
    mixing.engines.kept.clear()
    gc.collect()
    assert form() is None


def test_of_several_replicas_the_largest_excess_counts() -> None:
    assert most_by_rank([{0: 5.0, 1: -1.0}, {0: 2.0, 1: -3.0}, {}]) == {0: 5.0}


@pytest.mark.slow
def test_given_costs_scale_those_of_other_shapes() -> None:
    """F=2, B=3, W=5 for the example's length; twice the length costs more, in the same unit."""
    costs = CostTable.chain([StageCost(2, 3, 5, saved_bytes=7)] * STAGES, comm_s=7)
    step = pipeline(model_of(), mean, costs=costs, schedule="1f1b").run_local(on_new_shape="symbolic")
    step.run_split(rows_of([LENGTH, 2 * LENGTH]))
    served = list(step.worker.engines.mixing.forms.kept.values())
    first, other = (one.form.costs.stages[1] for one in served)
    assert (first.forward_s, first.backward_input_s, first.backward_weight_s) == (2, 3, 5)
    for name, base in (("forward_s", 2), ("backward_input_s", 3), ("backward_weight_s", 5)):
        assert base < getattr(other, name) < 4 * base
