"""What is B and what is W, and what a stage keeps for them."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpt import GPT, GPTConfig, next_token_loss
from tests.support.models import MODELS, Maker, Problem, gpt, mlp, unet_batch_norm, unet_group_norm
from tests.support.reference import placed_model, staged, staged_model, traced_model
from zbfx.graphs import Role, Stage
from zbfx.passes.nodes import is_view
from zbfx.passes.split import split
from zbfx.plan import Kind

aten = torch.ops.aten
BATCH, SEQUENCE, HIDDEN, HEADS = 2, 1024, 512, 8
SBH = SEQUENCE * BATCH * HIDDEN

FAST_MODELS = {name: MODELS[name] for name in ("gpt", "mlp", "unet-batch-norm", "encoder-decoder", "bert", "t5", "vit")}


@functools.cache
def blocks(count: int) -> Stage:
    """A stage of GPT blocks in bfloat16 with flash attention; embedding and head are stages of their own."""
    with torch.device("meta"):
        model = GPT(GPTConfig(count, HIDDEN, HEADS, SEQUENCE, 128)).to(torch.bfloat16)
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="meta")
    return staged(Problem(model, next_token_loss, (ids,), (ids,)), 3, ["blocks.0", "norm"])[1]


@pytest.mark.slow
def test_memory_of_a_gpt_block_is_within_the_papers_count() -> None:
    """Table 1: M_B = 34 s b h (masks of three dropouts included), M_W = 32 s b h bytes a layer in 16 bit."""
    held = [(stage.stored_bytes(stage.saved), weight_bytes(stage)) for stage in (blocks(2), blocks(3))]
    m_b, m_w = (more - less for less, more in zip(*held, strict=True))
    statistics = 4 * HEADS * SEQUENCE * BATCH + 4 * 2 * SEQUENCE * BATCH  # float32 logsumexp; mean and deviation
    assert m_w == 32 * SBH
    assert 32 * SBH < m_b <= 32 * SBH + statistics <= 34 * SBH
    assert held[0] == pytest.approx((2 * m_b, 2 * m_w))


def weight_bytes(stage: Stage) -> int:
    return stage.stored_bytes(stage.phases[Kind.W].values)


def test_flash_attention_is_what_was_traced() -> None:
    operators = targets(blocks(2), Kind.F)
    assert operators[aten._scaled_dot_product_flash_attention_for_cpu.default] == 2


def targets(stage: Stage, kind: Kind) -> Counter[Any]:
    return Counter(node.target for node in stage.phases[kind].module.graph.nodes if node.op == "call_function")


@pytest.mark.slow
@pytest.mark.parametrize("make", FAST_MODELS.values(), ids=FAST_MODELS.keys())
def test_every_node_with_a_stage_is_in_one_phase(make: Maker) -> None:
    found = placed_model(make, 3)
    phases = split(found).phase_of
    assert phases.keys() == found.stage_of.keys()
    assert {node for node in phases if phases[node] is Kind.F} == set(found.line.forward)
    for node in found.line.gradients & phases.keys():
        if phases[node] is Kind.B:
            same = [s for s in node.all_input_nodes if found.stage_of.get(s) == found.stage_of[node]]
            assert all(phases[source] is not Kind.W for source in same)


@pytest.mark.slow
@pytest.mark.parametrize("make", FAST_MODELS.values(), ids=FAST_MODELS.keys())
def test_a_gradient_that_is_sent_is_b(make: Maker) -> None:
    found = placed_model(make, 3)
    phases = split(found).phase_of
    for node in found.line.gradients & phases.keys():
        if any(found.stage_of.get(user, found.stage_of[node]) != found.stage_of[node] for user in node.users):
            assert phases[node] is Kind.B


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt, unet_group_norm, unet_batch_norm])
def test_heavy_nodes_are_computed_once(make: Maker) -> None:
    heavy = (
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm_backward.default,
        aten.native_batch_norm_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten.gelu_backward.default,
        aten.max_pool2d_with_indices_backward.default,
    )
    whole = Counter(node.target for node in traced_model(make).graph.nodes)
    apart = sum((targets(stage, kind) for stage in staged_model(make, 3) for kind in stage.phases), Counter())
    assert {target: apart[target] for target in heavy} == {target: whole[target] for target in heavy}
    assert products(apart) == products(whole)


def products(counted: Counter[Any]) -> int:
    """Matrix products, also those that add into a gradient."""
    names = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")
    return sum(n for target, n in counted.items() if getattr(target, "overloadpacket", None) in packets(names))


def packets(names: tuple[str, ...]) -> set[Any]:
    return {getattr(aten, name) for name in names}


def test_convolution_gives_its_input_gradient_in_b_and_its_weight_gradient_in_w() -> None:
    for stage in staged_model(unet_group_norm, 3)[1:]:
        for kind, wanted in ((Kind.B, [True, False, False]), (Kind.W, [False, True])):
            graph = stage.phases[kind].module.graph
            masks = [n.args[10] for n in graph.find_nodes(op="call_function", target=aten.convolution_backward.default)]
            assert masks
            assert all(list(mask)[: len(wanted)] == wanted for mask in masks)


@pytest.mark.parametrize("make", FAST_MODELS.values(), ids=FAST_MODELS.keys())
def test_views_and_parameter_values_are_not_saved(make: Maker) -> None:
    found = placed_model(make, 3)
    nodes = {node.name: node for node in found.joint.graph.nodes}
    for stage in staged_model(make, 3):
        kept = [nodes[name] for name in stage.saved]
        assert all(node in found.stage_of for node in kept)
        own = [node for node in kept if found.stage_of[node] == stage.index]
        assert [node.name for node in own if is_view(node)] == []


def test_first_stage_has_a_real_b() -> None:
    """Three layers: the gradients that go back through two of them are B, the three weights' are W."""
    stage = staged(mlp(1), 2, ["6"])[0]
    assert products(targets(stage, Kind.B)) == 2
    assert stage.phases[Kind.B].gradients == ()
    assert products(targets(stage, Kind.W)) == 3
    assert len(stage.phases[Kind.W].gradients) == 6


def test_weights_are_w_and_norms_are_b() -> None:
    stage = blocks(2)
    assert sorted(name.split(".", 2)[2] for name in stage.phases[Kind.B].gradients if ".0." in name) == [
        "norm_1.bias",
        "norm_1.weight",
        "norm_2.bias",
        "norm_2.weight",
    ]
    linear = {name.split(".")[2] for name in stage.phases[Kind.W].gradients}
    assert linear == {"qkv", "projection", "up", "down"}


def test_stage_without_trainable_parameters_has_no_w() -> None:
    problem = mlp(1)
    for name, parameter in problem.model.named_parameters():
        parameter.requires_grad_(not name.startswith(("4.", "6.")))
    stages = staged(problem, 3, ["4", "8"])
    assert stages[1].phases[Kind.W].is_empty
    assert not stages[1].phases[Kind.B].is_empty
    assert weight_bytes(stages[1]) == 0


def test_single_stage_has_everything() -> None:
    torch.manual_seed(0)
    problem = Problem(nn.Linear(4, 4), lambda y: y.square().mean(), (torch.ones(2, 4),))
    (stage,) = staged(problem, 1)
    assert stage.phases[Kind.F].has_loss
    assert {*stage.phases[Kind.B].gradients, *stage.phases[Kind.W].gradients} == {"weight", "bias"}
    assert stage.phases[Kind.F].port_names(Role.PARAMETER) == ("weight", "bias")
