"""What is saved and what is computed again."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import zbfx
from benchmarks.gpt import GPT, GPTConfig, next_token_loss
from tests.support.live_bytes import measured_peaks
from tests.support.models import Problem, gpt, mlp, numbers, squares
from tests.support.reference import Gradients, assert_same, compiled, gradients, placed, shared, shared_problem, stepped
from zbfx.passes.extract import extract
from zbfx.passes.recompute import Level, recompute
from zbfx.passes.split import split
from zbfx.plan import Kind
from zbfx.rng import seeded

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


@pytest.mark.slow
def test_a_gpt_layer_saves_no_more_than_the_paper_says() -> None:
    saved_bytes, weight_saved_bytes = saved(Level.NONE)
    assert saved_bytes <= 34
    assert weight_saved_bytes <= 32


@pytest.mark.slow
def test_recomputation_saves_clearly_less_until_b_and_no_more_until_w() -> None:
    """Cheap: no output of a norm (2 + 2) or of the GELU (8). Full: an input a block and the message."""
    assert saved(Level.CHEAP)[0] == pytest.approx(saved(Level.NONE)[0] - 12, abs=0.1)
    assert saved(Level.FULL)[0] == 3
    assert saved(Level.CHEAP)[1] <= 32
    assert saved(Level.FULL)[1] <= 32


@pytest.mark.slow
@pytest.mark.parametrize("level", ["cheap", "full"])
def test_recomputed_values_have_the_same_bits_and_the_predicted_size(level: str) -> None:
    problem = shared_problem(gpt, 3, torch.float32)
    expected = stepped(problem, shared(gpt, 2, 3))
    pipe = shared(gpt, 2, 3, recompute=level)
    assert_same(stepped(problem, pipe), expected, tolerance=0)
    rows = pipe.compiled.signature.split((*problem.inputs, *problem.targets), problem.kwargs, 3)
    assert [memory.highest.peak_bytes for memory in pipe.memory] == [c.peak for c in measured_peaks(pipe, rows)]


@pytest.mark.slow
def test_below_the_smallest_limit_an_error_names_it_and_at_it_there_is_a_plan() -> None:
    problem = mlp(2)
    with pytest.raises(zbfx.NoFeasibleSchedule, match="smallest feasible limit is") as caught:
        compiled(problem, 2, 2, schedule="auto", mem_limit=1)
    smallest = int(caught.value.smallest_limit)
    pipe = compiled(problem, 2, 2, schedule="auto", mem_limit=smallest)
    assert max(memory.peak_bytes for memory in pipe.memory) <= smallest
    with pytest.raises(zbfx.NoFeasibleSchedule, match=f"{smallest:,}"):
        compiled(problem, 2, 2, schedule="auto", mem_limit=smallest - 1)


class Noisy(nn.Module):
    """Blocks of two kinds of dropout around batch norms, which write their statistics as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.dropout(torch.tanh(norm(layer(x))), 0.4)
            x = nn.functional.dropout2d(torch.sigmoid(x), 0.2)
        return x


@functools.cache
def noisy_step(level: str) -> tuple[tuple[Tensor, Gradients], dict[str, Tensor], float]:
    """Loss and gradients of the second of two steps, the buffers after it, and what the stages save."""
    torch.manual_seed(0)
    problem = Problem(Noisy(), squares, (numbers(6, 4, 6, 6),))
    pipe = compiled(problem, 2, 3, recompute=level, check=False)
    run = pipe.run_local(seed=5)
    for _ in range(2):
        problem.model.zero_grad()
        loss = run(*problem.inputs)
    saved_bytes = sum(float(stage.saved_bytes) for stage in pipe.stages)
    return (loss, gradients(problem.model)), dict(problem.model.named_buffers()), saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("level", ["cheap", "full"])
def test_dropout_masks_are_drawn_again_and_buffers_written_once(level: str) -> None:
    expected, expected_buffers, most = noisy_step("none")
    found, buffers, saved_bytes = noisy_step(level)
    assert saved_bytes < most
    assert_same(found, expected, tolerance=0)
    assert all(torch.equal(buffers[name], value) for name, value in expected_buffers.items())
    assert [buffers[f"norms.{i}.num_batches_tracked"].item() for i in range(6)] == [2 * 3] * 6


class DroppedBeside(nn.Module):
    """Only the embedding's gradient reads the mask of the second dropout; the linear layers' read its value."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.outer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = 2 * self.embedding(ids)
        dropped = nn.functional.dropout(self.inner(x), 0.3) + nn.functional.dropout(x, 0.3)
        return (self.head(self.outer(dropped)) - target).square().mean()


def test_parts_of_a_repeated_result_stay_together() -> None:
    example = (torch.randint(7, (2, 3)), torch.randn(2, 3, 4))
    pipe = zbfx.compile(DroppedBeside(), stages=1, microbatches=2, example_inputs=example, recompute="cheap")
    (stage,) = pipe.stages
    assert all(isinstance(value, Tensor) for value in stage.examples.values())
    repeated = [node for node in stage.phases[Kind.B].module.graph.nodes if node.target is seeded]
    assert [sorted(user.args[1] for user in node.users) for node in repeated] == [[0, 1], [0, 1]]
