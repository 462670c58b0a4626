"""Stages cut again by what they were measured to take. (Costs are the test's.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import zbfx
from tests.support.models import mlp
from tests.support.reference import placed
from zbfx.candidate import corrected, heaviest_s, stage_s
from zbfx.costs.estimate import Costed, estimate, hardware_of
from zbfx.errors import ZbfxError
from zbfx.graphs import Stage
from zbfx.plan import CostTable, StageCost

aten = torch.ops.aten


def table(*times: tuple[float, float, float], placement: Sequence[int]) -> CostTable:
    stages = tuple(StageCost(*found) for found in times)
    return CostTable(stages, (), tuple(placement))


def test_heaviest_rank() -> None:
    costs = table((2, 3, 5), (1, 1, 1), (4, 1, 1), (2, 3, 6), placement=(0, 1, 1, 0))
    assert [stage_s(costs, stage) for stage in range(4)] == [10, 3, 6, 11]
    assert heaviest_s(costs) == 21


def test_seconds_of_nodes_add_up_to_those_of_their_stage() -> None:
    found = placed(mlp(1, width=8, layers=4), 2)
    costs = table((2, 3, 5), (4, 6, 11), placement=(0, 1))
    seconds = corrected(lambda node: float(len(node.name)), found, costs)
    for stage, expected in enumerate((10.0, 21.0)):
        total = sum(seconds(node) for node, of in found.stage_of.items() if of == stage)
        assert total == pytest.approx(expected, rel=1e-12)
    outside = fx.Graph().placeholder("elsewhere")
    assert seconds(outside) == len("elsewhere")


def layers_per_stage(pipe: zbfx.Pipeline) -> list[int]:
    return [sum(name.endswith("weight") for name in stage.phases[zbfx.plan.Kind.F].parameters) for stage in pipe.stages]


@pytest.mark.slow
@pytest.mark.parametrize(("slower", "expected"), [(1.0, [6, 6]), (2.0, [4, 8]), (3.0, [4, 8])])
def test_a_slower_rank_gets_fewer_layers(monkeypatch: pytest.MonkeyPatch, slower: float, expected: list[int]) -> None:
    """Rank 0 takes `slower` times as long for a layer. The layers that it gives away are counted at its speed: at 3.0,
    3 and 9 layers would be better still."""

    def measured(stages: tuple[Stage, ...], placement: Sequence[int], *_: Any) -> Costed:
        found = estimate(stages, placement, hardware_of(torch.device("cpu")))
        layers = [len(stage.phases[zbfx.plan.Kind.F].parameters) / 2 for stage in stages]
        speeds = [slower, 1.0]
        times = [
            replace(cost, forward_s=2 * n * s, backward_input_s=3 * n * s, backward_weight_s=5 * n * s)
            for cost, n, s in zip(found.stages, layers, speeds, strict=True)
        ]
        return Costed(stages, replace(found, stages=tuple(times)))

    monkeypatch.setattr("zbfx.candidate.cost_table", measured)
    monkeypatch.setattr("zbfx.candidate.node_timer", lambda *_: lambda node: float(node.target is aten.addmm.default))
    problem = mlp(4, width=16, layers=12)
    options: dict[str, Any] = {"stages": 2, "microbatches": 4, "schedule": "1f1b", "costs": "measure", "check": False}
    options |= {"example_inputs": problem.inputs, "loss_fn": problem.loss_fn, "example_targets": problem.targets}
    assert layers_per_stage(zbfx.compile(problem.model, **options)) == [6, 6]
    assert layers_per_stage(zbfx.compile(problem.model, **options, rebalance=True)) == expected


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, "found costs='estimate', cuts=None"),
        ({"costs": "measure", "cuts": ["2"]}, r"found costs='measure', cuts=\['2'\]"),
    ],
)
def test_rebalancing_needs_measured_costs_and_free_cuts(options: dict[str, Any], found: str) -> None:
    problem = mlp(4, width=8, layers=4)
    with pytest.raises(ZbfxError, match=f"rebalance=True cuts stages again .* costs='measure' and no cuts; {found}"):
        zbfx.compile(
            problem.model,
            stages=2,
            microbatches=2,
            example_inputs=problem.inputs,
            example_targets=problem.targets,
            loss_fn=problem.loss_fn,
            rebalance=True,
            **options,
        )
