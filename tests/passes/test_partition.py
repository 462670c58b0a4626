"""Stages of a joint graph."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor, fx, nn

from tests.support.models import Maker, Problem, gpt, mlp, numbers, squares, t5, unet_group_norm
from tests.support.reference import cut_into, placed, placed_model, traced, traced_model
from zbfx.graphs import Placed, Role
from zbfx.passes.partition import level_ranks, module_of, partition

aten = torch.ops.aten


@pytest.mark.slow
@pytest.mark.parametrize("make", [mlp, gpt, unet_group_norm, t5])
@pytest.mark.parametrize("stages", [1, 3, 4])
def test_every_node_is_in_one_stage_and_every_stage_has_some(make: Maker, stages: int) -> None:
    found = placed_model(make, stages)
    calls = [node for node in found.joint.graph.nodes if node.op == "call_function"]
    everywhere = [node for node in calls if node not in found.stage_of]
    assert set(found.stage_of) | set(everywhere) == set(calls)
    assert not set(everywhere) & set(found.line.gradients)
    assert {found.stage_of[node] for node in found.line.forward} == set(range(stages))


@pytest.mark.parametrize("make", [mlp, gpt, unet_group_norm, t5])
def test_values_travel_forward_and_gradients_back(make: Maker) -> None:
    found = placed_model(make, 4)
    for node, stage in found.stage_of.items():
        for source in (s for s in node.all_input_nodes if s in found.stage_of):
            if source in found.line.gradients:
                assert found.stage_of[source] >= stage
            else:
                assert found.stage_of[source] <= stage or node in found.line.gradients


def stages_with(found: Placed, target: object) -> list[int]:
    return [found.stage_of[node] for node in found.line.forward if node.target is target]


def test_equal_layers_are_shared_out_equally() -> None:
    problem = mlp(1, width=64, layers=8)
    assert stages_with(placed(problem, 4), aten.addmm.default) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert stages_with(placed(problem, 2), aten.addmm.default) == [0] * 4 + [1] * 4


def test_cut_falls_where_little_crosses() -> None:
    """Two equal halves, joined by a layer of width 2."""
    torch.manual_seed(0)
    wide = [nn.Linear(64, 64), nn.Tanh()] * 2
    model = nn.Sequential(*wide, nn.Linear(64, 2), nn.Linear(2, 64), *wide)
    found = placed(Problem(model, squares, (numbers(32, 64),)), 2)
    crossing = values_crossing(found)
    assert [tuple(node.meta["val"].shape) for node in crossing] == [(32, 2)]


def values_crossing(found: Placed) -> list[fx.Node]:
    return [
        node
        for node in found.line.forward
        if any(u in found.line.position and found.stage_of[u] > found.stage_of[node] for u in node.users)
    ]


def test_named_cuts_are_where_the_submodules_begin() -> None:
    found = cut_into(traced_model(gpt), 3, ["blocks.1", "blocks.3.up"])
    owners = [(module_of(node), found.stage_of[node]) for node in found.line.forward]
    assert {stage for owner, stage in owners if owner.startswith("blocks.0")} == {0}
    assert {stage for owner, stage in owners if owner.startswith(("blocks.1", "blocks.2", "blocks.3.qkv"))} == {1}
    assert {stage for owner, stage in owners if owner.startswith(("blocks.3.up", "blocks.3.down", "head"))} == {2}


def test_as_many_stages_as_there_are_nodes() -> None:
    problem = mlp(1, layers=2)
    nodes = len(placed(problem, 1).line.forward)
    found = placed(problem, nodes)
    assert [found.stage_of[node] for node in found.line.forward] == list(range(nodes))


def test_read_and_write_of_a_buffer_share_a_stage() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8))))
    found = placed(Problem(model, squares, (numbers(4, 8),)), 4)
    ports = dict(zip(found.joint.output_values, found.joint.outputs, strict=True))
    for value, port in ports.items():
        if port.role is Role.BUFFER_UPDATE and value in found.stage_of:
            reads = [n for n in value.all_input_nodes if n in found.stage_of]
            assert {found.stage_of[node] for node in reads} <= {found.stage_of[value]}


def test_messages_weigh_only_where_they_take_longer_than_the_work() -> None:
    """Eight equal layers, of which every cut costs as much as half a layer: halves are still equal."""
    joint = traced(mlp(1, width=64, layers=8))

    def seconds(node: fx.Node) -> float:
        return float(node.target is aten.addmm.default)

    crossing = 2 * 32 * 64 * 4  # bytes of a value and its gradient, in rows of 32
    found = partition(joint, range(2), seconds=seconds, bytes_per_s=2.0 * crossing)
    assert stages_with(found, aten.addmm.default) == [0] * 4 + [1] * 4


def test_ranks_are_level_where_they_hold_several_stages() -> None:
    """Ten layers of 1 s and a head of 6 s, down two ranks and up again: 8 s each, for stages of 2, 4, 4 and 6."""
    work = numpy.cumsum([0.0, *[1.0] * 10, 6.0])
    found = level_ranks([3, 6, 9], (0, 1, 1, 0), work[None, :] - work[:, None], numpy.ones(12))
    first, second, third = found
    assert (first + work[11] - work[third], work[third] - work[first]) == (8.0, 8.0)
    assert first < second < third


def test_cuts_stay_where_more_would_cross() -> None:
    work = numpy.cumsum([0.0, *[1.0] * 8, 4.0])
    crossing = numpy.array([1.0, 1.0, 9.0, 1.0, 9.0, 1.0, 9.0, 1.0, 9.0, 1.0])
    found = level_ranks([1, 3, 5], (0, 1, 1, 0), work[None, :] - work[:, None], crossing)
    assert all(crossing[cut] == 1.0 for cut in found)


class Attending(nn.Module):
    """Attention that keeps what its backward reads, q and k of products in another order of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) * 2 for part in self.project(x).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def test_what_the_backward_of_attention_reads_stays_in_its_stage() -> None:
    found = placed(
        Problem(nn.Sequential(*(Attending() for _ in range(4))), squares, (numbers(2, 3, 8),)), 2, cuts=["2"]
    )
    assert [tuple(node.meta["val"].shape) for node in values_crossing(found)] == [(2, 3, 8)]
