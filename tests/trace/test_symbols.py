"""Sizes that are symbols: one trace for many shapes, the same graphs and costs as a trace of each,
or a named reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import Problem, gpt, numbers, squares
from tests.support.reference import assert_same, compiled, default_dtype, gradients, reference
from zbfx import variants
from zbfx.costs import estimate
from zbfx.errors import ZbfxError
from zbfx.graphs import Phase
from zbfx.optim import PostValidated
from zbfx.passes import partition
from zbfx.runtime.step import Step
from zbfx.trace.symbols import Numbers
from zbfx.trace.tracer import trace

WIDTH = 8


class Attention(nn.Module):
    """A causal attention with positions and dropout: its masks, views and scales depend on the sequence's length."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.Embedding(32, WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = x + self.positions(torch.arange(length))
        q, k, v = self.into(h).view(rows, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length).tril() == 0
        weights = (q @ k.transpose(2, 3) / length**0.5).masked_fill(mask, -1e9).softmax(3)
        mixed = (F.dropout(weights, self.dropout, self.training) @ v).transpose(1, 2).reshape(rows, length, WIDTH)
        return h + self.out(mixed)


def attention(length: int, rows: int = 6, dropout: float = 0.0) -> Problem:
    model = nn.Sequential(Attention(dropout), nn.Tanh(), Attention(dropout))
    return Problem(model, squares, (numbers(rows, length, WIDTH, seed=length),))


def batch(problem: Problem, *shape: int) -> Problem:
    return replace(problem, inputs=(numbers(*shape, seed=sum(shape)),))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each trace of a further shape had symbols."""
    seen: list[bool] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["sizes"] is not None)
        return trace(*args, **kwargs)

    monkeypatch.setattr(variants, "trace", counted)
    return seen


def structure(phase: Phase) -> list[Any]:
    """Targets, arguments and shapes of a phase's nodes, which are numbered."""
    index = {node: k for k, node in enumerate(phase.module.graph.nodes)}

    def shape(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [shape(entry) for entry in value]
        return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value

    return [
        (
            node.op if node.op == "placeholder" else str(node.target),
            str(fx.map_arg((node.args, node.kwargs), lambda source: f"%{index[source]}")),
            shape(node.meta.get("val")),
        )
        for node in index
    ]


def symbolic_step(problem: Problem, **options: Any) -> Step:
    return compiled(problem, 2, 3, **options).run_local(on_new_shape="symbolic", seed=5)


def stepped(step: Step, problem: Problem) -> tuple[Tensor, Any]:
    problem.model.zero_grad()
    return step(*problem.inputs, *problem.targets, **problem.kwargs), gradients(problem.model)


@pytest.mark.slow
@default_dtype(torch.float64)
def test_one_trace_serves_every_shape(traces: list[bool]) -> None:
    problem = attention(5)
    step = symbolic_step(problem)
    for rows, length in ((9, 7), (12, 4), (6, 12), (9, 7), (6, 5)):
        other = batch(problem, rows, length, WIDTH)
        assert_same(stepped(step, other), reference(other, 3), 1e-12)
    assert traces == [True]
    assert len(step.pipelines) == 4
    assert all(pipe.schedule.notes == () for pipe in step.pipelines)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda m: attention(5), gpt], ids=["attention", "gpt"])
def test_graphs_and_costs_are_those_of_a_trace_of_their_own(make: Callable[[int], Problem]) -> None:
    problem = make(3)
    pipe = compiled(problem, 2, 3)
    steps = {option: pipe.run_local(on_new_shape=option) for option in ("symbolic", "recompile")}
    growing = [torch.cat([tensor] * 2)[:, :4] for tensor in (*problem.inputs, *problem.targets)]
    keywords = {name: torch.cat([tensor] * 2)[:, :4] for name, tensor in problem.kwargs.items()}
    found, expected = (
        steps[option].worker.engines.engine_for(growing, keywords, 3, steps[option].worker.engines.requests[0]).pipe
        for option in steps
    )
    for one, other in zip(found.stages, expected.stages, strict=True):
        for kind, phase in other.phases.items():
            assert structure(one.phases[kind]) == structure(phase)
            assert one.phases[kind].is_random == phase.is_random
    assert found.schedule.ranks == expected.schedule.ranks
    for one_cost, other_cost in zip(found.schedule.costs.stages, expected.schedule.costs.stages, strict=True):
        for field in ("forward_s", "backward_input_s", "backward_weight_s"):
            assert getattr(one_cost, field) == pytest.approx(getattr(other_cost, field), rel=1e-12)
        for field in ("saved_bytes", "weight_saved_bytes", "static_bytes"):
            assert getattr(one_cost, field) == getattr(other_cost, field)
    assert [e.forward_s for e in found.schedule.costs.edges] == pytest.approx(
        [e.forward_s for e in expected.schedule.costs.edges], rel=1e-12
    )


@default_dtype(torch.float64)
def test_formulas_by_hand() -> None:
    """Linear, tanh | linear, in rows r and length n, 8 wide, 8 bytes a number, on 2e9 bytes/s and 1e-4 s of link."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    problem = Problem(model, squares, (numbers(6, 5, WIDTH),))
    step = symbolic_step(problem, cuts=["2"])
    step(numbers(9, 7, WIDTH))
    variants: Any = step.worker.engines.variants
    (template,) = variants.templates[step.worker.engines.requests[0]]
    r, n = template.sizes.symbols
    hidden = 8 * 8 * r * n
    first, second = template.formulas.stages
    assert first["weight_saved_bytes"] == hidden  # the gradient behind the tanh; the microbatch is the caller's
    assert first["static_bytes"] == 2 * 8 * (64 + 8)
    assert second["static_bytes"] == 2 * 8 * 64
    (edge,) = template.formulas.edges
    for rows, length in ((2, 3), (7, 11)):
        values = {r: rows, n: length}
        assert edge[2].xreplace(values) == pytest.approx(1e-4 + 64 * rows * length / 2e9, rel=1e-12)
        matmul_s = max(2 * rows * length * 64 / 5e10, (128 * rows * length + 8 * 72) / 1e10)
        tanh_s = 128 * rows * length / 1e10
        assert first["forward_s"].xreplace(values) == pytest.approx(matmul_s + tanh_s + 4e-6, rel=1e-9)
        table = template.formulas.at(values)
        assert table.stages[0].weight_saved_bytes == 64 * rows * length
        assert isinstance(table.stages[0].weight_saved_bytes, int)
        assert table.placement == (0, 1)
    stages = template.at({r: 2, n: 3})[1]
    assert (
        estimate.estimate(stages, (0, 1), estimate.CPU).stages[1].weight_saved_bytes
        == template.formulas.at({r: 2, n: 3}).stages[1].weight_saved_bytes
    )


@pytest.mark.slow
def test_random_numbers_are_those_of_a_trace_of_their_own() -> None:
    problem = attention(5, dropout=0.5)
    losses = []
    for option in ("symbolic", "recompile"):
        step = compiled(problem, 2, 3).run_local(on_new_shape=option, seed=7)
        losses.append(stepped(step, batch(problem, 9, 7, WIDTH)))
    assert_same(losses[0], losses[1], 0)


class Chooses(nn.Module):
    """Long sequences take another way; a width is folded by a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return self.last(h.cumsum(1) if x.shape[1] > 6 else h)


class Counts(Chooses):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(x)) * sum(range(x.shape[1])))


@default_dtype(torch.float64)
def test_broken_guard_is_named_and_the_shape_compiled(traces: list[bool]) -> None:
    problem = Problem(Chooses(), squares, (numbers(6, 5, WIDTH),))
    step = symbolic_step(problem)
    for length in (8, 10, 4):
        other = batch(problem, 6, length, WIDTH)
        assert_same(stepped(step, other), reference(other, 3), 1e-12)
    assert traces == [True, False]
    (note,) = step.pipelines[-1].schedule.notes
    assert "traced for these shapes" in note
    assert "inputs[0].shape[1]" in note
    assert "found inputs[0].shape[1] = 4" in note


@default_dtype(torch.float64)
def test_size_that_the_code_fixes_is_named_and_not_tried_again(traces: list[bool]) -> None:
    problem = Problem(Counts(), squares, (numbers(6, 5, WIDTH),))
    step = symbolic_step(problem)
    for length in (8, 7, 4):
        other = batch(problem, 6, length, WIDTH)
        assert_same(stepped(step, other), reference(other, 3), 1e-12)
    assert traces == [True, False, False]
    assert [len(pipe.schedule.notes) for pipe in step.pipelines] == [0, 0, 1, 1]
    assert "inputs[0].shape[1]" in step.pipelines[2].schedule.notes[0]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(x))).sum(1) + y.sum(1)


@default_dtype(torch.float64)
def test_sizes_that_the_tracer_fixes_and_sizes_that_part(traces: list[bool]) -> None:
    """One row; and two inputs that changed alike at first, but not later, which is traced with two symbols."""

    problem = Problem(Two(), squares, (numbers(6, 5, WIDTH), numbers(6, 5, WIDTH, seed=2)))
    step = symbolic_step(problem)
    lengths = ((6, 7, 7), (6, 9, 8), (6, 4, 7), (6, 8, 8), (3, 5, 5))
    for rows, one, other in lengths:
        new = replace(problem, inputs=(numbers(rows, one, WIDTH), numbers(rows, other, WIDTH)))
        assert_same(stepped(step, new), reference(new, 3), 1e-12)
    assert traces == [True, True, False]
    notes = [pipe.schedule.notes for pipe in step.pipelines[1:]]
    assert notes[:-1] == [()] * 4
    assert "0 or 1" in notes[-1][0]


@pytest.mark.slow
@default_dtype(torch.float64)
def test_evaluation_and_counted_losses(traces: list[bool]) -> None:
    def token_sum(output: Tensor, targets: Tensor) -> Any:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()

    problem = attention(5, dropout=0.5)
    problem = replace(problem, loss_fn=token_sum, targets=(torch.randint(WIDTH, (6, 5)),))
    step = symbolic_step(problem)
    problem.model.eval()
    for rows, length in ((9, 7), (12, 6)):
        x, labels = numbers(rows, length, WIDTH), torch.randint(WIDTH, (rows, length))
        labels[:, 0] = -100
        total, count = token_sum(problem.model(x), labels)
        torch.testing.assert_close(step.evaluate(x, labels), total.detach() / count, rtol=1e-12, atol=0)
    assert traces == [True]


class Checkpointed(nn.Module):
    """Gated blocks, computed again in the backward, with keys that the next block shares and a skip to the end. Long
    sequences may take another way."""

    def __init__(self, limit: int = 99) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.limit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5), limit
        names = ("query", "key", "out")
        self.blocks = nn.ModuleList(nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH) for n in names}) for _ in range(4))

    def block(self, parts: Any, x: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        key = parts["key"](x) if shared is None else parts["key"](x) * shared
        mixed = torch.tanh(parts["query"](x) * key)
        return x + parts["out"](mixed.cumsum(1) if x.shape[1] > self.limit else mixed), key

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.first(x)
        shared = None
        for parts in self.blocks:
            h, shared = checkpoint(self.block, parts, h, shared, use_reentrant=False)
        return self.last(h * first)


CUTS: dict[str, list[str] | None] = {
    "2 found": None,
    "3 found": None,
    "2 between": ["blocks.2"],
    "3 within": ["blocks.1.query", "blocks.2.out"],
}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["recompile", "symbolic"])
@pytest.mark.parametrize("cuts", CUTS)
@default_dtype(torch.float64)
def test_checkpointed_blocks_are_cut_alike_for_every_shape(cuts: str, option: str, traces: list[bool]) -> None:
    problem, stages = Problem(Checkpointed(), squares, (numbers(6, 5, WIDTH),)), int(cuts[0])
    pipe = compiled(problem, stages, 3, cuts=CUTS[cuts])
    step = pipe.run_local(on_new_shape=option)
    for rows, length in ((6, 5), (9, 5), (12, 7)):
        other = batch(problem, rows, length, WIDTH)
        assert_same(stepped(step, other), reference(other, 3), 1e-12)
    assert traces == [option == "symbolic"] * 2  # the rows alone changed at first
    for found in step.pipelines:
        assert [stage.start for stage in found.stages] == [stage.start for stage in pipe.stages]
        for stage, first in zip(found.stages, pipe.stages, strict=True):
            for kind, phase in stage.phases.items():
                assert operations(phase) == operations(first.phases[kind])
        assert found.shared_gradients == ()


def operations(phase: Phase) -> list[str]:
    return [str(node.target) for node in phase.module.graph.nodes if node.op == "call_function"]


@pytest.mark.slow
@pytest.mark.parametrize("cuts", CUTS)
@default_dtype(torch.float64)
def test_checkpointed_blocks_with_other_operations_stay_with_their_parameters(cuts: str) -> None:
    problem, stages = Problem(Checkpointed(limit=5), squares, (numbers(6, 5, WIDTH),)), int(cuts[0])
    step = compiled(problem, stages, 3, cuts=CUTS[cuts]).run_local(on_new_shape="recompile")
    other = batch(problem, 9, 7, WIDTH)
    assert_same(stepped(step, other), reference(other, 3), 1e-12)
    assert step.pipelines[1].shared_gradients == ()
    x = other.inputs[0]
    torch.testing.assert_close(step.evaluate(x), squares(problem.model(x)).detach(), rtol=1e-12, atol=0)


class WithoutParameters(nn.Module):
    """A last stage that owns nothing, and runs other operations on a single row."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[0] > 1 else torch.sigmoid(x)


@default_dtype(torch.float64)
def test_the_loss_arises_where_it_did_for_every_shape() -> None:
    """Where an optimizer step without a barrier expects it, although no parameter says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), WithoutParameters())
    problem = Problem(model, squares, (numbers(6, WIDTH),))
    step = compiled(problem, 2, 3, cuts=["1"]).run_local(on_new_shape="recompile")
    optimizer = PostValidated(torch.optim.SGD(step.parameters(), lr=0.1), step, max_norm=0.1)
    for rows in (6, 3, 6):
        other = batch(problem, rows, WIDTH)
        expected = reference(other, 3)
        assert_same(stepped(step, other), expected, 1e-12)
        optimizer.step()
        optimizer.settle()
    assert [pipe.loss_rank for pipe in step.pipelines] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["recompile", "symbolic"])
def test_stages_that_would_wait_for_each_other_are_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the first stage alone recomputed what the cut divides: its backward is the last to run."""
    problem = Problem(Checkpointed(), squares, (numbers(6, 5, WIDTH),))
    step = compiled(problem, 2, 3, cuts=["blocks.2.query"]).run_local(on_new_shape=option)
    refusal = r"stage 1: expected values that come to it; found \w+ of stage 0, at .*test_symbols.py:\d+ in blocks.2"
    with monkeypatch.context() as patched:
        patched.setattr(partition, "recompute_within_stages", lambda joint, line, stage_of: (joint, line))
        with pytest.raises(ZbfxError, match=refusal):
            step(numbers(9, 7, WIDTH))
    assert_same(stepped(step, problem), reference(problem, 3), 1e-5)  # the step goes on


def test_numbers_replace_symbols_in_nests() -> None:
    r = sympy.Symbol("r", integer=True, positive=True)
    values = Numbers({r: 3})
    plain = torch.ones(2)
    assert values(plain) is plain
    assert values([None, "r", (r + 1, 2.5)]) == [None, "r", (4, 2.5)]
