"""Random models under random cuts, placements and schedules, each against plain autograd.

    python benchmarks/coverage/fuzz_models.py --graphs 5000

Prints one JSON object: how many graphs agreed, how many were refused and why, how many were wrong, with their seeds.
`--seed N --graphs 1` repeats graph N.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks.coverage.random_models import (
    DOUBLE,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    RandomModel,
    Recipe,
    Step,
    draw_recipe,
    loss_of,
)
from zbfx.errors import ZbfxError
from zbfx.plan import Action, CostTable, Kind
from zbfx.schedule import plan

TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4}
# Steps that compute in float32: their rounding reaches every gradient of the model.
IN_FLOAT32, FLOAT32_TOLERANCE = {"float32 linear", "through float32"}, 1e-5
# A gradient this small beside the largest is zero but for rounding, and compared with the latter.
ROUNDING = 1e-4
# How stages lie on ranks: one each; looped, two each; down the ranks and back up.
SHAPES = ("linear", "looped", "v")
LINEAR = ("gpipe", "1f1b", "zb-h1", "zb-2p", "user")
LOOPED = ("gpipe", "interleaved-1f1b", "user")
V_SHAPED = ("zb-v", "zb-v-order", "v-half", "v-min")
PROGRESS = 100  # seeds between two lines on stderr
SEARCH_S = 0.05  # the budget of a schedule that is searched for


@dataclass(frozen=True)
class Fuzzed:
    """A model, and how it is cut, placed and scheduled; one trace serves all its schedules."""

    recipe: Recipe
    ranks: int
    microbatches: int
    stages_per_rank: int
    schedules: tuple[str, ...]
    cuts: tuple[str, ...] | None
    seed: int


@dataclass(frozen=True)
class Outcome:
    """`refusal` is the text of a refusal, else `error` is the largest relative difference, and `wrong` says what is."""

    refusal: str | None = None
    error: float = 0.0
    wrong: str | None = None
    stages: int = 0


def draw(random: Random, shape: str | None = None) -> Fuzzed:
    """A random model with a random way to run it; `shape` is drawn too unless given."""
    recipe = draw_recipe(random)
    shape = shape or random.choice(("linear", "linear", *SHAPES))
    ranks = random.randint(1, 4) if shape == "linear" else 2
    known = {"linear": LINEAR, "looped": LOOPED, "v": V_SHAPED}[shape]
    per_rank = 1 if shape == "linear" else 2
    count = ranks * per_rank
    cuts = draw_cuts(random, recipe, count) if random.random() < 0.4 else None
    microbatches = ranks * random.randint(1, 2) if shape == "looped" else random.randint(1, 5)
    schedules = (random.choice(known), random.choice(known))
    return Fuzzed(recipe, ranks, microbatches, per_rank, schedules, cuts, random.randint(0, 99))


def owner(position: int, step: Step) -> str:
    """The submodule in which a step's operators run."""
    is_layer = step.kind not in ("embedding", "tied head") and len(step.layers) == 1
    return f"layers.{step.layers[0]}" if is_layer else f"steps.{position}"


def draw_cuts(random: Random, recipe: Recipe, stages: int) -> tuple[str, ...] | None:
    """Names of submodules in the order of their first use, none the first."""
    owners = list(dict.fromkeys(owner(k, step) for k, step in enumerate(recipe.steps)))[1:]
    if len(owners) < stages - 1:
        return None
    return tuple(owners[k] for k in sorted(random.sample(range(len(owners)), stages - 1)))


def batches(fuzzed: Fuzzed) -> list[tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor]]:
    """Per microbatch the inputs by position and by keyword, and the target."""
    generator = torch.Generator().manual_seed(fuzzed.seed)
    shape = (ROWS, LENGTH, WIDTH)
    scale = torch.rand(WIDTH, generator=generator) + 0.5
    rows: list[tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor]] = []
    for _ in range(fuzzed.microbatches):
        x = torch.randn(shape, generator=generator, dtype=DOUBLE)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.5
        rows.append(((x, ids), {"mask": mask, "scale": scale}, torch.randn(shape, generator=generator, dtype=DOUBLE)))
    return rows


@dataclass(frozen=True)
class Results:
    """What a step leaves: its loss, every gradient, every buffer, and the names of its parameters."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    listed: tuple[str, ...]


def results_of(model: nn.Module, loss: Tensor, listed: Sequence[str] | None = None) -> Results:
    """`listed`: by default the parameters that have a gradient."""
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    if listed is None:
        listed = [name for name, gradient in gradients.items() if gradient is not None]
    return Results(loss.detach(), gradients, {name: b.clone() for name, b in model.named_buffers()}, tuple(listed))


def plain(model: RandomModel, fuzzed: Fuzzed) -> Results | None:
    """Plain autograd on a copy of the model; None if the loss depends on no parameter."""
    model = copy.deepcopy(model)
    losses = []
    for args, kwargs, target in batches(fuzzed):
        if fuzzed.recipe.own_loss:
            loss = model(*args, **kwargs, target=target)["loss"]
        else:
            loss = loss_of(model(*args, **kwargs), target)
        if not loss.requires_grad:
            return None
        (loss / fuzzed.microbatches).backward()
        losses.append(loss.detach())
    return results_of(model, torch.stack(losses).mean())


def piped(model: RandomModel, pipe: zbfx.Pipeline, fuzzed: Fuzzed) -> Results:
    """One local step, on the model's state at the time of the call."""
    model.zero_grad()
    own = fuzzed.recipe.own_loss
    rows = [
        (args if own else (*args, target), kwargs | ({"target": target} if own else {}))
        for args, kwargs, target in batches(fuzzed)
    ]
    step = pipe.run_local()
    loss = step.run_split(rows)
    return results_of(model, loss, [name for name, _ in step.named_parameters()])


def compiled(model: RandomModel, fuzzed: Fuzzed, cuts: Sequence[str] | None, schedule: str) -> zbfx.Pipeline:
    args, kwargs, target = batches(fuzzed)[0]
    own = fuzzed.recipe.own_loss
    return zbfx.compile(
        model,
        stages=fuzzed.ranks,
        microbatches=fuzzed.microbatches,
        stages_per_rank=fuzzed.stages_per_rank,
        example_inputs=args,
        example_kwargs=kwargs | ({"target": target} if own else {}),
        example_targets=() if own else target,
        loss_fn=None if own else loss_of,
        schedule=schedule,
        cuts=cuts,
        device="cpu",
    )


def rescheduled(pipe: zbfx.Pipeline, fuzzed: Fuzzed, schedule: str) -> zbfx.Pipeline:
    """The same stages in another order."""
    costs = pipe.schedule.costs
    order: Any = user_order(costs, fuzzed.microbatches, fuzzed.seed) if schedule == "user" else schedule
    planned = plan(costs, fuzzed.microbatches, schedule=order, budget_s=SEARCH_S)
    return replace(pipe, compiled=replace(pipe.compiled, schedule=planned))


def user_order(costs: CostTable, microbatches: int, seed: int) -> list[list[Action]]:
    """A random order in which every action's inputs are there: per rank what it does, first to last."""
    random, last = Random(seed), len(costs.placement) - 1
    orders: list[list[Action]] = [[] for _ in range(costs.rank_count)]
    ready = [Action(Kind.F, 0, k) for k in range(microbatches)]
    while ready:
        action = ready.pop(random.randrange(len(ready)))
        if action.kind is Kind.F:  # a stage's Fs run in ascending order
            due = min(
                (a for a in [action, *ready] if (a.kind, a.stage) == (Kind.F, action.stage)),
                key=attrgetter("microbatch"),
            )
            if due is not action:
                ready[ready.index(due)], action = action, due
        orders[costs.placement[action.stage]].append(action)
        stage, k = action.stage, action.microbatch
        backward = Kind.BW if random.random() < 0.3 else Kind.B
        if action.kind is Kind.F:
            ready.append(Action(Kind.F, stage + 1, k) if stage < last else Action(backward, stage, k))
            continue
        if action.kind is Kind.B:
            ready.append(Action(Kind.W, stage, k))
        if action.kind is not Kind.W and stage > 0:
            ready.append(Action(backward, stage - 1, k))
    return orders


def tolerances(recipe: Recipe) -> Mapping[torch.dtype, float]:
    """Largest relative difference allowed, by dtype of the value; others must agree in bits."""
    if IN_FLOAT32.isdisjoint(step.kind for step in recipe.steps):
        return TOLERANCE
    return {**TOLERANCE, DOUBLE: FLOAT32_TOLERANCE}


def largest(tensor: Tensor) -> float:
    """The largest entry's size; 0 where there is none."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def differences(
    found: Results,
    expected: Results,
    tolerance: Mapping[torch.dtype, float] = TOLERANCE,
    noise: Mapping[str, float] | None = None,
) -> tuple[float, str | None]:
    """The largest relative difference among float64 gradients, buffers and the loss; what is wrong, if anything is.
    Where both are within ten times the `noise` of a gradient, it is zero but for rounding, and so is the difference."""
    if len(set(found.listed)) < len(found.listed) or not set(expected.listed) <= set(found.listed):
        return float("inf"), f"the step's parameters are {found.listed}; trained are {expected.listed}"
    worst = 0.0
    present = [largest(gradient) for gradient in expected.gradients.values() if gradient is not None]
    floor = ROUNDING * max(present)
    all_found = {**found.gradients, **found.buffers, "loss": found.loss}
    for name, wanted in {**expected.gradients, **expected.buffers, "loss": expected.loss}.items():
        have = all_found[name]
        if wanted is None or have is None:
            if (wanted is None) != (have is None):
                return float("inf"), f"{name}: {'no gradient' if have is None else 'a gradient where there is none'}"
            continue
        difference = largest(have - wanted)
        if noise and max(difference, largest(wanted)) <= 10 * noise.get(name, 0.0):
            continue
        error = difference / max(largest(wanted), floor, 1e-30)
        if wanted.dtype in (DOUBLE, torch.complex128):
            worst = max(worst, error)
        if not error <= tolerance.get(wanted.dtype, 0.0):
            return error, f"{name}: relative difference {error:.3g}"
    return worst, None


def run(fuzzed: Fuzzed) -> Outcome | None:
    """Compile one model, step it under each of its schedules; None if there is nothing to train."""
    model = RandomModel(fuzzed.recipe)
    expected = plain(model, fuzzed)
    if expected is None:
        return None
    start = copy.deepcopy(model.state_dict())
    first = "zb-v-order" if fuzzed.schedules[0] in V_SHAPED else "gpipe"
    try:
        pipe = compiled_anyhow(model, fuzzed, first)
    except ZbfxError as refusal:
        return Outcome(refusal=str(refusal))
    worst = 0.0
    for schedule in fuzzed.schedules:
        model.load_state_dict(start)
        try:
            ordered = rescheduled(pipe, fuzzed, schedule)
        except ZbfxError as refusal:
            return Outcome(refusal=str(refusal))
        results = piped(model, ordered, fuzzed)
        error, wrong = differences(results, expected, tolerances(fuzzed.recipe))
        if wrong:
            model.load_state_dict(start)
            error, wrong = differences(results, expected, tolerances(fuzzed.recipe), noise_of(model, fuzzed, expected))
        if wrong:
            return Outcome(error=error, wrong=f"{schedule}: {wrong}", stages=len(pipe.stages))
        worst = max(worst, error)
    return Outcome(error=worst, stages=len(pipe.stages))


def noise_of(model: RandomModel, fuzzed: Fuzzed, expected: Results) -> dict[str, float]:
    """How much plain autograd's own gradients change where float64 parameters change in the last place or two."""
    noise: dict[str, float] = defaultdict(float)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        disturbed = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in (parameter for parameter in disturbed.parameters() if parameter.dtype == DOUBLE):
                spread = torch.rand(parameter.shape, generator=generator, dtype=DOUBLE) - 0.5
                parameter.mul_(1 + spread * 2 * torch.finfo(DOUBLE).eps)
        found = plain(disturbed, fuzzed)
        assert found is not None, "there is something to train"
        for name, gradient in expected.gradients.items():
            other = found.gradients[name]
            if gradient is not None and other is not None:
                noise[name] = max(noise[name], largest(other - gradient))
    return dict(noise)


def compiled_anyhow(model: RandomModel, fuzzed: Fuzzed, schedule: str) -> zbfx.Pipeline:
    """With the cuts that were drawn; where they name what computes nothing, or start two stages at once, balanced."""
    if fuzzed.cuts is not None:
        try:
            return compiled(model, fuzzed, fuzzed.cuts, schedule)
        except ZbfxError as refusal:
            if not str(refusal).startswith("cuts "):
                raise
    return compiled(model, fuzzed, None, schedule)


@dataclass
class Tally:
    """What has become of the graphs so far."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)  # by seed
    largest_error: float = 0.0

    def add(self, seed: int, outcome: Outcome | None) -> None:
        if outcome is None:
            self.counts["untrainable"] += 1
            return
        self.counts["graphs"] += 1
        self.counts["refused" if outcome.refusal else "wrong" if outcome.wrong else "equal"] += 1
        if outcome.refusal:
            self.refusals[outcome.refusal.partition(":")[0][:80]] += 1
        elif outcome.wrong:
            self.failures[seed] = outcome.wrong[:300]
            print(seed, outcome.wrong[:300], file=sys.stderr, flush=True)
        else:
            self.largest_error = max(self.largest_error, outcome.error)

    def summary(self) -> dict[str, Any]:
        counts = {kind: self.counts[kind] for kind in ("graphs", "equal", "refused", "wrong", "untrainable")}
        return {
            **counts,
            "largest_error": self.largest_error,
            "refusals": dict(self.refusals),
            "failures": self.failures,
            "torch": torch.__version__,
        }


def outcome_of(seed: int) -> Outcome | None:
    """The outcome of one seed; an error that is no refusal is wrong."""
    try:
        return run(draw(Random(seed)))
    except Exception as error:
        cause = f" from {error.__cause__}" if error.__cause__ else ""
        return Outcome(wrong=f"{type(error).__name__}: {error}{cause}")


def campaign(first_seed: int, graphs: int) -> dict[str, Any]:
    """Run random models until `graphs` have something to train; the summary. Tells how far it is on stderr."""
    begun, tally = perf_counter(), Tally()
    for seed in itertools.count(first_seed):
        if tally.counts["graphs"] >= graphs:
            break
        tally.add(seed, outcome_of(seed))
        if (seed + 1 - first_seed) % PROGRESS == 0:
            print(json.dumps(tally.summary()), file=sys.stderr, flush=True)
    return {**tally.summary(), "seconds": round(perf_counter() - begun, 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first graph; the others follow")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps(campaign(options.seed, options.graphs), indent=1))


if __name__ == "__main__":
    main()
