"""Ws in parts: the same bits as whole ones, and each bucket's sum begins as soon as its gradients are final."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

import zbfx
from tests.support.models import Maker, gpt, gpt2, mlp, unet_batch_norm
from tests.support.reference import rescheduled, shared, shared_problem, stepped
from zbfx.costs.estimate import Link
from zbfx.passes.cluster import inseparable, part_of
from zbfx.plan import Kind
from zbfx.program import ops
from zbfx.program.calls import GradientBucket, PhaseCall
from zbfx.replicas import replicated

SLOW = Link(latency_s=1e-7, bytes_per_s=2e7, replicas=2)  # sums take about as long as Ws
M = 5


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt, gpt2, mlp, unet_batch_norm])
def test_parts_of_w_make_every_gradient_once(make: Maker) -> None:
    for stage in shared(make, 2, 2).stages:
        phase = stage.phases[Kind.W]
        groups = inseparable(phase)
        assert sorted(name for group in groups for name in group) == sorted(phase.gradients)
        parts = [part_of(phase, group, index) for index, group in enumerate(groups)]
        assert [set(found.gradients) for found in parts] == [set(group) for group in groups]
        for found in parts:
            assert set(found.values) <= set(phase.values)
            assert found.name == f"W{stage.index}p{found.part}"


def test_layers_of_an_mlp_come_apart() -> None:
    phase = shared(mlp, 2, 2).stages[1].phases[Kind.W]
    assert len(inseparable(phase)) == len(phase.gradients) == 6  # three layers, weight and bias


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt, gpt2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_same_bits_as_whole_ws(make: Maker, schedule: str) -> None:
    problem = shared_problem(make, M, torch.float32)
    pipe = rescheduled(shared(make, 2, M), M, schedule)
    loss, gradients = stepped(problem, pipe)
    clustered = replicated(pipe.compiled, 2, SLOW)
    assert any(found.trailing > 1 for found in clustered.reductions)
    found_loss, found_gradients = stepped(problem, replace(pipe, compiled=clustered))
    assert torch.equal(found_loss, loss)
    for name, gradient in gradients.items():
        found = found_gradients[name]
        assert gradient is not None
        assert found is not None
        assert torch.equal(found, gradient), name


def calls_and_sums(program: zbfx.program.codegen.Program) -> list[tuple[str, set[str]]]:
    """In order: ("call", gradients that it adds to) and ("sum", gradients of the bucket whose sum begins)."""
    found = []
    for node in program.module.graph.nodes:
        if node.op == "call_module":
            module = program.module.get_submodule(str(node.target))
            if isinstance(module, PhaseCall):
                found.append(("call", set(module.phase.gradients)))
        elif node.target is ops.reduce:
            assert isinstance(node.args[2], fx.Node)
            bucket = program.module.get_submodule(str(node.args[2].target))
            assert isinstance(bucket, GradientBucket)
            found.append(("sum", set(bucket.bucket.names)))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_each_sum_starts_right_after_the_last_w_of_its_bucket(schedule: str) -> None:
    pipe = replicated(rescheduled(shared(mlp, 2, M), M, schedule).compiled, 2, SLOW)
    for program in pipe.programs:
        found = calls_and_sums(program)
        sums = [index for index, (kind, _) in enumerate(found) if kind == "sum"]
        assert len(sums) > 1
        for index in sums:
            names = found[index][1]
            before = [k for k, (kind, own) in enumerate(found) if kind == "call" and own & names]
            assert all(found[k][0] == "sum" for k in range(max(before) + 1, index)), "right after its last call"
        calls = [index for index, (kind, _) in enumerate(found) if kind == "call"]
        assert [index for index in sums if index > calls[-1]] == sums[-1:], "the last sum alone is after the last W"
        waits = program.module.graph.find_nodes(op="call_function", target=ops.reduced)
        assert len(waits) == len(sums)


def test_without_clustering_all_sums_wait_for_the_last_w() -> None:
    pipe = replicated(shared(mlp, 2, M).compiled, 2, SLOW, cluster=False)
    for program in pipe.programs:
        kinds = [kind for kind, _ in calls_and_sums(program)]
        assert kinds == ["call"] * kinds.count("call") + ["sum"] * kinds.count("sum")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("bytes_per_s", [1e7, 1e8, 1e9])
def test_clustering_hides_more(schedule: str, bytes_per_s: float) -> None:
    pipe = rescheduled(shared(mlp, 2, M), M, schedule).compiled
    link = Link(0.0, bytes_per_s, replicas=2)
    clustered, whole = replicated(pipe, 2, link), replicated(pipe, 2, link, cluster=False)
    for ours, theirs in zip(clustered.reductions, whole.reductions, strict=True):
        assert ours.exposed_s < theirs.exposed_s
    assert clustered.exposed_s < whole.exposed_s
