"""One random model of the wider kinds under plain PyTorch and as a pipeline: are all results equal?"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import zbfx
from benchmarks.coverage.ambient import MODES
from benchmarks.coverage.fuzz_models import largest, user_order
from benchmarks.coverage.random_models import DOUBLE
from benchmarks.coverage.wide_models import (
    REDUCED,
    ROWS,
    SINGLE,
    Batch,
    Wide,
    WideModel,
    dims_of,
    joined,
    loss_of,
    microbatches_of,
)
from benchmarks.coverage.wide_parts import REFUSED
from zbfx import rng
from zbfx.errors import ZbfxError
from zbfx.graphs import Joint
from zbfx.replayed import Replayed

RATE = 0.05  # by which parameters follow their gradients between steps
SEED = 11  # of the random numbers
# A value this small beside the largest of its kind is zero but for rounding, and compared with the latter.
ROUNDING = 1e-4
NOISES = 4  # a difference of so many times plain PyTorch's own noise is rounding
TOLERANCE = {DOUBLE: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative, by a model's least precise dtype
OF_TRANSFORMS = "called inside a transform of torch.func"
OUT_OF_ORDER = "ascending order of microbatches"


@dataclass(frozen=True)
class Outcome:
    """`refusal`: why the model was refused; `meant`: and so it should be. `wrong` says what differs."""

    refusal: str | None = None
    meant: bool = False
    wrong: str | None = None
    error: float = 0.0
    invalid: str | None = None  # why plain PyTorch cannot run the model either


@dataclass
class Found:
    """What a step leaves, by name."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@dataclass
class Judge:
    """Plain PyTorch: a model and its loss, with gradients accumulated over the microbatches."""

    wide: Wide
    model: WideModel
    loss_fn: Any
    worst: float = 0.0
    before: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, wide: Wide) -> Judge:
        return cls(wide, WideModel(wide.recipe, judged=True), loss_of(wide.recipe))

    def named(self) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        return named(self.model, self.loss_fn)

    def losses(self, part: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss of a microbatch, and its count."""
        args, kwargs = part.call(self.wide.recipe)
        if self.loss_fn is None:
            return self.model(*args, **kwargs)["loss"], None
        found = self.loss_fn(self.model(*args[:2], **kwargs), *args[2:])
        return found if isinstance(found, tuple) else (found, None)

    def weigh(self, parts: list[Batch]) -> float:
        """The gradient of the batch's loss by a microbatch's."""
        recipe = self.wide.recipe
        if recipe.loss == "count":
            targets = [part.target.movedim(recipe.dims[2], 0)[..., 0] for part in parts]
            count = sum(int((target > -0.5).sum()) for target in targets)
            return 1.0 / count if count else 0.0
        return 1.0 if recipe.loss == "sum" else 1.0 / len(parts)

    def step(self, parts: list[Batch], joint: Joint, seed: int) -> Found:
        """The results of a training step; the random numbers are those of the pipeline."""
        replay, weight, total = Replayed(joint), self.weigh(parts), torch.zeros((), dtype=torch.float32)
        under = MODES.get(self.wide.followed, lambda call: call())
        for k, part in enumerate(parts):
            replay.begin(rng.mix(seed, k))
            with replay:
                loss, _ = under(partial(self.losses, part))
                replay.begin_backward()
                loss.backward(torch.full_like(loss, weight))
            total = total + of_batch(loss) * weight
        return found(self.named(), total)

    def evaluate(self, parts: list[Batch], joint: Joint, seed: int) -> Tensor:
        """The loss in eval mode. Gradients stay on: models register hooks in their forward."""
        replay, weight, total = Replayed(joint), self.weigh(parts), torch.zeros((), dtype=torch.float32)
        under = MODES.get(self.wide.followed, lambda call: call())
        modules = [m for m in (self.model, self.loss_fn) if isinstance(m, nn.Module)]
        for module in modules:
            module.eval()
        for k, part in enumerate(parts):
            replay.begin(rng.mix(seed, k))
            with replay:
                total = total + of_batch(under(partial(self.losses, part))[0]) * weight
        for module in modules:
            module.train()
        return total

    @torch.no_grad()
    def update(self) -> None:
        for parameter in self.named()[0].values():
            if parameter.grad is not None:
                parameter.sub_(RATE * parameter.grad)

    def state(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        parameters, buffers = self.named()
        return {
            name: (t.detach().clone(), None if t.grad is None else t.grad.clone())
            for name, t in {**parameters, **buffers}.items()
        }

    @torch.no_grad()
    def put(self, state: Mapping[str, tuple[Tensor, Tensor | None]], noise: torch.Generator | None = None) -> None:
        """Give tensors these values, changed in the last place or two if there is `noise`."""
        parameters, buffers = self.named()
        for name, tensor in {**parameters, **buffers}.items():
            value, gradient = state[name]
            tensor.copy_(value)
            if name in parameters:
                tensor.grad = None if gradient is None else gradient.clone()
                if noise is not None and value.is_floating_point():
                    spread = torch.rand(value.shape, generator=noise, dtype=DOUBLE) - 0.5
                    last_place = torch.finfo(precision(self.wide)).eps
                    tensor.copy_(value * (1 + spread * 2 * last_place).to(value.dtype))


def of_batch(loss: Tensor) -> Tensor:
    """The loss of a microbatch, to be summed: batches have theirs in float32 at least."""
    return loss.detach().to(torch.promote_types(loss.dtype, torch.float32))


def named(model: nn.Module, loss_fn: Any) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters and buffers under their names, those of compiled parts as if these were not compiled."""
    roots = [("", model), *([("loss_fn.", loss_fn)] if isinstance(loss_fn, nn.Module) else [])]
    return (
        {plain_name(p + name): value for p, root in roots for name, value in root.named_parameters()},
        {plain_name(p + name): value for p, root in roots for name, value in root.named_buffers()},
    )


def plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def found(tensors: tuple[Mapping[str, nn.Parameter], Mapping[str, Tensor]], loss: Tensor) -> Found:
    parameters, buffers = tensors
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    return Found(loss, gradients, {name: buffer.detach().clone() for name, buffer in buffers.items()})


def precision(wide: Wide) -> torch.dtype:
    """The least precise dtype in the model."""
    kinds = {step.kind for step in wide.recipe.steps}
    if wide.recipe.dtype is torch.bfloat16 or kinds & REDUCED or wide.followed == "autocast":
        return torch.bfloat16
    return torch.float32 if wide.recipe.dtype is torch.float32 or kinds & SINGLE else DOUBLE


def differences(have: Found, want: Found, allowed: float, noise: Mapping[str, float]) -> tuple[float, str | None]:
    """The largest relative difference, and what is wrong, if anything is. `noise`, by name: how much plain PyTorch's
    own results change where parameters change in the last place. In a model that has diverged, what is not finite is
    the same in the same places, and the rest is compared."""
    worst = 0.0
    for kind in ("gradients", "buffers", "loss"):
        expected: dict[str, Tensor | None] = {"loss": want.loss} if kind == "loss" else getattr(want, kind)
        all_found = {"loss": have.loss} if kind == "loss" else getattr(have, kind)
        sizes = [largest(torch.where(t.isfinite(), t, 0.0)) for t in expected.values() if t is not None]
        floor = ROUNDING * max(sizes, default=0.0)
        for name, wanted in expected.items():
            if name not in all_found:  # another rank's
                continue
            got = all_found[name]
            if wanted is None or got is None:
                if (wanted is None) != (got is None) and largest(got if wanted is None else wanted) > 0:
                    return float("inf"), f"{name}: {'no gradient' if got is None else 'a gradient where there is none'}"
                continue
            if got.dtype != wanted.dtype or got.shape != wanted.shape:
                return float("inf"), f"{name}: {got.dtype} {tuple(got.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
            if torch.equal(got, wanted):
                continue
            wide_type = torch.complex128 if wanted.is_complex() else DOUBLE
            same = (got == wanted) | (got.isnan() & wanted.isnan())
            difference = largest(torch.where(same, 0.0, got.to(wide_type) - wanted.to(wide_type)))
            scale = largest(torch.where(wanted.isfinite(), wanted.to(wide_type), 0.0))
            error = difference / max(scale, floor, 1e-30)
            worst = max(worst, error)
            if not error <= allowed and not difference <= NOISES * noise.get(name, 0.0):
                return error, f"{name}: relative difference {error:.3g} (of {scale:.3g})"
    return worst, None


class Differs(Exception):
    """Results of a pipeline that are not those of plain PyTorch."""


@contextmanager
def leaves_generators_alone(call: str) -> Iterator[None]:
    """Raises `Differs` if anything draws from a global generator."""
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()  # type: ignore[index]
    yield
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]  # type: ignore[index]
    if not torch.equal(before[0], after[0]):
        raise Differs(f"{call}: torch's generator has moved on")
    if before[1] != after[1] or (before[2] != after[2]).any():
        raise Differs(f"{call}: Python's or numpy's generator has moved on")


Start = Callable[[zbfx.Pipeline, str], Any]  # a step of a pipeline, in one process or many


def here(pipe: zbfx.Pipeline, new_shape: str) -> Any:
    return pipe.run_local(seed=SEED, on_new_shape=new_shape)


@dataclass
class Piped:
    """The model as a pipeline."""

    wide: Wide
    model: WideModel
    loss_fn: Any

    def call(self, name: str, work: Callable[[], Any]) -> Any:
        """A call under its mode; without it, if the mode is refused as it should be."""
        mode = self.wide.modes.get(name, "")
        with leaves_generators_alone(name):
            if not mode:
                return work()
            if mode != "vmap":
                return MODES[mode](work)
            try:
                MODES[mode](work)
            except ZbfxError as refusal:
                if OF_TRANSFORMS not in str(refusal):
                    raise
                return work()
            raise Differs(f"{name} ran inside of vmap")

    def compiled(self, schedule: Any, cuts: tuple[str, ...] | None) -> zbfx.Pipeline:
        wide, recipe = self.wide, self.wide.recipe
        args, kwargs = microbatches_of(wide, 0)[0].call(recipe)
        return self.call(
            "compile",
            partial(
                zbfx.compile,
                self.model,
                stages=wide.ranks,
                microbatches=wide.microbatches,
                stages_per_rank=wide.per_rank,
                example_inputs=args[:2],
                example_kwargs=kwargs,
                example_targets=args[2:],
                loss_fn=self.loss_fn,
                loss_reduction="sum" if recipe.loss == "sum" else "mean",
                schedule=schedule,
                cuts=cuts,
                batch_dims=dims_of(recipe) if wide.names_dims else None,
                recompute=wide.recompute,
                check=wide.check,
                device="cpu",
            ),
        )

    def compiled_anyhow(self) -> zbfx.Pipeline:
        """With the cuts and the order that were drawn, or where they do not fit the model without them."""
        wide = self.wide
        schedule: Any = wide.schedule
        if schedule == "user":
            schedule = partial(user_order, seed=wide.seed)
        cuts = wide.cuts
        while True:
            try:
                return self.compiled(schedule, cuts)
            except ZbfxError as refusal:
                if cuts and str(refusal).startswith("cuts "):
                    cuts = None
                elif wide.schedule == "user" and schedule != "zb-h1" and OUT_OF_ORDER in str(refusal):
                    schedule = "zb-h1"
                else:
                    raise

    def step(self, step: Any, name: str, parts: list[Batch]) -> Found:
        recipe = self.wide.recipe
        args, kwargs = joined(recipe, parts).call(recipe)
        before = [t.clone() for t in args]
        if self.wide.split:
            work = partial(step.run_split, [part.call(recipe) for part in parts])
        else:
            work = partial(step, *args, **kwargs)
        loss = self.call(name, work)
        if not all(map(torch.equal, args, before)):
            raise Differs(f"{name} has written into its arguments")
        if loss.requires_grad:
            raise Differs(f"{name} returned a loss that requires grad")
        parameters, buffers = named(self.model, self.loss_fn)
        listed = {plain_name(n) for n, _ in step.named_parameters()}
        held = {plain_name(n) for n, _ in step.named_buffers()} - self.written_elsewhere(step)
        if step.worker.ranks.share_tensors:  # all ranks are here
            unlisted = {n for n, p in parameters.items() if p.grad is not None} - listed
            if unlisted:
                raise Differs(f"{name}: parameters with gradients that are not listed: {sorted(unlisted)}")
            return found((parameters, buffers), loss)
        return found(
            ({n: p for n, p in parameters.items() if n in listed}, {n: b for n, b in buffers.items() if n in held}),
            loss,
        )

    def written_elsewhere(self, step: Any) -> set[str]:
        own = {runner.rank for runner in step.engine.runners}
        placement = step.engine.pipe.placement
        return {
            plain_name(name)
            for stage in step.engine.pipe.stages
            for phase in stage.phases.values()
            for name in phase.updates
            if placement[stage.index] not in own
        }

    @torch.no_grad()
    def follow(self, judge: Judge) -> None:
        """Take the parameters of plain PyTorch, so that differences do not grow from step to step."""
        theirs, _ = judge.named()
        own, _ = named(self.model, self.loss_fn)
        for name, parameter in own.items():
            parameter.copy_(theirs[name])


def joint_of(step: Any, rows: int, dim: int, *, trains: bool) -> Joint:
    """The graph of the engine that has run microbatches of so many rows."""
    found = [pipe for pipe in step.pipelines if pipe.trains == trains and pipe.examples[0].shape[dim] == rows]
    return found[-1].joint


def compare(wide: Wide, start: Start = here) -> Outcome:
    """Run a model both ways."""
    if wide.recipe.refused:
        return refusal_of(wide, start)
    piped, judge = Piped(wide, WideModel(wide.recipe), loss_of(wide.recipe)), Judge.of(wide)
    if why := cannot_run(judge):
        return Outcome(invalid=why)
    allowed, dim, worst = TOLERANCE[precision(wide)], wide.recipe.dims[0], 0.0
    try:
        pipe = piped.compiled_anyhow()
        step = piped.call("run_local", partial(start, pipe, wide.new_shape or "refuse"))
        for k in range(wide.steps):
            rows = ROWS + 1 if wide.new_shape and k == wide.steps - 1 else ROWS
            parts = microbatches_of(wide, k, rows)
            if k and wide.zeroed:
                for parameter in (*judge.named()[0].values(), *named(piped.model, piped.loss_fn)[0].values()):
                    parameter.grad = None
            before = judge.state()
            have = piped.step(step, "later step" if k else "first step", parts)
            joint = joint_of(step, rows, dim, trains=True)
            run = partial(judge.step, parts, joint, rng.mix(SEED, k))
            want = run()
            error, wrong = differences(have, want, allowed, {})
            if wrong:
                after = judge.state()
                noise = noise_of(judge, before, run, want)
                judge.put(after)
                error, wrong = differences(have, want, allowed, noise)
            if wrong:
                return Outcome(wrong=f"step {k}: {wrong}", error=error)
            worst = max(worst, error)
            judge.update()
            piped.follow(judge)
            if wide.evaluates and k == 0:
                args, kwargs = joined(wide.recipe, parts).call(wide.recipe)
                loss = piped.call("evaluate", partial(step.evaluate, *args, **kwargs))
                joint = joint_of(step, rows, dim, trains=False)
                plain = judge.evaluate(parts, joint, rng.mix(SEED, k + 1))
                error, wrong = differences(Found(loss, {}, {}), Found(plain, {}, {}), allowed, {})
                if wrong:
                    return Outcome(wrong=f"evaluation: {wrong}", error=error)
    except ZbfxError as refusal:
        return Outcome(refusal=str(refusal))
    except Differs as difference:
        return Outcome(wrong=str(difference))
    return Outcome(error=worst)


def refusal_of(wide: Wide, start: Start) -> Outcome:
    """Whether a model that no pipeline can run is refused, with the words of its kind."""
    piped = Piped(replace(wide, modes={}), WideModel(wide.recipe), loss_of(wide.recipe))
    words = REFUSED[wide.recipe.refused][2]
    try:
        step = start(piped.compiled_anyhow(), "refuse")
        piped.step(step, "first step", microbatches_of(wide, 0))
    except ZbfxError as refusal:
        return Outcome(refusal=str(refusal), meant=bool(re.search(words, str(refusal))))
    return Outcome(wrong=f"{wide.recipe.refused}: not refused")


def cannot_run(judge: Judge) -> str | None:
    """Why plain PyTorch cannot train the model, or if its results are not finite; leaves it as it was."""
    before = judge.state()
    under = MODES.get(judge.wide.followed, lambda call: call())
    try:
        with torch.random.fork_rng():
            loss, _ = under(partial(judge.losses, microbatches_of(judge.wide, 0)[0]))
            if not loss.requires_grad:
                return "nothing to train"
            loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        judge.put(before)
    return None if bool(loss.isfinite()) else "a loss that is not finite"


def noise_of(
    judge: Judge, before: Mapping[str, tuple[Tensor, Tensor | None]], run: Callable[[], Found], want: Found
) -> dict[str, float]:
    """How much plain PyTorch's own results change where parameters change in the last place of the least precise
    dtype that the model computes in."""
    noise: dict[str, float] = defaultdict(float)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        judge.put(before, generator)
        other = run()
        pairs = {**want.gradients, **want.buffers, "loss": want.loss}
        others = {**other.gradients, **other.buffers, "loss": other.loss}
        for name, value in pairs.items():
            changed = others[name]
            if value is not None and changed is not None:
                kind = torch.complex128 if value.is_complex() else DOUBLE
                change = changed.to(kind) - value.to(kind)
                noise[name] = max(noise[name], largest(torch.where(change.isfinite(), change, 0.0)))
    return dict(noise)
