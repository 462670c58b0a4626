"""Phases that compute the same are compiled and timed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zbfx
from zbfx.costs.made_up import argument_makers
from zbfx.costs.measure import Conditions, first_alike, prepared
from zbfx.plan import Kind
from zbfx.program import boxed
from zbfx.program.boxed import Compiler, code_of


class Layer(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.factor


def pipeline(*factors: float, **options: Any) -> zbfx.Pipeline:
    """A stage for each layer."""
    torch.manual_seed(0)
    return zbfx.compile(
        nn.Sequential(*map(Layer, factors)).double(),
        stages=len(factors),
        microbatches=len(factors),
        example_inputs=(torch.ones(2, 4, dtype=torch.double),),
        loss_fn=lambda output: output.square().sum(),
        schedule="1f1b",
        cuts=[str(k) for k in range(1, len(factors))],
        **options,
    )


def test_codes_are_equal_up_to_names() -> None:
    stages = pipeline(2.0, 3.0, 3.0, 5.0, 5.0).stages
    middle = [{kind: code_of(phase) for kind, phase in stage.phases.items()} for stage in stages[1:-1]]
    assert stages[1].phases[Kind.F].module.code != stages[2].phases[Kind.F].module.code, "names differ"
    assert middle[0] == middle[1]
    assert middle[1][Kind.F] != middle[2][Kind.F], "another factor"
    assert middle[1][Kind.B] != middle[2][Kind.B]
    assert middle[1][Kind.W] == middle[2][Kind.W], "no factor is in W"


def test_dtypes_of_inputs_are_part_of_the_code() -> None:
    phase = pipeline(2.0, 2.0).stages[0].phases[Kind.F]
    before = code_of(phase)
    node = phase.module.graph.find_nodes(op="placeholder")[0]
    node.meta["val"] = node.meta["val"].float()
    assert code_of(phase) != before


def test_equal_phases_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three equal stages between two others, and one W for all: a function for each code, right for all phases."""
    compiled: list[str] = []

    def inductor(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[[list[Any]], Any]:
        compiled.append(type(module).__name__)
        return lambda box: module(*box)

    monkeypatch.setattr(boxed, "inductor", inductor)
    compiler = Compiler(compiles=True)
    phases = [p for s in pipeline(2.0, 3.0, 3.0, 3.0, 5.0).stages for p in s.phases.values() if not p.is_empty]
    device = torch.device("cpu")
    for phase in phases:
        graph = phase.module.graph
        args = [torch.rand_like(make()) for make in argument_makers(graph, device)]
        found, expected = ([arg.clone() for arg in args] for _ in range(2))
        results = compiler(phase)([*found]), boxed.boxed(phase)([*expected])
        for own, want in zip((*results[0], *found), (*results[1], *expected), strict=True):
            assert torch.equal(own, want), phase.name
    assert len(compiled) == len({code_of(phase) for phase in phases})
    assert [sum(name[0] == kind for name in compiled) for kind in "FBW"] == [3, 3, 1]


def test_equal_phases_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []
    seconds = {"F": 2.0, "B": 3.0, "W": 5.0}

    def sustained(rounds: Sequence[Mapping[Any, Any]], device: torch.device, warm_s: float) -> list[dict[Any, float]]:
        timed.extend(rounds[0])
        return [{key: key[0] * 100 + seconds[key[1]] for key in calls} for calls in rounds]

    monkeypatch.setattr("zbfx.costs.measure.sustained_s", sustained)
    costs = pipeline(2.0, 3.0, 3.0, 3.0, 5.0, costs="measure").schedule.costs
    assert [key for key in timed if key[0] in (1, 2, 3)] == [(1, "F"), (1, "B")]
    assert [stage.seconds(Kind.F) for stage in costs.stages] == [2.0, 102.0, 102.0, 102.0, 402.0]
    assert [stage.seconds(Kind.B) for stage in costs.stages][1:4] == [103.0] * 3
    assert [stage.seconds(Kind.W) for stage in costs.stages][1:4] == [5.0] * 3


def test_stages_of_other_work_are_not_alike() -> None:
    conditions = Conditions(torch.device("cpu"), Compiler(compiles=False), overlap=False, warm_s=0.0)
    like = first_alike([prepared(stage, conditions) for stage in pipeline(2.0, 3.0, 4.0, 5.0).stages])
    assert like[2, "F"] == (2, "F")
    assert like[2, "W"] == (0, "W")
