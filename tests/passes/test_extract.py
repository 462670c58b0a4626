"""Calling conventions of the F, B and W of every stage."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Maker, Problem, bert, gpt, mlp, squares, t5, unet_batch_norm, vit
from tests.support.reference import staged, staged_model
from zbfx.graphs import Phase, Role, Stage
from zbfx.plan import Kind

MAKERS = [gpt, mlp, unet_batch_norm, bert, t5, vit]


def phases(stages: tuple[Stage, ...]) -> list[Phase]:
    return [phase for stage in stages for phase in stage.phases.values()]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_placeholders_and_results_match_the_convention(make: Maker) -> None:
    for phase in phases(staged_model(make, 3)):
        graph = phase.module.graph
        graph.lint()
        inputs = len(phase.ports) + len(phase.values) + len(phase.gradients) + phase.is_random
        assert len(graph.find_nodes(op="placeholder")) == inputs
        assert len(graph.output_node().args[0]) == len(phase.results) + phase.has_loss  # type: ignore[arg-type]
        assert not graph.find_nodes(op="get_attr")


@pytest.mark.parametrize("make", MAKERS)
def test_every_value_is_the_result_of_the_phase_that_makes_it(make: Maker) -> None:
    stages = staged_model(make, 3)
    for stage in stages:
        for kind, phase in stage.phases.items():
            for name in phase.values:
                source, made_in = stage.origins[name]
                assert name in stages[source].phases[made_in].results
                order = (Kind.F, Kind.B, Kind.W)
                assert source != stage.index or order.index(made_in) < order.index(kind)
                assert made_in is not Kind.W


@pytest.mark.parametrize("make", MAKERS)
def test_every_result_is_read(make: Maker) -> None:
    stages = staged_model(make, 3)
    read = {name for phase in phases(stages) for name in phase.values}
    assert {name for phase in phases(stages) for name in phase.results} == read


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_parameters_have_all_their_gradients_and_one_loss(make: Maker) -> None:
    problem = make(1)
    found = phases(staged(problem, 3))
    gradients = {name for phase in found for name in phase.gradients}
    assert gradients == {name for name, p in problem.model.named_parameters() if p.requires_grad}
    assert [phase.name for phase in found if phase.has_loss] == ["F2"]
    updated = [name for phase in found for name in phase.updates]
    assert sorted(updated) == sorted(
        name for name, _ in problem.model.named_buffers() if "running" in name or "num_" in name
    )
    assert all(phase.kind is Kind.F for phase in found if phase.updates)


def test_sizes_count_every_storage_once() -> None:
    stage = staged_model(gpt, 3)[1]
    names = sorted(stage.saved)
    assert stage.stored_bytes(names) == stage.stored_bytes([*names, *names])
    owners = {stage.storages[name][0] for name in names}
    assert stage.stored_bytes(names) == sum({stage.storages[n][0]: stage.storages[n][1] for n in names}.values())
    assert len(owners) <= len(names)


def test_phases_of_a_layer_compute_what_autograd_does() -> None:
    """y = tanh(x w' + b) in two stages, called by hand."""
    torch.manual_seed(0)
    problem = mlp(1, layers=2)
    first, last = staged(problem, 2, ["2"])
    named = dict(problem.model.named_parameters())
    sums = {name: torch.zeros_like(p, requires_grad=False) for name, p in named.items()}
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for phase in (*(s.phases[Kind.F] for s in (first, last)), *backward(last), *backward(first)):
            call(phase, problem.inputs + problem.targets, named, values, sums)
    loss = problem.loss_fn(problem.model(*problem.inputs), *problem.targets)  # type: ignore[misc]
    loss.backward()
    assert torch.equal(values["loss"], loss)
    for name, parameter in named.items():
        torch.testing.assert_close(sums[name], parameter.grad)


def test_a_parameter_may_have_the_name_of_an_argument() -> None:
    """Phases that draw random numbers have an argument `seed`; sums of gradients have `grad_` before their name."""

    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seed, self.grad_seed = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.seed, 0.5) * self.grad_seed

    forward = staged(Problem(Seeded(), squares, (torch.randn(2, 4),)), 1)[0].phases[Kind.F]
    assert forward.is_random
    assert forward.port_names(Role.PARAMETER) == ("seed", "grad_seed")
    assert [node.target for node in forward.module.graph.find_nodes(op="placeholder")][-1] == "seed_1"


def backward(stage: Stage) -> list[Phase]:
    return [stage.phases[kind] for kind in (Kind.B, Kind.W)]


def call(
    phase: Phase,
    batch: tuple[Tensor, ...],
    named: Mapping[str, Tensor],
    values: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> None:
    inputs = dict(zip(("inputs[0]", "targets[0]"), batch, strict=True))
    sources: dict[Role, Mapping[str, Tensor]] = {
        Role.PARAMETER: named,
        Role.INPUT: inputs,
        Role.LOSS_GRADIENT: {"loss": torch.ones(())},
    }
    ports = [sources[port.role][port.name] for port in phase.ports]
    results = phase.module(*ports, *(values[name] for name in phase.values), *(sums[name] for name in phase.gradients))
    values.update(zip(phase.returned, results, strict=True))
