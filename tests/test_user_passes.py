"""Passes of the user's: they run in every variant, are verified after each, and named when they break the graph."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.processes import passes_worker
from tests.support.models import Problem, mlp
from tests.support.pool import Launch
from tests.support.reference import assert_same, compiled, default_dtype, reference, stepped
from tests.support.user_passes import aten, scaled, sine_for_tanh
from zbfx.errors import BrokenGraph
from zbfx.graphs import Joint, Split, Stage, copy_graph
from zbfx.plan import Kind
from zbfx.runtime.digest import digest

pytestmark = pytest.mark.usefixtures("known_traces")

SINE = [zbfx.Pass("joint", sine_for_tanh)]


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def with_sine(problem: Problem) -> Problem:
    """What the pass makes of the model, written as a model."""
    layers = [Sine() if isinstance(layer, nn.Tanh) else layer for layer in problem.model.children()]
    return replace(problem, model=copy.deepcopy(nn.Sequential(*layers)))


def mean_loss(problem: Problem, microbatches: int = 1) -> float:
    return float(reference(problem, microbatches)[0])


def lengthened(problem: Problem) -> Problem:
    inputs, targets = (
        tuple(torch.cat([t, 2 * t.flip(0)]) for t in group) for group in (problem.inputs, problem.targets)
    )
    return replace(problem, inputs=inputs, targets=targets)


def shortened(problem: Problem, rows: int) -> Problem:
    inputs, targets = (tuple(t[:rows] for t in group) for group in (problem.inputs, problem.targets))
    return replace(problem, inputs=inputs, targets=targets)


@pytest.mark.parametrize("stages_per_rank", [None, 2])
def test_losses_and_gradients_are_those_of_the_changed_model(stages_per_rank: int | None) -> None:
    with default_dtype(torch.float64):
        problem = mlp(4)
        expected = reference(with_sine(problem), 4)
        pipe = compiled(problem, 2, 4, passes=SINE, check=False, schedule="auto", stages_per_rank=stages_per_rank)
        assert_same(stepped(problem, pipe), expected, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("on_new_shape", ["recompile", "symbolic"])
def test_further_shapes_and_evaluation_are_those_of_the_changed_model(on_new_shape: str) -> None:
    with default_dtype(torch.float64):
        problem = mlp(4)
        longer, changed = lengthened(problem), with_sine(problem)
        step = compiled(problem, 2, 4, passes=SINE, check=False).run_local(on_new_shape=on_new_shape)
        for given in (problem, longer):
            truth = mean_loss(replace(changed, inputs=given.inputs, targets=given.targets))
            assert float(step(*given.inputs, *given.targets)) == pytest.approx(truth, rel=1e-12)
            assert float(step.evaluate(*given.inputs, *given.targets)) == pytest.approx(truth, rel=1e-12)
        assert len(step.pipelines) == 4
        for pipe in step.pipelines:
            targets = [n.target for s in pipe.stages for p in s.phases.values() for n in p.module.graph.nodes]
            assert aten.sin.default in targets
            assert aten.tanh.default not in targets


def test_check_compares_with_the_model_before() -> None:
    pipe = compiled(mlp(4), 2, 4, passes=SINE, check=False)
    report = zbfx.check(pipe)
    assert {finding.kind for finding in report.findings} == {"different"}
    assert not any(finding.of_model for finding in report.findings)
    with pytest.raises(zbfx.TraceError, match="computes other results than the model"):
        compiled(mlp(4), 2, 4, passes=SINE)


def test_passes_run_in_their_order_at_their_points() -> None:
    seen: list[str] = []

    def noted(name: str) -> Callable[[Any], Any]:
        return lambda graph: seen.append(f"{name} {type(graph).__name__}") or graph  # type: ignore[func-returns-value]

    points = [("stage", "a"), ("joint", "b"), ("split", "c"), ("joint", "d")]
    compiled(mlp(4), 2, 4, passes=[zbfx.Pass(at, noted(name)) for at, name in points], check=False)
    assert seen == ["b Joint", "d Joint", "c Split", "a Stage", "a Stage"]


def lost_output(joint: Joint) -> Joint:
    graph = copy_graph(joint.graph)
    output = graph.output_node()
    output.args = (output.args[0][:-1],)  # type: ignore[index]
    return replace(joint, graph=graph, outputs=joint.outputs[:-1])


def other_shape(joint: Joint) -> Joint:
    graph = copy_graph(joint.graph)
    (first, *_) = graph.find_nodes(op="call_function", target=aten.tanh.default)
    del first.meta["val"]
    return replace(joint, graph=graph)


def weights_first(split: Split) -> Split:
    """Bs of the last stage in W: others wait for what they make."""
    last = split.placed.stage_count - 1
    moved = {n: Kind.W for n, kind in split.phase_of.items() if kind is Kind.B and split.placed.stage_of[n] == last}
    return replace(split, phase_of={**split.phase_of, **moved})


def without_gradients(stage: Stage) -> Stage:
    last = stage.phases[Kind.W]
    return replace(stage, phases={**stage.phases, Kind.W: replace(last, gradients=last.gradients[1:])})


@pytest.mark.parametrize(
    ("at", "function", "rule"),
    [
        ("joint", lost_output, "ports_are_kept"),
        ("joint", other_shape, "nodes_are_described"),
        ("split", weights_first, "weights_come_last"),
        ("stage", without_gradients, ""),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(at: str, function: Callable[[Any], Any], rule: str) -> None:
    with pytest.raises(BrokenGraph, match=f"^{function.__name__} gave a graph that breaks {rule}") as raised:
        compiled(mlp(4), 2, 4, passes=[zbfx.Pass("joint", scaled(1.0)), zbfx.Pass(at, function)], check=False)
    assert raised.value.after == function.__name__


def in_place(joint: Joint) -> Joint:
    for node in joint.graph.nodes:
        if node.target is aten.tanh.default:
            node.target = aten.sin.default
    return joint


def nothing(joint: Joint) -> None:
    del joint


def mistaken(joint: Joint) -> Joint:
    raise KeyError("tanh")


def test_a_pass_that_is_no_function_of_graphs_is_named() -> None:
    for function, text in ((in_place, "has changed the Joint that it took"), (nothing, "found NoneType")):
        with pytest.raises(zbfx.ZbfxError, match=f"^{function.__name__} .*{text}"):
            compiled(mlp(4), 2, 4, passes=[zbfx.Pass("joint", function)], check=False)
    with pytest.raises(KeyError) as raised:
        compiled(mlp(4), 2, 4, passes=[zbfx.Pass("joint", mistaken)], check=False)
    assert raised.value.__notes__ == ["in mistaken, a pass at joint"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: zbfx.Pass("joints", sine_for_tanh), "one of joint, split, stage; found 'joints'"),
        (lambda: zbfx.Pass("joint", cast(Any, "sine")), "a function of a Joint; found 'sine'"),
        (lambda: compiled(mlp(4), 2, 4, passes=[sine_for_tanh]), "passes is a list of zbfx.Pass"),
        (
            lambda: compiled(mlp(4), 2, 4, passes=SINE, check=True),
            "sine_for_tanh ran on its graph and may have changed",
        ),
        (lambda: compiled(mlp(4), 2, 4, trace_passes="yes"), "trace_passes is True, False, 'all' or None; found 'yes'"),
    ],
)
def test_mistakes_are_named(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(zbfx.ZbfxError, match=text):
        make()


def test_passes_are_printed_on_demand(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(mlp(4), 2, 4, passes=SINE, check=False)
    assert capsys.readouterr().err == ""
    compiled(mlp(4), 2, 4, passes=SINE, check=False, trace_passes=True)
    printed = capsys.readouterr().err
    line = r"^zbfx: ([\w, ]+): [\d.]+ ms, (\d+) lines to (\d+), (\d+) lines added, (\d+) removed$"
    told = {name: tuple(map(int, rest)) for name, *rest in re.findall(line, printed, re.MULTILINE)}
    passes = ["canonicalize", "sine_for_tanh, at joint", "partition", "split", "prologue", "recompute", "extract"]
    assert list(told) == passes
    for before, after, added, removed in told.values():
        assert after - before == added - removed
    before, after, *_ = told["sine_for_tanh, at joint"]
    tanhs = len(re.findall("^-.*aten.tanh.default", printed, re.MULTILINE))
    assert after - before == tanhs > 0, "a cosine and a product for each derivative of one"
    assert len([line for line in printed.splitlines() if line[0] in "+-"]) == sum(told["sine_for_tanh, at joint"][2:])
    assert re.search(r"^-tanh = call_function aten.tanh.default \(addmm,\)", printed, re.MULTILINE)
    assert re.search(r"^\+tanh = call_function aten.sin.default \(addmm,\)", printed, re.MULTILINE)
    monkeypatch.setenv("ZBFX_TRACE_PASSES", "1")
    compiled(mlp(4), 2, 4, passes=SINE, check=False)
    assert "\nzbfx: sine_for_tanh, at joint: " in capsys.readouterr().err
    monkeypatch.setenv("ZBFX_TRACE_PASSES", "all")
    compiled(mlp(4), 2, 4, check=False)
    assert re.search(r"^\+B1: \w+ = call_function aten.mm.default", capsys.readouterr().err, re.MULTILINE)
    compiled(mlp(4), 2, 4, passes=SINE, check=False, trace_passes=False)
    assert capsys.readouterr().err == ""


def test_source_and_values_tell_passes_apart() -> None:
    def told(function: Callable[[Any], Any]) -> str:
        return zbfx.Pass("joint", function).told

    assert told(scaled(2.0)) == told(scaled(2.0)) != told(scaled(3.0))
    assert told(functools.partial(scaled, factor=2.0)) != told(functools.partial(scaled, factor=3.0))
    assert told(sine_for_tanh) != zbfx.Pass("split", sine_for_tanh).told
    assert told(sine_for_tanh).startswith("sine_for_tanh at joint (")
    pipes = [compiled(mlp(4), 2, 4, passes=[zbfx.Pass("joint", scaled(f))], check=False) for f in (2.0, 2.0, 3.0)]
    one, same, other = (digest(pipe.compiled) for pipe in pipes)
    assert one == same
    assert {part for part in one if one[part] != other[part]} == {"the passes"}


def test_passes_over_processes(launch: Launch) -> None:
    found = launch(2, passes_worker.passes_everywhere)
    problem = with_sine(mlp(3))
    half = shortened(problem, len(problem.inputs[0]) // 2)
    truth = [mean_loss(problem), mean_loss(half)] * 2
    for rank in (0, 1):
        assert found[rank]["losses"] == pytest.approx(truth, rel=1e-5)
        assert found[rank]["calls"] == ["0", "1"] * 4


def test_ranks_whose_passes_differ_hear_of_it(launch: Launch) -> None:
    found = launch(2, passes_worker.passes_that_differ)
    for rank in (0, 1):
        assert found[rank]["type"] == "ZbfxError"
        assert "passes is" in found[rank]["text"]
        assert "untouched at joint" in found[rank]["text"]
