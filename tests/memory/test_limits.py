"""Limits in bytes from the smallest feasible one to none, on stages that differ."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

import zbfx
from benchmarks.gpt import GPT, GPTConfig
from tests.support.live_bytes import measured_peaks
from tests.support.models import ROWS, Problem, ids, token_loss
from tests.support.reference import Gradients, assert_same, compiled, default_dtype, one_trace, reference, stepped

pytestmark = pytest.mark.slow

MICROBATCHES = 6
CUTS = ["blocks.2", "blocks.3", "blocks.4"]  # embeddings and two blocks; one; one; one and the head
SHARES = (0, 0.1, 0.3, 0.6, 1)  # of the way from the smallest limit to what the plan without a limit holds


@functools.cache
def problem() -> Problem:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        model = GPT(GPTConfig(layers=5, hidden=16, heads=2, sequence=8, vocabulary=24))
    tokens = ids(ROWS * MICROBATCHES, 9, vocabulary=24)
    return Problem(model, token_loss, (tokens[:, :-1],), (tokens[:, 1:],))


def planned(mem_limit: int | None) -> zbfx.Pipeline:
    return compiled(problem(), 4, MICROBATCHES, schedule="auto", cuts=CUTS, check=False, mem_limit=mem_limit)


def peak(pipe: zbfx.Pipeline) -> int:
    return max(memory.peak_bytes for memory in pipe.memory)


@dataclass(frozen=True)
class Sweep:
    """The plan without a limit, the smallest limit, and the plans under limits from there on."""

    free: zbfx.Pipeline
    smallest: int
    limited: dict[int, zbfx.Pipeline]


@functools.cache
@one_trace()
def sweep() -> Sweep:
    free = planned(None)
    with pytest.raises(zbfx.NoFeasibleSchedule) as caught:
        planned(1)
    smallest = int(caught.value.smallest_limit)
    limits = [round(smallest + share * (peak(free) - smallest)) for share in SHARES]
    return Sweep(free, smallest, {limit: planned(limit) for limit in limits})


def step(pipe: zbfx.Pipeline) -> tuple[torch.Tensor, Gradients]:
    loss, gradients = stepped(problem(), pipe)
    return loss, {name: None if gradient is None else gradient.clone() for name, gradient in gradients.items()}


def test_no_run_exceeds_its_limit_and_every_peak_is_predicted_to_the_byte() -> None:
    inputs, targets = problem().inputs, problem().targets
    for limit, pipe in sweep().limited.items():
        rows = pipe.compiled.signature.split((*inputs, *targets), {}, MICROBATCHES)
        counters = measured_peaks(pipe, rows)
        actual = [memory.static.total + c.peak for memory, c in zip(pipe.memory, counters, strict=True)]
        assert actual == [memory.peak_bytes for memory in pipe.memory]
        assert max(actual) <= limit


def test_time_never_rises_with_the_limit() -> None:
    times_s = [pipe.schedule.iteration_s for pipe in sweep().limited.values()]
    assert times_s == sorted(times_s, reverse=True)
    assert len(set(times_s)) >= 4
    assert times_s[-1] == sweep().free.schedule.iteration_s


def test_below_the_smallest_limit_an_error_names_it() -> None:
    smallest = sweep().smallest
    with pytest.raises(zbfx.NoFeasibleSchedule, match=f"smallest feasible limit is {smallest:,} bytes") as caught:
        planned(smallest - 1)
    assert caught.value.smallest_limit == smallest


def test_under_every_limit_the_gradients_have_the_same_bits() -> None:
    expected = step(sweep().free)
    assert_same(expected, reference(problem(), MICROBATCHES), tolerance=1e-12)
    for pipe in sweep().limited.values():
        assert_same(step(pipe), expected, tolerance=0)
    assert peak(sweep().limited[sweep().smallest]) == sweep().smallest
