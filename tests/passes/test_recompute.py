"""What is saved and what is computed again. Run: pytest tests/passes/test_recompute.py"""

from __future__ import annotations

import functools

import pytest
import torch

import zbfx
from benchmarks.gpt import GPT, GPTConfig, next_token_loss
from tests.live_bytes import measured_peaks
from tests.models import Problem, gpt, mlp
from tests.reference import assert_same, compiled, placed, stepped
from zbfx.passes.extract import extract
from zbfx.passes.recompute import Level, recompute
from zbfx.passes.split import split

CONFIG = GPTConfig(layers=8, hidden=256, heads=4, sequence=128, vocabulary=512)
ROWS, LAYERS = 2, 2  # of a microbatch; of a stage
SBH = CONFIG.sequence * ROWS * CONFIG.hidden


@functools.cache
def saved(level: Level) -> tuple[float, float]:
    """M_B and M_W of a middle stage in s b h bytes a layer, in 16 bit."""
    with torch.device("meta"):
        model = GPT(CONFIG).bfloat16()
        ids = torch.empty(ROWS, CONFIG.sequence, dtype=torch.long)
    divided = split(placed(Problem(model, next_token_loss, (ids,), (ids,)), 4, ["blocks.2", "blocks.4", "blocks.6"]))
    stage = extract(recompute(divided, [level] * 4, in_flight=4, random=True))[1]
    return stage.saved_bytes / SBH / LAYERS, stage.weight_saved_bytes / SBH / LAYERS


def test_a_gpt_layer_saves_no_more_than_the_paper_says() -> None:
    saved_bytes, weight_saved_bytes = saved(Level.NONE)
    assert saved_bytes <= 34
    assert weight_saved_bytes <= 32


def test_recomputation_saves_clearly_less_until_b_and_no_more_until_w() -> None:
    """Cheap: no output of a norm (2 + 2) or of the GELU (8). Full: an input a block and the message."""
    assert saved(Level.CHEAP)[0] == pytest.approx(saved(Level.NONE)[0] - 12, abs=0.1)
    assert saved(Level.FULL)[0] == 3
    assert saved(Level.CHEAP)[1] <= 32
    assert saved(Level.FULL)[1] <= 32


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_recomputed_values_have_the_same_bits_and_the_predicted_size(level: str) -> None:
    problem = gpt(3)
    expected = stepped(problem, compiled(problem, 2, 3))
    pipe = compiled(problem, 2, 3, recompute=level)
    assert_same(stepped(problem, pipe), expected, tolerance=0)
    rows = pipe.signature.split((*problem.inputs, *problem.targets), problem.kwargs, 3)
    assert [memory.highest.peak_bytes for memory in pipe.memory] == [c.peak for c in measured_peaks(pipe, rows)]


def test_below_the_smallest_limit_an_error_names_it_and_at_it_there_is_a_plan() -> None:
    problem = mlp(2)
    with pytest.raises(zbfx.NoFeasibleSchedule, match="smallest feasible limit is") as caught:
        compiled(problem, 2, 2, schedule="auto", mem_limit=1)
    smallest = int(caught.value.smallest_limit)
    pipe = compiled(problem, 2, 2, schedule="auto", mem_limit=smallest)
    assert max(memory.peak_bytes for memory in pipe.memory) <= smallest
    with pytest.raises(zbfx.NoFeasibleSchedule, match=f"{smallest:,}"):
        compiled(problem, 2, 2, schedule="auto", mem_limit=smallest - 1)
