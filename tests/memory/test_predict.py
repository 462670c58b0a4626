"""What ranks hold: predicted to the byte, freed at the last use, drawn and printed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import zbfx
from tests.support.live_bytes import LiveBytes, measured_peaks
from tests.support.models import (
    Maker,
    bert,
    gpt,
    gpt2,
    mlp,
    unet_batch_norm,
    unet_group_norm,
    vit,
)
from tests.support.reference import beside, rescheduled, shared, shared_problem, with_other
from zbfx.costs import measure
from zbfx.costs.made_up import argument_makers, made_up
from zbfx.costs.measure import with_call_bytes
from zbfx.graphs import CallBytes
from zbfx.memory.walk import Moment
from zbfx.plan import Kind
from zbfx.program.boxed import Compiler, boxed

MICROBATCHES = 5
LINEAR = ("gpipe", "1f1b", "zb-h1", "zb-h2")
PLACED = ("interleaved-1f1b", "zb-v-order")


def pipeline(make: Maker, schedule: str) -> zbfx.Pipeline:
    return shared(make, 4 if schedule in LINEAR else 2, MICROBATCHES, schedule=schedule)


def rows_of(make: Maker, pipe: zbfx.Pipeline) -> list[list[torch.Tensor]]:
    problem = shared_problem(make, MICROBATCHES, torch.float32)
    return pipe.compiled.signature.split((*problem.inputs, *problem.targets), problem.kwargs, MICROBATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*LINEAR, *PLACED])
@pytest.mark.parametrize("make", [gpt, gpt2, bert, vit, unet_batch_norm, mlp])
def test_peak_of_every_rank_is_predicted_to_the_byte(make: Maker, schedule: str) -> None:
    pipe = pipeline(make, "zb-h1" if schedule in LINEAR else schedule)
    if schedule in LINEAR:
        pipe = rescheduled(pipe, MICROBATCHES, schedule)
    counters = measured_peaks(pipe, rows_of(make, pipe))
    assert [memory.highest.peak_bytes for memory in pipe.memory] == [counter.peak for counter in counters]


def note_end(died: list[bool], state: dict[str, bool]) -> None:
    died.append(state["running"])


@pytest.mark.inductor
def test_compiled_phases_let_go_of_their_arguments() -> None:
    pipe = shared(mlp, 1, 2, schedule="zb-h1")
    compiler = Compiler(compiles=True)
    for kind, phase in pipe.stages[0].phases.items():
        inputs = phase.module.graph.find_nodes(op="placeholder")
        args = [made_up(node.meta["val"], torch.device("cpu")) for node in inputs]
        expected = phase.module(*copy.deepcopy(args))
        state, died = {"running": True}, list[bool]()
        for value in args[len(phase.ports) : len(phase.ports) + len(phase.values)]:
            weakref.finalize(value, note_end, died, state)
        box = list(args)
        args = value = None  # type: ignore[assignment]
        with torch.no_grad():
            found = compiler(phase)(box)
        state["running"] = False
        assert box == []
        assert died == [True] * len(phase.values), kind
        for result, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(result, reference)


@pytest.mark.inductor
def test_compiled_products_are_added_where_the_gradient_is() -> None:
    """Neither into a copy of it, nor copied back."""
    phase = shared(mlp, 1, 2, schedule="zb-h1").stages[0].phases[Kind.W]
    args = [made_up(n.meta["val"], torch.device("cpu")) for n in phase.module.graph.find_nodes(op="placeholder")]
    run = Compiler(compiles=True)(phase)
    with torch.no_grad():
        run(list(args))
        with torch.profiler.profile(acc_events=True) as profile:
            run(list(args))
    calls = {event.key: event.count for event in profile.key_averages()}
    weights = [name for name in phase.gradients if name.endswith("weight")]
    assert calls["aten::addmm_"] == len(weights)
    assert "aten::addmm" not in calls


def moments_with(pipe: zbfx.Pipeline, measured: dict[Kind, CallBytes]) -> tuple[Moment, ...]:
    """Of rank 0, where calls of stage 0 were measured to hold so much."""
    stages = (with_call_bytes(pipe.stages[0], measured), pipe.stages[1])
    found = with_other(pipe, stages=stages)
    assert found.memory[1] == pipe.memory[1]
    return found.memory[0].moments


def test_what_kernels_were_measured_to_hold_counts_while_they_run() -> None:
    pipe = shared(gpt, 2, MICROBATCHES, schedule="zb-h1")
    hidden = {Kind.P: 5 * 10**6, Kind.F: 10**6, Kind.B: 3 * 10**6, Kind.W: 2 * 10**6}
    found = moments_with(pipe, {kind: CallBytes(size, 10**9) for kind, size in hidden.items()})
    for before, after in zip(pipe.memory[0].moments, found, strict=True):
        assert after.left_bytes == before.left_bytes
        if after.action is not None and before.node:
            assert after.peak_bytes == before.peak_bytes + hidden[after.action.kind]


def test_calls_hold_no_more_than_they_were_measured_to() -> None:
    """A compiler that fuses makes fewer values than the graph has."""
    pipe = shared(gpt, 2, MICROBATCHES, schedule="zb-h1")
    of_graph = pipe.memory[0].moments
    low, high = (moments_with(pipe, {Kind.F: CallBytes(0, most)}) for most in (300, 1100))
    for whole, little, more in zip(of_graph, low, high, strict=True):
        if whole.action is not None and whole.action.kind is Kind.F:
            assert little.left_bytes == whole.left_bytes
            assert more.peak_bytes == little.peak_bytes + 800 < whole.peak_bytes
        else:
            assert little == whole


def counted_most(run: Callable[[Any], Any], make: Callable[[], Any], _: torch.device) -> int:
    counter = LiveBytes()
    with counter:
        argument = make()
    before = counter.peak = counter.live
    with counter:
        run(argument)
    return counter.peak - before


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt, gpt2, bert, unet_batch_norm, mlp])
def test_calls_are_measured_as_a_step_makes_them(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase that runs as traced holds what its graph says, whether its arguments live on or die inside."""
    monkeypatch.setattr(measure, "most_bytes", counted_most)
    monkeypatch.setattr(measure, "CUDA_GRANULE", 1)
    pipe = shared(make, 2, 2, schedule="zb-h1")
    device = torch.device("cpu")
    seen = 0
    with torch.no_grad():
        for stage in pipe.stages:
            for kind, phase in stage.phases.items():
                if not phase.is_empty:
                    args = [argument() for argument in argument_makers(phase.module.graph, device)]
                    found = measure.call_bytes(stage, kind, boxed(phase), args, device)
                    assert found.hidden == 0, (stage.index, kind)
                    assert found.usual == found.expected, (stage.index, kind)
                    seen += found.usual < found.most
    assert seen  # some call gives memory back before it takes its most


def test_calls_as_in_a_step_hold_what_they_were_measured_to() -> None:
    phase = shared(mlp, 1, 2, schedule="zb-h1").stages[0].phases[Kind.B]
    phase = replace(phase, measured=CallBytes(hidden=10, most=500, expected=300, usual=250))
    assert [phase.most_bytes(peak) for peak in (200, 300, 495)] == [210, 250, 500]


def test_values_of_a_w_beside_a_b_are_held_until_it_is_joined() -> None:
    pipe = beside(shared(gpt, 2, MICROBATCHES, schedule="zb-h1"))
    assert pipe.schedule.beside
    counters = measured_peaks(pipe, rows_of(gpt, pipe))
    assert [memory.highest.peak_bytes for memory in pipe.memory] == [counter.peak for counter in counters]


@pytest.mark.slow
def test_nothing_is_left_after_a_step() -> None:
    """The losses are the last to go; gradients and parameters were there before."""
    for steps in (2, 20):
        pipe = pipeline(unet_group_norm, "zb-h1")
        assert [counter.live for counter in measured_peaks(pipe, rows_of(unet_group_norm, pipe), steps)] == [0] * 4
