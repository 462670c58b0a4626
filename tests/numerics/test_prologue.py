"""Weights that are cast once a step: the bits of a cast in every phase, never those of an earlier step's weights."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.processes import precision_worker
from tests.support.live_bytes import measured_peaks
from tests.support.models import Problem, llama, mean_squares, mlp, numbers
from tests.support.optimizers import adamw, same_bits, train
from tests.support.pool import Launch
from tests.support.reference import assert_same, compiled, one_trace, reference, rescheduled, stepped
from zbfx.errors import ZbfxError
from zbfx.plan import Kind
from zbfx.program.calls import PhaseCall

M = 4


def under_autocast(problem: Problem, stages: int = 2, microbatches: int = M, **options: Any) -> zbfx.Pipeline:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return compiled(problem, stages, microbatches, **{"check": False, **options})


def plain(problem: Problem, model: nn.Module | None = None) -> tuple[Tensor, Mapping[str, Tensor | None]]:
    """What autocast itself gives, whose own cache of casts is left out: it keeps them as long as the context."""
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return reference(problem, M, model)


@functools.cache
def masters() -> tuple[Problem, zbfx.Pipeline, zbfx.Pipeline, Mapping[str, Tensor]]:
    """A model in float32, its pipelines with prologues and without, and its first weights."""
    problem = mlp(M)
    with one_trace():
        made = [under_autocast(problem, prologue=on) for on in (True, False)]
    assert [pipe.compiled.has_prologues for pipe in made] == [True, False]
    return problem, *made, copy.deepcopy(problem.model.state_dict())  # type: ignore[return-value]


def first_weights() -> tuple[Problem, zbfx.Pipeline, zbfx.Pipeline]:
    problem, pipe, without, first = masters()
    problem.model.load_state_dict(first)
    problem.model.zero_grad()
    return problem, pipe, without


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_schedules_give_the_bits_of_autocast(schedule: str) -> None:
    problem, pipe, without = first_weights()
    expected = plain(problem)
    assert_same(stepped(problem, rescheduled(pipe, M, schedule)), expected, 0)
    assert_same(stepped(problem, rescheduled(without, M, schedule)), expected, 0)


@pytest.mark.parametrize("schedule", ["zb-v-order", "v-half", "interleaved-1f1b"])
def test_several_stages_a_rank_have_prologues_of_their_own(schedule: str) -> None:
    problem = mlp(M)
    pipe = under_autocast(problem, schedule=schedule)
    assert all(program.code.count("self.P") == 2 for program in pipe.programs)
    assert_same(stepped(problem, pipe), plain(problem), 0)


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_levels_of_recomputation_read_what_is_kept(level: str) -> None:
    problem = mlp(M)
    pipe = under_autocast(problem, recompute=level)
    casts = [
        node
        for stage in pipe.stages
        for node in stage.phases[Kind.P].module.graph.find_nodes(
            op="call_function", target=torch.ops.aten._to_copy.default
        )
    ]
    assert len(casts) == 12
    assert_same(stepped(problem, pipe), plain(problem), 0)


def test_writes_between_steps_are_seen_by_the_next_and_by_evaluation() -> None:
    problem, pipe, _ = first_weights()
    step = pipe.run_local(on_new_shape="recompile")
    more = replace(problem, inputs=(numbers(8 * M, 8),), targets=(numbers(8 * M, 8, seed=2),))
    for factor in (1.0, 3.0, 0.5):
        with torch.no_grad():
            for parameter in problem.model.parameters():
                parameter.mul_(factor)
        for given in (problem, more):
            problem.model.zero_grad()
            loss = step(*given.inputs, *given.targets)
            found = {name: parameter.grad for name, parameter in problem.model.named_parameters()}
            assert_same((loss, found), plain(given), 0)
        assert torch.equal(step.evaluate(*problem.inputs, *problem.targets), plain(problem)[0])
    step.evaluate(*problem.inputs, *problem.targets)
    with torch.no_grad():
        problem.model.get_parameter("0.weight").zero_()
    assert torch.equal(step.evaluate(*problem.inputs, *problem.targets), plain(problem)[0])


def test_weights_that_are_loaded_are_the_next_steps(tmp_path: Path) -> None:
    problem, pipe, _ = first_weights()
    step = pipe.run_local()
    optimizer = torch.optim.SGD(step.parameters(), lr=0.5)
    first = step(*problem.inputs, *problem.targets)
    step.save(tmp_path, optimizer=optimizer)
    optimizer.step()
    assert not torch.equal(step(*problem.inputs, *problem.targets), first)
    step.load(tmp_path, optimizer=optimizer)
    assert torch.equal(step(*problem.inputs, *problem.targets), first)
    other = {name: 2 * value for name, value in problem.model.state_dict().items()}
    step = pipe.run_local(weights=other)
    assert torch.equal(step(*problem.inputs, *problem.targets), plain(problem)[0])
    assert not torch.equal(plain(problem)[0], first)


def test_rollbacks_begin_with_prologues() -> None:
    """Steps that were taken early and wrong: the forwards run again, on casts of the corrected weights. Torch's own
    steps have these losses, too."""
    results = {}
    for sync in (True, False):
        problem, pipe, _ = first_weights()
        results[sync] = train(problem, pipe.run_local(), 8, max_norm=0.05, sync=sync)
    assert results[False].counts["repeated"] > 4
    assert same_bits(results[False], results[True])
    problem, _, _ = first_weights()
    plainly, losses = adamw(problem.model.parameters()), []
    for count in range(8):
        inputs, targets = (tuple(t.roll(count, 0) for t in group) for group in (problem.inputs, problem.targets))
        losses.append(float(plain(replace(problem, inputs=inputs, targets=targets), problem.model)[0]))
        nn.utils.clip_grad_norm_(problem.model.parameters(), 0.05)
        plainly.step()
        plainly.zero_grad()
    assert results[False].losses == pytest.approx(losses, rel=2e-3)
    assert min(abs(a - b) for a, b in pairwise(losses)) > 4e-3 * losses[0], "weights move"


def test_replicas_collect_their_shards_before(launch: Launch) -> None:
    """With ZeRO-1 a prologue casts what the replicas have stepped, in training and in evaluation."""
    for found in launch(4, precision_worker.replicas_of_masters).values():
        for zero, (losses, evaluated, expected) in found.items():
            assert losses == pytest.approx(expected[:-1], rel=1e-3), zero
            assert evaluated == pytest.approx(expected[1:], rel=1e-3), zero
            assert min(abs(a - b) for a, b in pairwise(expected)) > 1e-2, "weights move"


def test_memory_of_what_is_kept_is_predicted_to_the_byte() -> None:
    problem, pipe, without = first_weights()
    rows = pipe.compiled.signature.split((*problem.inputs, *problem.targets), {}, M)
    for one in (pipe, without):
        counters = measured_peaks(one, rows)
        assert [memory.highest.peak_bytes for memory in one.memory] == [counter.peak for counter in counters]
    for stage, other in zip(pipe.stages, without.stages, strict=True):
        costs = (one.schedule.costs.stages[stage.index] for one in (pipe, without))
        held, before = (cost.static_bytes for cost in costs)
        assert held == before + stage.kept_bytes
        assert stage.kept_bytes > 0 == other.kept_bytes
    kept = [size for memory in pipe.memory for what, size in memory.live if what.startswith("from P")]
    assert kept == [stage.kept_bytes for stage in pipe.stages]


@pytest.mark.slow
@one_trace()
def test_a_limit_without_room_for_them_goes_without_prologues() -> None:
    problem, _, _ = first_weights()
    least = max(memory.peak_bytes for memory in under_autocast(problem, schedule="auto", prologue=False).memory)
    roomy = under_autocast(problem, schedule="auto", mem_limit=4 * least)
    assert roomy.compiled.has_prologues
    for limit in range(least, 0, -512):
        try:
            pipe = under_autocast(problem, schedule="auto", mem_limit=limit)
        except ZbfxError:
            break
        assert max(memory.peak_bytes for memory in pipe.memory) <= limit
    assert not pipe.compiled.has_prologues
    assert any("without prologues" in note for note in pipe.schedule.notes)
    assert_same(stepped(problem, pipe), plain(problem), 0)


def test_plans_profiles_and_traces_show_prologues(tmp_path: Path) -> None:
    problem, pipe, without = first_weights()
    schedule = pipe.schedule
    longest = max(range(2), key=lambda r: schedule.spans[r][-1].end_s - schedule.spans[r][0].start_s)
    assert schedule.planned_s >= schedule.iteration_s + schedule.costs.prologue_s(longest) > schedule.iteration_s
    assert all(spans[0].start_s >= schedule.costs.prologue_s(rank) for rank, spans in enumerate(schedule.spans))
    assert without.schedule.planned_s == without.schedule.iteration_s
    step = pipe.run_local()
    profile = step.profile(*problem.inputs, *problem.targets)
    assert [[s.action for s in spans if s.action.kind is Kind.P] for spans in profile.spans] == [
        [spans[0].action] for spans in profile.spans
    ]
    profile.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["name"].startswith("P")] == [
        (0, "P0.0"),
        (0, "P1.0"),
        (1, "P0.0"),
        (1, "P1.0"),
    ]
    assert profile.svg().count("<title>P0.0") == 2
    pipe.report(tmp_path / "page.html", profile=profile)
    assert str(schedule)


def test_check_runs_prologues_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two steps differ in their weights: it finds casts that are kept from the first one."""
    _, pipe, _ = first_weights()
    assert zbfx.check(pipe)
    take, first = PhaseCall.take, dict[PhaseCall, Any]()

    def stale(call: PhaseCall, box: list[Any]) -> Any:
        if call.phase.kind is not Kind.P:
            return take(call, box)
        if call not in first:
            first[call] = take(call, box)
        return first[call]

    monkeypatch.setattr(PhaseCall, "take", stale)
    assert not zbfx.check(pipe)


class Tied(nn.Module):
    """One weight before and behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.inner(self.first(x))), self.first.weight)


def test_a_tied_weight_is_cast_by_both_of_its_stages() -> None:
    problem = Problem(Tied(), mean_squares, (numbers(2 * M, 8),), (numbers(2 * M, 8, seed=2),))
    pipe = under_autocast(problem, cuts=["inner"])
    assert [len(stage.kept) for stage in pipe.stages] == [2, 3]
    loss, found = stepped(problem, pipe)
    expected = plain(problem)
    assert torch.equal(loss, expected[0])
    tolerance = 1e-2  # its terms are added unrounded
    assert_same((loss, found), expected, tolerance)


@pytest.mark.slow
def test_a_llama_casts_each_weight_once() -> None:
    problem = llama(2)
    with one_trace():
        pipe, without = (under_autocast(problem, microbatches=2, prologue=on) for on in (True, False))
    assert_same(stepped(problem, pipe), stepped(problem, without), 0)
