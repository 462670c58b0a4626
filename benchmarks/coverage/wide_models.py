"""Random models of the wider kinds, and how they are compiled and called: `fuzz_wide.py` runs them.

All choices come from a `random.Random`, so that a seed names a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.coverage.ambient import MODES
from benchmarks.coverage.random_models import BINARY, DOUBLE, LAYERS, UNARY, VOCABULARY, WEIGHTED, WIDTH
from benchmarks.coverage.wide_parts import PARTS, REFUSED, WRITE_IN_FORWARD, refused

LENGTH, ROWS = 3, 2
CALLS = ("compile", "run_local", "first step", "later step", "evaluate")
# How stages lie on ranks, as the schedules that are made by hand need it.
LINEAR, LOOPED, V_SHAPED = ("gpipe", "1f1b", "zb-h1", "zb-h2", "user"), ("interleaved-1f1b", "gpipe"), ("zb-v-order",)
# Modes of `compile` that plain PyTorch follows; all others are as if they were not there.
FOLLOWED = {"autocast", "default dtype", "deterministic algorithms", "TF32", "function mode"}
REDUCED = {"through bfloat16", "autocast inside"}  # kinds that compute in bfloat16
SINGLE = {"float32 linear", "through float32"}
NEED_DOUBLE = {"complex filter", "rotation", "Fourier", "variance", "complex between"}
WRAPPINGS = ("", "", "", "", "checkpoint", "torch.compile", "compile()", "frozen", "shared")
LOSSES = ("mean", "mean", "sum", "count", "own", "module")


@dataclass(frozen=True)
class Step:
    """One value of the model: the kind of its part, what it is made of, and what is wrapped around the part."""

    kind: str
    sources: tuple[int, ...]
    wrapping: str = ""
    matrices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """All choices that make a model and its batches."""

    steps: tuple[Step, ...]
    side: int | None  # the value whose mean square is added to the loss inside of the model
    tied: bool  # the first matrix is the embedding's, transposed dimensions aside
    loss: str
    dtype: torch.dtype
    dims: tuple[int, int, int]  # of the batch in `x`, `positions` and the target
    mask: str  # "cut", "whole" or "none"
    refused: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Wide:
    """A model, how it is compiled, and how it is called: `calls` has the mode of each call."""

    recipe: Recipe
    ranks: int
    per_rank: int
    microbatches: int
    schedule: str
    modes: Mapping[str, str]
    steps: int = 2
    zeroed: bool = True  # gradients are cleared between the steps
    split: bool = False  # microbatches are given one by one
    evaluates: bool = False
    new_shape: str = ""  # "recompile" or "symbolic": the last step's microbatches have more rows
    recompute: str = "auto"
    check: bool = False
    names_dims: bool = True  # batch_dims is given
    cuts: tuple[str, ...] | None = None
    seed: int = 0

    @property
    def followed(self) -> str:
        """The mode of `compile` that plain PyTorch has too."""
        mode = self.modes.get("compile", "")
        return mode if mode in FOLLOWED else ""


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Tensor:
        return self.function(*values)


class Checkpointed(nn.Module):
    """A part that is computed once more in the backward."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *values: Tensor) -> Tensor:
        return checkpoint(self.part, *values, use_reentrant=False)


class CheckpointedOnce(Checkpointed):
    """A part that is computed once more in the backward, from buffers as its forward found them. It leaves them as they
    are then: what it writes, it writes once."""

    def forward(self, *values: Tensor) -> Tensor:
        found = [(m, {k: b.clone() for k, b in m.named_buffers(recurse=False)}) for m in self.part.modules()]
        contexts = nullcontext(), with_buffers(found)
        return checkpoint(self.part, *values, use_reentrant=False, context_fn=lambda: contexts)


@contextmanager
def with_buffers(buffers: list[tuple[nn.Module, dict[str, Tensor]]]) -> Iterator[None]:
    """Modules have other buffers meanwhile."""
    own = [(module, dict(module.named_buffers(recurse=False))) for module, _ in buffers]
    for module, others in buffers:
        put_buffers(module, others)
    try:
        yield
    finally:
        for module, others in own:
            put_buffers(module, others)


def put_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)


class WideModel(nn.Module):
    """The model of a recipe. `judged`: as plain PyTorch runs it, without torch.compile, and with writes of the forward
    done once in checkpointed parts, where plain PyTorch would do them twice."""

    def __init__(self, recipe: Recipe, *, judged: bool = False) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=DOUBLE)
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH, dtype=DOUBLE) / 2 for _ in range(2))
        parts: list[nn.Module] = []
        for step in recipe.steps:
            shares = [k for k, other in enumerate(recipe.steps[: len(parts)]) if other.kind == step.kind]
            if step.wrapping == "shared" and shares:
                parts.append(parts[shares[0]])
                continue
            part = made(step.kind)
            if step.wrapping == "frozen":
                part.requires_grad_(False)
            if step.wrapping == "checkpoint":
                part = (CheckpointedOnce if judged and step.kind in WRITE_IN_FORWARD else Checkpointed)(part)
            parts.append(part)
        self.parts = nn.ModuleList(parts)
        if recipe.refused:
            self.refused = refused(recipe.refused)
        if recipe.tied:
            for step, part in zip(recipe.steps, parts, strict=True):
                if step.kind == "linear" and isinstance(part, nn.Linear):
                    self.matrices[0] = part.weight
        if recipe.dtype != DOUBLE:
            self.to(recipe.dtype)
        self.uncertainty = nn.Parameter(torch.tensor(0.3, dtype=recipe.dtype))
        if not judged:
            self.compile_parts()

    def compile_parts(self) -> None:
        for k, step in enumerate(self.recipe.steps):
            if step.wrapping == "torch.compile":
                self.parts[k] = torch.compile(self.parts[k], backend="eager")  # type: ignore[assignment]
            elif step.wrapping == "compile()":
                self.parts[k].compile(backend="eager")

    def forward(
        self, x: Tensor, positions: Tensor, *, extra: Mapping[str, Tensor | None], target: Tensor | None = None
    ) -> Any:
        recipe = self.recipe
        x = x.movedim(recipe.dims[0], 0)
        ids = positions.movedim(recipe.dims[1], 0)[:, 0]
        values = [(x + self.embedding(ids)).to(recipe.dtype)]
        if extra["mask"] is not None:
            mask = extra["mask"] if recipe.mask == "whole" else extra["mask"][..., None]
            values[0] = values[0] * mask
        values[0] = values[0] * extra["scale"]
        values[0] = values[0].to(recipe.dtype)
        for step, part in zip(recipe.steps, self.parts, strict=True):
            chosen = [values[k] for k in step.sources]
            weights = [self.matrices[k] for k in step.matrices]
            values.append(part(*chosen, *weights).to(recipe.dtype))
        if recipe.refused:
            values.append(self.refused(values[-1]))
        side = values[recipe.side].square().mean() if recipe.side is not None else 0.0
        outputs = {"values": values[-1], "side": side, "none": None}
        if target is None:
            return outputs
        return {"loss": mean_loss(outputs, target.movedim(recipe.dims[2], 0)) * torch.exp(-self.uncertainty)}


def made(kind: str) -> nn.Module:
    """The part of a kind."""
    if kind in PARTS:
        return PARTS[kind]()
    if kind in LAYERS:
        return LAYERS[kind]()
    functions: dict[str, Callable[..., Tensor]] = {**UNARY, **BINARY, **WEIGHTED}
    return Function(functions[kind])


def mean_loss(outputs: Any, target: Tensor) -> Tensor:
    return F.mse_loss(outputs["values"].to(target.dtype), target) + 0.3 * outputs["side"]


class Loss(nn.Module):
    """A loss with a parameter and a buffer that it writes, over targets whose batch lies along `dim`."""

    seen: Tensor

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dim, self.weight = dim, nn.Parameter(torch.full((WIDTH,), 0.7, dtype=dtype))
        self.register_buffer("seen", torch.zeros((), dtype=dtype))

    def forward(self, outputs: Any, target: Tensor) -> Tensor:
        target = target.movedim(self.dim, 0)
        loss = mean_loss({**outputs, "values": outputs["values"] * self.weight.exp()}, target)
        self.seen.lerp_(loss.detach().to(self.seen.dtype), 0.5)
        return loss


def loss_of(recipe: Recipe) -> Any:
    """`loss_fn` of `zbfx.compile`; None where the model returns its loss."""
    dim = recipe.dims[2]
    if recipe.loss == "own":
        return None
    if recipe.loss == "module":
        return Loss(dim, recipe.dtype)
    if recipe.loss == "count":

        def counted(outputs: Any, target: Tensor) -> tuple[Tensor, Tensor]:
            target = target.movedim(dim, 0)
            kept = target[..., 0] > -0.5
            errors = (outputs["values"].to(target.dtype) - target).square().mean(-1)
            return torch.where(kept, errors, 0.0).sum() + 0.3 * outputs["side"], kept.sum()

        return counted
    return lambda outputs, target: mean_loss(outputs, target.movedim(dim, 0))


@dataclass(frozen=True)
class Batch:
    """The arguments of a step: those of the model by position and by keyword, and the targets."""

    x: Tensor
    positions: Tensor
    mask: Tensor | None
    scale: Tensor
    target: Tensor

    def call(self, recipe: Recipe) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """As `step` takes them."""
        kwargs: dict[str, Any] = {"extra": {"mask": self.mask, "scale": self.scale}}
        if recipe.loss == "own":
            return (self.x, self.positions), {**kwargs, "target": self.target}
        return (self.x, self.positions, self.target), kwargs


def dims_of(recipe: Recipe) -> Any:
    """`batch_dims` of `zbfx.compile`."""
    kwargs: dict[str, Any] = {"extra": {"mask": 0 if recipe.mask == "cut" else None, "scale": None}}
    if recipe.loss == "own":
        return recipe.dims[:2], {**kwargs, "target": recipe.dims[2]}, ()
    return recipe.dims[:2], kwargs, recipe.dims[2]


def microbatches_of(wide: Wide, step: int, rows: int = ROWS) -> list[Batch]:
    """The microbatches of a step, cut already."""
    recipe = wide.recipe
    generator = torch.Generator().manual_seed(1000 * wide.seed + step)

    def numbers(dim: int) -> Tensor:
        found = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=DOUBLE)
        return found.to(recipe.dtype).movedim(0, dim).contiguous()

    scale = torch.rand(WIDTH, generator=generator, dtype=torch.float32) + 0.5
    whole = torch.rand(WIDTH, generator=generator, dtype=torch.float32) < 0.7
    found = []
    for _ in range(wide.microbatches):
        ids = torch.randint(VOCABULARY, (rows, 3, LENGTH), generator=generator)
        cut = torch.rand(rows, LENGTH, generator=generator) < 0.7
        mask = {"cut": cut, "whole": whole, "none": None}[recipe.mask]
        positions = ids.movedim(0, recipe.dims[1]).contiguous()
        found.append(Batch(numbers(recipe.dims[0]), positions, mask, scale, numbers(recipe.dims[2])))
    return found


def joined(recipe: Recipe, parts: list[Batch]) -> Batch:
    """The batch that is cut into these microbatches."""
    first = parts[0]
    mask = torch.cat([part.mask for part in parts if part.mask is not None]) if recipe.mask == "cut" else first.mask
    return Batch(
        torch.cat([part.x for part in parts], recipe.dims[0]),
        torch.cat([part.positions for part in parts], recipe.dims[1]),
        mask,
        first.scale,
        torch.cat([part.target for part in parts], recipe.dims[2]),
    )


def draw(random: Random, ranks: int | None = None) -> Wide:
    """A random model and its calls; the number of ranks is drawn too unless given."""
    shape = random.choice(("linear", "linear", "linear", "looped", "v"))
    ranks = ranks or (random.randint(1, 4) if shape == "linear" else 2)
    per_rank = 1 if shape == "linear" or ranks < 2 else 2
    shape = shape if per_rank == 2 else "linear"
    m = ranks * random.randint(1, 2) if shape == "looped" else random.randint(1, 6)
    recipe = draw_recipe(random)
    modes = {call: random.choice(tuple(MODES)) for call in CALLS if random.random() < 0.25}
    modes = {call: mode for call, mode in modes.items() if mode != "torch.compile" or random.random() < 0.2}
    if random.random() < 0.9:
        modes = {call: mode for call, mode in modes.items() if mode != "vmap"}
    if modes.get("compile") == "default device":  # of meta: the model's own tensors would have no data
        del modes["compile"]
    if modes.get("compile") == "autocast" and recipe.dtype == DOUBLE:
        recipe = replace(recipe, dtype=torch.float32, steps=single(recipe.steps))
    new_shape = random.choice(("recompile", "symbolic")) if random.random() < 0.08 else ""
    guessed = recipe.dims == (0, 0, 0) and not new_shape
    return Wide(
        recipe,
        ranks,
        per_rank,
        m,
        random.choice({"linear": LINEAR, "looped": LOOPED, "v": V_SHAPED}[shape]),
        modes,
        steps=random.choice((2, 2, 3)),
        zeroed=random.random() < 0.7,
        split=not new_shape and random.random() < 0.2,
        evaluates=random.random() < 0.1,
        new_shape=new_shape,
        recompute=random.choice(("cheap", "full")) if random.random() < 0.1 else "auto",
        check=random.random() < 0.1,
        names_dims=not (guessed and random.random() < 0.5),
        cuts=draw_cuts(random, recipe, ranks * per_rank) if random.random() < 0.3 else None,
        seed=random.randint(0, 99),
    )


def draw_recipe(random: Random) -> Recipe:
    count = random.choice((1, 2, 2, 3, 3, 4, 5))
    dtype = random.choice((DOUBLE, DOUBLE, DOUBLE, torch.float32, torch.bfloat16))
    steps = tuple(draw_step(random, position) for position in range(count))
    return Recipe(
        steps if dtype == DOUBLE else single(steps),
        side=random.randint(1, count) if random.random() < 0.3 else None,
        tied=random.random() < 0.5,
        loss=random.choice(LOSSES),
        dtype=dtype,
        dims=tuple(random.choice((0, 0, 1, 2)) for _ in range(3)),  # type: ignore[arg-type]
        mask=random.choice(("cut", "whole", "none")),
        refused=random.choice(list(REFUSED)) if random.random() < 0.04 else "",
        seed=random.randint(0, 99),
    )


def single(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps, without those that compute in float64 alone."""
    return tuple(replace(step, kind="linear") if step.kind in NEED_DOUBLE else step for step in steps)


def draw_step(random: Random, position: int) -> Step:
    """The step that makes value `position + 1`: mostly of the newest value, at times of an older one."""

    def source() -> int:
        return position if random.random() < 0.8 else random.randint(0, position)

    group = random.choice(("part", "part", "part", "layer", "layer", "unary", "binary", "weighted"))
    wrapping = random.choice(WRAPPINGS)
    if group == "part":
        return Step(random.choice(list(PARTS)), (source(),), wrapping)
    if group == "layer":
        return Step(random.choice(list(LAYERS)), (source(),), wrapping)
    if group == "unary":
        return Step(random.choice(list(UNARY)), (source(),), wrapping)
    if group == "binary":
        return Step(random.choice(list(BINARY)), (source(), random.randint(0, position)), wrapping)
    matrices = random.randrange(2), random.randrange(2)
    return Step(random.choice(list(WEIGHTED)), (source(),), wrapping, matrices)


def draw_cuts(random: Random, recipe: Recipe, stages: int) -> tuple[str, ...] | None:
    """Names of submodules in the order of their first use, none the first."""
    named = [f"parts.{k}" for k, step in enumerate(recipe.steps) if step.wrapping != "shared"][1:]
    if len(named) < stages - 1:
        return None
    return tuple(named[k] for k in sorted(random.sample(range(len(named)), stages - 1)))
