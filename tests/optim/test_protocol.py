"""What travels where an optimizer step waits for its verdict: skip connections, other shapes, prefixes of any
length."""

from __future__ import annotations

import pytest

from tests.support.models import mirrored
from tests.support.optimizers import same_bits, train
from tests.support.reference import compiled
from zbfx.program import ops

pytestmark = pytest.mark.usefixtures("known_traces")

RANKS, MICROBATCHES = 4, 6


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-2p", "auto", "zb-v-order"])
def test_with_skip_connections_steps_equal_the_barrier_in_bits(schedule: str) -> None:
    """Every step clips, so that every prefix runs twice, among them those that read what three ranks before made."""
    results = {}
    for sync in (True, False):
        problem = mirrored(MICROBATCHES)
        step = compiled(problem, RANKS, MICROBATCHES, schedule=schedule).run_local()
        results[sync] = train(problem, step, 4, max_norm=1e-3, sync=sync)
        if schedule in ("gpipe", "zb-2p", "auto") and not sync:
            assert step.engine.runners[0].program.chain.prefix == MICROBATCHES  # the whole forward
    assert same_bits(results[False], results[True])
    assert results[False].counts["repeated"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("on_new_shape", ["recompile", "symbolic"])
def test_with_skip_connections_and_other_shapes(on_new_shape: str) -> None:
    results = {}
    for sync in (True, False):
        problem = mirrored(9)
        step = compiled(problem, RANKS, MICROBATCHES).run_local(on_new_shape=on_new_shape)
        results[sync] = train(problem, step, 4, max_norm=1e-3, sync=sync, rows=(18, 12))
        assert len(step.pipelines) == 2
    assert same_bits(results[False], results[True])
    assert results[False].counts["repeated"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_a_prefix_posts_what_prefixes_send_alone(schedule: str) -> None:
    """A prefix may run twice, and as a captured graph ends once all that it posted has come."""
    problem = mirrored(MICROBATCHES)
    pipe = compiled(problem, RANKS, MICROBATCHES, schedule=schedule)
    for program in pipe.compiled.validated(tuple(range(RANKS)), state_size=1).programs:
        posts = [str(n.args[1]) for n in list(program.module.graph.nodes)[: program.verdict[0]] if n.target is ops.post]
        assert {program.messages[key].producer for key in posts} <= program.chain.early
        assert posts or program.rank == 0
