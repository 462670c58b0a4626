"""Memory. Peaks to the byte are in tests/memory/test_predict.py."""

from __future__ import annotations

import gc

import pytest
from torch import Tensor, nn

from tests.cases.common import WIDTH, layers
from tests.support.models import Problem, ids, numbers, squares, token_loss
from tests.support.reference import compiled
from zbfx import NoFeasibleSchedule

VOCABULARY, HIDDEN = 32_000, 64


def language_model() -> Problem:
    blocks = [block for _ in range(6) for block in (nn.Linear(HIDDEN, HIDDEN), nn.Tanh())]
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCABULARY, bias=False))
    tokens = ids(8, 4, vocabulary=VOCABULARY)
    return Problem(model.to("meta"), token_loss, (tokens,), (tokens,))


@pytest.mark.slow
def test_case_60_limit_counts_what_a_rank_holds_all_the_time() -> None:
    """The first rank of a V holds embedding and head, weights and gradients: a limit below them is refused."""
    table_bytes = 2 * 8 * VOCABULARY * HIDDEN  # weight and gradient in float64
    cuts = ["4", "8", "13"]
    linear = compiled(language_model(), 4, 4, schedule="1f1b", cuts=cuts)
    assert [table_bytes <= peak < 2 * table_bytes for peak in linear.schedule.peak_bytes] == [True, False, False, True]
    limit = max(linear.schedule.peak_bytes)
    assert (
        compiled(language_model(), 4, 4, schedule="1f1b", cuts=cuts, mem_limit=limit).schedule.ranks
        == linear.schedule.ranks
    )
    with pytest.raises(NoFeasibleSchedule) as caught:
        compiled(language_model(), 4, 4, schedule="zb-v", cuts=["1", "3", "5", "7", "9", "11", "13"], mem_limit=limit)
    assert caught.value.smallest_limit >= 2 * table_bytes
    assert "rank 0" in str(caught.value)


def test_case_61_terms_of_memory_by_hand() -> None:
    """Two stages of Linear and tanh, 2 rows of 6 numbers of 8 bytes: 96 bytes a value.

    Stage 0 keeps the tanh's output until B; B leaves the gradient behind the tanh to W (its input is the caller's).
    Stage 1 keeps its input and the tanh's output, and B leaves input and gradient to W.
    """
    pipe = compiled(Problem(layers(2), squares, (numbers(6, WIDTH),)), 2, 3, cuts=["2"], check=False)
    value = 2 * WIDTH * 8
    first, second = pipe.schedule.costs.stages
    assert (first.saved_bytes, first.weight_saved_bytes) == (value, value)
    assert (second.saved_bytes, second.weight_saved_bytes) == (2 * value, 2 * value)
    for stage in (first, second):
        held = [stage.saved_bytes, stage.weight_saved_bytes - stage.saved_bytes, -stage.weight_saved_bytes]
        assert sum(held) == 0
        assert held[0] > 0 > held[2]


@pytest.mark.slow
def test_case_62_nothing_grows_over_steps() -> None:
    """Twenty steps whose losses are kept, without the garbage collector: one scalar a step is added."""
    problem = Problem(layers(3), squares, (numbers(6, WIDTH),))
    step = compiled(problem, 3, 3).run_local()
    kept: list[Tensor] = []

    def live() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    for _ in range(3):
        kept.append(step(*problem.inputs))
    gc.collect()
    gc.disable()
    try:
        before = live()
        for _ in range(20):
            kept.append(step(*problem.inputs))
        assert live() - before == 20
    finally:
        gc.enable()
    assert all(loss.grad_fn is None and not loss.requires_grad and loss.numel() == 1 for loss in kept)
    assert len({loss.item() for loss in kept}) == 1
