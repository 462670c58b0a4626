"""Optimizer steps without a barrier equal those with one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbfx
from examples.train_gpt import parse
from tests.optim.demo import losses
from tests.support.models import Problem, gpt2, mean_squares, mlp, numbers, unet_batch_norm
from tests.support.optimizers import INVERTIBLE, OPTIMIZERS, Result, adamw, same_bits, train
from tests.support.reference import compiled, cut, default_dtype, loss_of
from zbfx import rng
from zbfx.optim import PostValidated, pending
from zbfx.optim.state import Act
from zbfx.program.calls import PhaseCall
from zbfx.runtime.runner import RankRunner

pytestmark = pytest.mark.usefixtures("known_traces")

BLOCKS, WIDTH, MICROBATCHES = 4, 6, 3


class Loud(nn.Module):
    """Residual blocks; the gradient of block k is about `gain[k]` times as large as that of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.register_buffer("gain", torch.ones(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.blocks):
            x = x + self.get_buffer("gain")[k] * torch.tanh(block(x))
        return x


@functools.cache
def loud_pipe(ranks: int, dtype: torch.dtype, schedule: str = "zb-h1") -> tuple[Problem, zbfx.Pipeline, Any]:
    """A pipeline over `ranks`, each with at least one of the blocks, and the model's first state."""
    with default_dtype(dtype):
        torch.manual_seed(0)
        rows = 2 * MICROBATCHES
        problem = Problem(Loud(), mean_squares, (numbers(rows, WIDTH),), (numbers(rows, WIDTH, seed=2),))
        first = {name: value.clone() for name, value in problem.model.state_dict().items()}
        cuts = [f"blocks.{k}" for k in range(1, ranks)]
        return problem, compiled(problem, ranks, MICROBATCHES, schedule=schedule, cuts=cuts), first


def loud(ranks: int, dtype: torch.dtype, cause: int, *args: Any, schedule: str = "zb-h1", **options: Any) -> Result:
    """Train with a gradient of block `cause` that dominates."""
    problem, pipe, first = loud_pipe(ranks, dtype, schedule)
    problem.model.load_state_dict(first)
    problem.model.get_buffer("gain").copy_(torch.tensor([4.0 if k == cause else 0.1 for k in range(BLOCKS)]))
    problem.model.zero_grad()
    return train(problem, pipe.run_local(), *args, **options)


@functools.cache
def clipping(ranks: int, dtype: torch.dtype, cause: int, name: str) -> tuple[float, Result]:
    """A norm that about half of 30 steps exceed, and the barrier's result with it."""
    free = loud(ranks, dtype, cause, 10, OPTIMIZERS[name], sync=True, max_norm=None)
    max_norm = sorted(free.norms)[len(free.norms) // 2]
    barrier = loud(ranks, dtype, cause, 30, OPTIMIZERS[name], sync=True, max_norm=max_norm, scheduled=True)
    assert 0 < barrier.counts["clipped"] < 30, barrier.counts
    return max_norm, barrier


CAUSES = [(ranks, cause) for ranks in (1, 2, 3, 4) for cause in range(ranks)]
NAMES = list(OPTIMIZERS)
CASES = [(r, c, dtype, k) for k, (r, c) in enumerate(CAUSES) for dtype in (torch.float32, torch.bfloat16)]
CASES += [(3, 1, dtype, k) for k in range(len(NAMES)) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cause", "dtype", "index"), CASES)
def test_thirty_steps_equal_the_barrier_in_bits(ranks: int, cause: int, dtype: torch.dtype, index: int) -> None:
    """With a learning rate that changes between a step and its verdict."""
    name = NAMES[index % len(NAMES)]
    max_norm, barrier = clipping(ranks, dtype, cause, name)
    found = loud(ranks, dtype, cause, 30, OPTIMIZERS[name], max_norm=max_norm, rollback="exact", scheduled=True)
    assert same_bits(found, barrier)
    assert found.counts["clipped"] == barrier.counts["clipped"]
    assert found.counts["repeated"] == (barrier.counts["clipped"] if ranks > 1 else 0)
    # Ranks before the cause stepped early. The cause itself did so where the others made the norm too large.
    assert found.counts["rolled_back"] >= barrier.counts["clipped"] // 2 if cause else found.counts["rolled_back"] <= 5


# How far 30 steps drift from the barrier if every other step is taken back by arithmetic, relative to the largest
# entry of each parameter and each tensor of its state: a few roundings a step.
DRIFT = {torch.float32: 32 * 2.0**-24, torch.bfloat16: 16 * 2.0**-8}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(DRIFT))
@pytest.mark.parametrize("name", INVERTIBLE)
def test_thirty_steps_by_arithmetic_stay_within_the_bound(name: str, dtype: torch.dtype) -> None:
    max_norm, barrier = clipping(3, dtype, 1, name)
    found = loud(3, dtype, 1, 30, OPTIMIZERS[name], max_norm=max_norm, rollback="arithmetic", scheduled=True)
    assert found.counts["rolled_back"] > 0
    for key, expected in barrier.parameters.items():
        error = (found.parameters[key].double() - expected.double()).abs().max()
        assert error <= DRIFT[dtype] * expected.double().abs().max(), (key, float(error))
        for kind, number in barrier.state[key].items():
            error = (found.state[key][kind].double() - number.double()).abs().max()
            assert error <= DRIFT[dtype] * number.double().abs().max(), (key, kind, float(error))


def four_steps(kind: str, **options: Any) -> Result:
    return poisoned(4, {1} if kind == "skip" else set(), max_norm=0.05 if kind == "clip" else 1e6, **options)


@functools.cache
def with_barrier(kind: str) -> Result:
    return four_steps(kind, sync=True)


@pytest.mark.slow
@pytest.mark.parametrize("early", range(16))
@pytest.mark.parametrize("kind", ["clean", "clip", "skip"])
def test_every_subset_of_ranks_that_stepped_early(early: int, kind: str) -> None:
    """Bit r of `early`: rank r steps, whatever it knows; the others wait."""

    def prepare(optimizer: PostValidated) -> None:
        optimizer.early_act = lambda rank, partial: Act.STEPPED if early >> rank & 1 else Act.WAITED  # type: ignore[method-assign]

    found = four_steps(kind, prepare=prepare)
    assert same_bits(found, with_barrier(kind))
    assert found.counts["skipped"] == (1 if kind == "skip" else 0)
    assert found.counts["clipped"] == (4 if kind == "clip" else 0)
    wrong = {"clean": early != 15, "clip": True, "skip": False}[kind] * 4
    if kind == "skip":
        wrong = 3 * (early != 15) + (early != 0)
    assert found.counts["repeated"] == wrong


def poisoned(ranks: int, steps: set[int], stage: int = 1, phase: str = "F", **options: Any) -> Result:
    """Four steps; in some, a phase of a stage makes a NaN of its second microbatch."""
    problem, pipe, first = loud_pipe(ranks, torch.float32)
    problem.model.load_state_dict(first)
    problem.model.get_buffer("gain").fill_(1.0)
    problem.model.zero_grad()
    step = replace(pipe, compiled=replace(pipe.compiled)).run_local()  # programs of its own
    prepare = options.pop("prepare", lambda optimizer: None)

    def patched(optimizer: PostValidated) -> None:
        prepare(optimizer)
        for runner in step.engine.runners:
            for call in runner.calls:
                if call.phase.name == f"{phase}{stage}":
                    spoil(call, lambda seed: step.count in steps and seed == rng.mix(step.worker.seed_of_step(), 1))

    return train(problem, step, 4, prepare=patched, **options)


def spoil(call: PhaseCall, when: Callable[[int], bool]) -> None:
    """Make the results of a phase, or the gradients of a W, not finite for microbatches with some seeds."""
    take = call.take

    def spoilt(box: list[Any]) -> Any:
        seed = box[0].seed
        results = take(box)
        if not when(seed):
            return results
        if not results:
            call.accumulators[-1].fill_(float("inf"))
        return pytree.tree_map(lambda value: value * float("nan"), results)

    call.take = spoilt  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("phase", ["F", "B", "W"])
def test_nan_in_one_microbatch_of_one_stage(ranks: int, phase: str) -> None:
    stage = min(1, ranks - 1)
    if phase == "B" and stage == 0:
        return  # the first stage sends no gradient
    causes: list[str] = []

    def prepare(optimizer: PostValidated) -> None:
        settled, explain = optimizer.settled, optimizer.explain

        def noted(verdict: Any, rolled_back: bool) -> None:
            causes.append("")
            settled(verdict, rolled_back)

        def explained() -> None:
            explain()
            if optimizer.verdict is not None:
                causes[-1] = optimizer.verdict.cause

        optimizer.settled, optimizer.explain = noted, explained  # type: ignore[method-assign]

    expected = poisoned(ranks, {1}, stage, phase, sync=True, max_norm=1.0)
    found = poisoned(ranks, {1}, stage, phase, max_norm=1.0, prepare=prepare)
    assert found.parameters.keys() == expected.parameters.keys()
    assert all(torch.equal(p, expected.parameters[name]) for name, p in found.parameters.items())
    assert all(p.isfinite().all() for p in found.parameters.values())
    assert found.counts["skipped"] == expected.counts["skipped"] == 1
    assert [cause != "" for cause in causes] == [False, True, False, False]
    if phase == "W":
        assert causes[1].startswith("no value between stages, but the gradient of blocks.")
        assert f"(stage {stage})" in causes[1]
    else:
        assert causes[1] == f"{phase}{stage}.1 (stage {stage}, microbatch 1)"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h2"])
def test_schedules(schedule: str) -> None:
    max_norm, barrier = clipping(4, torch.float32, 2, "adamw")
    options: dict[str, Any] = {"max_norm": max_norm, "schedule": schedule, "scheduled": True}
    found = loud(4, torch.float32, 2, 30, OPTIMIZERS["adamw"], **options)
    assert same_bits(found, barrier)
    assert found.counts["rolled_back"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-v-order", "v-half", "v-min", "interleaved-1f1b"])
def test_schedules_with_two_stages_a_rank(schedule: str) -> None:
    problem = mlp(4)
    first = {name: value.clone() for name, value in problem.model.state_dict().items()}
    pipe = compiled(problem, 2, 4, schedule=schedule)
    results = {}
    for sync in (True, False):
        problem.model.load_state_dict(first)
        results[sync] = train(problem, pipe.run_local(), 6, max_norm=0.2, sync=sync)
    assert same_bits(results[False], results[True])
    assert results[False].counts["repeated"] == 6


def test_where_every_step_clips_and_where_none_does() -> None:
    always = loud(4, torch.float32, 3, 12, max_norm=1e-3)
    assert always.counts == {"steps": 12, "clipped": 12, "skipped": 0, "rolled_back": 0, "repeated": 12}
    assert same_bits(always, loud(4, torch.float32, 3, 12, max_norm=1e-3, sync=True))
    never = loud(4, torch.float32, 3, 12, max_norm=1e3)
    assert never.counts == {"steps": 12, "clipped": 0, "skipped": 0, "rolled_back": 0, "repeated": 0}
    assert same_bits(never, loud(4, torch.float32, 3, 12, max_norm=1e3, sync=True))


def test_a_step_after_a_clipped_one_waits_unless_told_otherwise() -> None:
    max_norm, barrier = clipping(3, torch.float32, 2, NAMES[0])
    found = loud(3, torch.float32, 2, 30, OPTIMIZERS[NAMES[0]], max_norm=max_norm, scheduled=True, sync=None)
    assert same_bits(found, barrier)
    assert found.counts["clipped"] == barrier.counts["clipped"]
    clips = [norm > max_norm for norm in barrier.norms]
    begins = sum(clip and not before for before, clip in zip([False, *clips], clips, strict=False))
    assert found.counts["repeated"] == begins < barrier.counts["clipped"]


def test_early_messages_are_dropped_before_a_step_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that sent one waits until it is, and may be what a correction of another rank waits for."""
    events: list[str] = []
    drop = RankRunner.drop_early

    def dropped(self: RankRunner, *args: Any) -> Iterator[Any]:
        events.append(f"rank {self.rank} drops")
        yield from drop(self, *args)

    def prepare(optimizer: PostValidated) -> None:
        settled = optimizer.settled

        def noted(verdict: Any, rolled_back: bool) -> None:
            events.append("corrected")
            settled(verdict, rolled_back)

        optimizer.settled = noted  # type: ignore[method-assign]

    monkeypatch.setattr(RankRunner, "drop_early", dropped)
    loud(3, torch.float32, 2, 4, max_norm=1e-3, prepare=prepare)
    assert len(events) == 3 * 4 + 1
    *between_steps, last = events
    assert last == "corrected", "no forwards have run before it"
    for step in range(0, 12, 4):
        assert between_steps[step] != "corrected"
        assert sorted(between_steps[step : step + 4]) == ["corrected", *(f"rank {rank} drops" for rank in range(3))]


@pytest.mark.parametrize("early", [0, 7])
def test_skipped_steps_are_explained_once_the_next_one_is_launched(early: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks tell each other why. Bit r of `early`: rank r stepped, so that forwards run again."""
    events: list[str] = []
    complete = RankRunner.complete

    def completed(self: RankRunner, *args: Any) -> Any:
        result = yield from complete(self, *args)
        events.append("launched")
        return result

    def explained(verdict: Any, *args: Any) -> Any:
        events.append("explained")
        return replace(verdict, cause="unknown")

    def prepare(optimizer: PostValidated) -> None:
        events.clear()  # those of the check, if this is where the pipeline is compiled
        optimizer.early_act = lambda rank, partial: Act.STEPPED if early >> rank & 1 else Act.WAITED  # type: ignore[method-assign]

    monkeypatch.setattr(RankRunner, "complete", completed)
    monkeypatch.setattr(pending, "describe", explained)
    poisoned(4, {1, 3}, prepare=prepare)
    step = ["launched"] * 4
    assert events == [*step, *step, *step, "explained", *step, "explained"]


class Rotated(nn.Module):
    """A complex matrix between real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).to(self.turn.dtype) @ self.turn).abs())


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_complex_parameters(max_norm: float) -> None:
    """Against plain autograd and torch.nn.utils.clip_grad_norm_."""
    with default_dtype(torch.float64):
        rows = (numbers(8, WIDTH),), (numbers(8, WIDTH, seed=2),)
        problem, plain = (Problem(Rotated(), mean_squares, *rows) for _ in range(2))
        found = train(problem, compiled(problem, 2, 4).run_local(), 4, max_norm=max_norm, rolled=False)
        optimizer = adamw(plain.model.parameters())
        norms = []
        for _ in range(4):
            for inputs, targets in zip(plain.inputs[0].chunk(4), plain.targets[0].chunk(4), strict=True):
                (mean_squares(plain.model(inputs), targets) / 4).backward()
            norms.append(float(nn.utils.clip_grad_norm_(plain.model.parameters(), max_norm)))
            optimizer.step()
            optimizer.zero_grad()
    assert found.norms == pytest.approx(norms[: len(found.norms)], rel=1e-12)
    assert found.counts["clipped"] == (4 if max_norm == 0.5 else 0)
    for name, parameter in plain.model.named_parameters():
        assert (found.parameters[name] - parameter).abs().max() < 1e-10


def test_clipping_equals_that_of_torch() -> None:
    """Against plain autograd and torch.nn.utils.clip_grad_norm_ in float64."""
    with default_dtype(torch.float64):
        problem, plain = mlp(4), mlp(4)
        step = compiled(problem, 3, 4).run_local()
        optimizer = PostValidated(torch.optim.AdamW(step.parameters(), lr=1e-2), step, max_norm=0.1)
        reference = torch.optim.AdamW(plain.model.parameters(), lr=1e-2)
        for _ in range(5):
            step(*problem.inputs, *problem.targets)
            optimizer.step()
            optimizer.zero_grad()
            for inputs, targets in cut((plain.inputs, plain.targets), 4):
                (loss_of(plain, plain.model, inputs, targets, {}) / 4).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
            reference.step()
            reference.zero_grad()
            optimizer.settle()
            assert optimizer.verdict is not None
            assert optimizer.verdict.norm == pytest.approx(float(norm), rel=1e-12)
            assert optimizer.verdict.factor < 1.0
        for (name, found), expected in zip(step.named_parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.transformers
def test_tied_weights_count_once() -> None:
    problem = alone = gpt2(3)
    first = {name: value.clone() for name, value in problem.model.state_dict().items()}
    pipe = compiled(problem, 3, 3)
    step = pipe.run_local()
    optimizer = PostValidated(adamw(step.parameters()), step, max_norm=0.1)
    step(*problem.inputs, *problem.targets)
    expected = torch.nn.utils.get_total_norm([p.grad for p in problem.model.parameters() if p.grad is not None])
    optimizer.step()
    optimizer.settle()
    assert optimizer.verdict is not None
    assert optimizer.verdict.norm == pytest.approx(float(expected), rel=1e-5)
    results = {}
    for sync in (True, False):
        alone.model.load_state_dict(first)
        alone.model.zero_grad()
        results[sync] = train(alone, pipe.run_local(), 4, max_norm=1.0, sync=sync)
    assert same_bits(results[False], results[True])


@pytest.mark.slow
def test_buffers_that_forwards_write_are_restored() -> None:
    found = {}
    problem = unet_batch_norm(3)
    pipe, first = compiled(problem, 2, 3), copy.deepcopy(problem.model.state_dict())
    for sync in (True, False):
        problem.model.load_state_dict(first)
        problem.model.zero_grad()
        result = train(problem, pipe.run_local(), 4, max_norm=0.01, sync=sync)
        found[sync] = result, {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
    assert same_bits(found[False][0], found[True][0])
    assert found[False][0].counts["repeated"] == 4
    assert all(torch.equal(buffer, found[True][1][name]) for name, buffer in found[False][1].items())


def test_masks_of_forwards_that_run_again_are_the_same() -> None:
    results = {}
    for sync in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(b for _ in range(3) for b in (nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())))
        problem = replace(mlp(3), model=model)
        results[sync] = train(problem, compiled(problem, 3, 3).run_local(seed=3), 4, max_norm=0.01, sync=sync)
    assert same_bits(results[False], results[True])


def other_shapes() -> Iterator[int]:
    yield from (3, 6, 3, 6, 6, 3)


def test_batches_of_other_shapes_between_a_step_and_its_verdict() -> None:
    found = {}
    for sync in (True, False):
        problem = mlp(3)
        step = compiled(problem, 2, 3).run_local(on_new_shape="recompile")
        optimizer = PostValidated(adamw(step.parameters()), step, max_norm=0.05, sync=sync)
        losses = []
        for rows in other_shapes():
            losses.append(step(problem.inputs[0][:rows], problem.targets[0][:rows]).item())
            optimizer.step()
            optimizer.zero_grad()
        found[sync] = losses, step.evaluate(*problem.inputs, *problem.targets).item()
        assert optimizer.pending is None  # evaluate settles
    assert found[False] == found[True]


@pytest.mark.parametrize("sync", [True, False])
def test_what_ran_without_the_optimizer_is_loaded_and_captured_anew(sync: bool) -> None:
    """Its steps look at more values."""
    problem = mlp(3)
    step = compiled(problem, 2, 3).run_local()
    before = step.engine
    before.runs, before.captured = 3, object()
    PostValidated(torch.optim.SGD(step.parameters()), step, sync=sync)
    assert (step.engine is before) == sync
    assert (step.engine.runs, step.engine.captured, before.captured) == (0, None, None)


def test_gradients_accumulate_over_several_steps() -> None:
    """Also where nothing is cleared between the optimizer's steps: what was clipped stays clipped."""
    found: dict[bool, tuple[list[float], list[Tensor]]] = {}
    for sync in (True, False):
        problem = mlp(3)
        step = compiled(problem, 3, 3).run_local()
        optimizer = PostValidated(adamw(step.parameters()), step, max_norm=0.05, sync=sync)
        losses = []
        for count in range(6):
            losses.append(step(*problem.inputs, *problem.targets).item())
            if count % 2:
                optimizer.step()
            if count == 3:
                optimizer.zero_grad()
        optimizer.settle()
        found[sync] = losses, [t.detach() for p in step.parameters() for t in (p, p.grad) if t is not None]
    assert found[False][0] == found[True][0]
    assert len(found[False][1]) == len(found[True][1]) == 2 * 12
    assert all(torch.equal(a, b) for a, b in zip(found[False][1], found[True][1], strict=True))


def test_tokens_of_several_steps_are_divided_once_by_their_count() -> None:
    """Two batches with unequal numbers of tokens, some ignored, against plain autograd over all of them."""

    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-1)

    with default_dtype(torch.float64):
        problem, plain = replace(mlp(3), loss_fn=summed), mlp(3)
        inputs = problem.inputs[0]
        batches = [torch.tensor([1, -1, 3, -1, -1, 0]), torch.tensor([2, 5, -1, 7, 1, 1])]
        problem = replace(problem, targets=(batches[0],))
        step = compiled(problem, 2, 3, loss_reduction="sum").run_local()
        optimizer = PostValidated(torch.optim.SGD(step.parameters(), lr=1.0), step, max_norm=100.0)
        losses = [step(inputs, targets) for targets in batches]
        optimizer.step(divide_by=8.0)
        optimizer.settle()
        loss = summed(plain.model(torch.cat([inputs, inputs])), torch.cat(batches)) / 8
        loss.backward()
        assert float(sum(losses) / 8) == pytest.approx(loss.item(), rel=1e-12)
        for (name, found), expected in zip(step.named_parameters(), plain.model.parameters(), strict=True):
            assert expected.grad is not None
            torch.testing.assert_close(found, expected - expected.grad, rtol=1e-12, atol=1e-14, msg=name)
        with pytest.raises(zbfx.ZbfxError, match="divide_by is a finite number above 0; found 0"):
            optimizer.step(divide_by=0.0)


def test_half_precision_overflow_in_one_stage_lowers_the_scale() -> None:
    """Large inputs of the first layer make its gradient overflow alone, once the scale is low enough for the others."""
    problem = mlp(3)
    problem = replace(problem, inputs=(problem.inputs[0] * 1000,))
    with torch.no_grad():
        problem.model.get_parameter("0.weight").mul_(0.001)
    with torch.autocast("cpu", dtype=torch.float16):
        pipe = compiled(problem, 3, 3)
    step = pipe.run_local()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    optimizer = PostValidated(adamw(step.parameters()), step, max_norm=1.0, grad_scaler=scaler, sync=False)
    before = [p.detach().clone() for p in step.parameters()]
    scales, verdicts = [scaler.get_scale()], []
    for _ in range(20):
        step(*problem.inputs, *problem.targets)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.settle()
        assert optimizer.verdict is not None
        verdicts.append(optimizer.verdict)
        scales.append(scaler.get_scale())
        if all(v.skipped for v in verdicts):
            assert all(torch.equal(p, old) for p, old in zip(step.parameters(), before, strict=True))
    assert verdicts[0].skipped
    assert not verdicts[-1].skipped
    *_, last = (verdict for verdict in verdicts if verdict.skipped)
    assert last.nonfinite == ("0.weight",)
    assert "the gradient of 0.weight (stage 0)" in last.cause
    assert last.acts == (Act.WAITED, Act.WAITED, Act.KNEW)
    tracker = 0
    for verdict, scale, after in zip(verdicts, scales, scales[1:], strict=False):
        tracker = 0 if verdict.skipped else tracker + 1
        assert after == (scale / 2 if verdict.skipped else scale * 2 if tracker == 2 else scale)
        tracker %= 2


@pytest.mark.slow
def test_losses_of_the_demo_equal_those_with_a_barrier() -> None:
    """A smaller one, for fewer steps; `python -m tests.optim.demo --steps 200` trains the demo's own."""
    sizes = {"steps": 8, "layers": 4, "hidden": 48, "sequence": 32, "microbatches": 4}
    job = parse([text for name, value in sizes.items() for text in (f"--{name}", str(value))])
    (found, counts), (expected, _) = losses(job, sync=False), losses(job, sync=True)
    assert found == expected
    assert counts.repeated == counts.clipped > 0
    assert found[-1] < 0.9 * found[0]
