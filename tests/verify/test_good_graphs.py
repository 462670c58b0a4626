"""What passes give keeps every rule: no false alarms.

Run: pytest tests/verify/test_good_graphs.py (CPU, one process; runs nothing).
"""

from __future__ import annotations

from random import Random

import pytest
import torch

import zbfx
from benchmarks.coverage.fuzz_models import V_SHAPED, compiled_anyhow, draw
from benchmarks.coverage.random_models import RandomModel
from tests.support.models import MODELS, Maker, mirrored, mixed, mlp, t5, unet_batch_norm
from tests.support.reference import beside, placed_model, rescheduled, shared, traced_model
from zbfx.compiled import Compiled
from zbfx.errors import TraceError
from zbfx.passes.canonicalize import canonicalize
from zbfx.passes.extract import extract
from zbfx.passes.partition import partition
from zbfx.passes.recompute import Level, recompute
from zbfx.passes.split import split
from zbfx.program.chain import order_of_ranks
from zbfx.program.codegen import optimizer_program
from zbfx.replicas import replicated
from zbfx.trace.tracer import trace
from zbfx.verify import verified, verify

STAGES, MICROBATCHES = 3, 4


def pipeline(make: Maker) -> zbfx.Pipeline:
    return shared(make, STAGES, MICROBATCHES, check=False)


def verify_pipeline(pipe: Compiled) -> None:
    verify(pipe.stages, after="extract")
    verify(pipe.programs, after="generate", given=pipe.schedule)


@pytest.mark.slow
@pytest.mark.parametrize("make", [*(pytest.param(m, id=name) for name, m in MODELS.items()), mirrored, mixed])
def test_models_keep_every_rule(make: Maker) -> None:
    cut = verify(placed_model(make, STAGES), after="partition")
    divided = verified(split, cut)
    for level in Level:
        again = verified(recompute, divided, [level] * STAGES, in_flight=STAGES, random=True)
        assert len(verified(extract, again)) == STAGES


@pytest.mark.parametrize("make", [unet_batch_norm, t5])
def test_passes_before_the_cut_keep_every_rule(make: Maker) -> None:
    problem = make(1)
    raw, _ = trace(
        problem.model,
        problem.loss_fn,
        problem.inputs,
        dict(problem.kwargs),
        problem.targets,
        device=torch.device("cpu"),
    )
    joint = verified(canonicalize, verify(raw, after="trace"))
    cut = verified(partition, joint, range(STAGES), seconds=lambda node: 1.0, bytes_per_s=1e9)
    assert len(cut.joint.outputs) == len(joint.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("make", [mlp, unet_batch_norm, t5])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_programs_keep_every_rule(make: Maker, schedule: str) -> None:
    """As they are, with Ws beside Bs, for replicas, and for optimizer steps that wait for no barrier."""
    for microbatches in (1, MICROBATCHES):
        pipe = rescheduled(pipeline(make), microbatches, schedule)
        for one in (pipe.compiled, beside(pipe).compiled):
            ranks = order_of_ranks(one.schedule, one.loss_rank)
            summed, validated = replicated(one, 2), one.validated(ranks, 1)
            for other in (one, summed, summed.sharded(), validated, summed.validated(ranks, 1)):
                verify_pipeline(other)
            assert validated.chain is not None
            steps = [optimizer_program(validated.chain, one.schedule, rank) for rank in range(STAGES)]
            verify(tuple(steps), after="optimizer_program", given=one.schedule)


@pytest.mark.slow
@pytest.mark.transformers
@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "interleaved-1f1b"])
def test_programs_of_two_stages_a_rank_keep_every_rule(schedule: str) -> None:
    pipe = shared(t5, 2, 4, schedule=schedule, stages_per_rank=2, check=False).compiled
    for one in (pipe, replicated(pipe, 2), pipe.validated(order_of_ranks(pipe.schedule, pipe.loss_rank), 1)):
        verify_pipeline(one)


@pytest.mark.slow
def test_random_models_keep_every_rule() -> None:
    kept = 0
    for seed in range(24):
        fuzzed = draw(Random(seed))
        schedule = "zb-v-order" if fuzzed.schedules[0] in V_SHAPED else "gpipe"
        try:
            pipe = compiled_anyhow(RandomModel(fuzzed.recipe), fuzzed, schedule)
        except TraceError:  # nothing to train
            continue
        verify_pipeline(pipe.compiled)
        verify_pipeline(replicated(pipe.compiled, 2))
        kept += 1
    assert kept > 20


def test_it_gives_what_it_got() -> None:
    joint = traced_model(mlp)
    assert verify(joint, after="canonicalize") is joint
    with pytest.raises(TypeError, match="found int"):
        verify(3, after="split")
