"""Random models: graphs of layers with shared modules and weights, skips, views, frozen parts and side losses.

A model is a list of steps. Each step takes earlier values of shape (rows, LENGTH, WIDTH) and gives one more. All
choices come from a `random.Random`, so that a seed names a model, and a property test can shrink one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 3, 4, 7
DOUBLE = torch.float64


class Doubled(torch.autograd.Function):
    """An identity whose gradient is doubled."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Transposed(nn.Module):
    """A layer of (rows, channels, length) between two transposes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Single(nn.Module):
    """A layer in float32 inside of a model in float64."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float()).double()


class Checkpointed(nn.Module):
    """A layer that is computed once more in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(queries[:, None], keys[:, None], values[:, None], is_causal=True)[:, 0]


class Rotated(nn.Module):
    """Pairs of numbers, taken for complex ones and turned by an angle for each position and pair."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.randn(LENGTH, WIDTH // 2, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(self.angles), self.angles)).flatten(-2)


class Filter(nn.Module):
    """Multiplies the spectrum of every row by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * self.weights).real


class Remembering(nn.Module):
    """Takes away the mean of earlier values, which a buffer follows."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return y


class Routed(nn.Module):
    """Sends each position through the two best of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, dtype=DOUBLE)
        self.experts = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        return sum((expert(x) * weights[..., k : k + 1] for k, expert in enumerate(self.experts)), torch.zeros_like(x))


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias, dtype=DOUBLE)


def block() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "linear without bias": lambda: linear(bias=False),
    "block": block,
    "convolution": lambda: Transposed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, dtype=DOUBLE)),
    "grouped convolution": lambda: Transposed(nn.Conv1d(WIDTH, WIDTH, 1, groups=2, bias=False, dtype=DOUBLE)),
    "layer norm": lambda: nn.LayerNorm(WIDTH, dtype=DOUBLE),
    "RMS norm": lambda: nn.RMSNorm(WIDTH, dtype=DOUBLE),
    "group norm": lambda: Transposed(nn.GroupNorm(2, WIDTH, dtype=DOUBLE)),
    "batch norm": lambda: Transposed(nn.BatchNorm1d(WIDTH, dtype=DOUBLE)),
    "checkpointed block": lambda: Checkpointed(block()),
    "float32 linear": lambda: Single(linear()),
    "attention": Attention,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "PReLU": lambda: nn.PReLU(dtype=DOUBLE),
    "rotation": Rotated,
    "complex filter": Filter,
    "moving mean": Remembering,
    "experts": Routed,
}


def swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([second, first * 0.5], -1)


def no_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def written_view(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] *= 2.0
    y[..., 2:][:, 0] = y[:, 1, :2]
    y.transpose(1, 2)[:, 1].mul_(0.5)
    return y


def gradient_of_a_row(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: (torch.tanh(row) * row).sum()))(x)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "softmax": lambda x: x.softmax(-1),
    "scale": lambda x: 1.5 * x - 0.1,
    "transpose": lambda x: x.transpose(1, 2).reshape(x.shape),
    "permute and view": lambda x: x.permute(1, 0, 2).contiguous().view(x.shape),
    "chunks": swapped,
    "split": lambda x: torch.cat(x.split([1, WIDTH - 1], -1)[::-1], -1),
    "unbind": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "mean, expanded": lambda x: x.mean(1, keepdim=True).expand(x.shape),
    "one row": lambda x: x[:, :1] + x,
    "pad": lambda x: F.pad(x[..., 1:], (0, 1)),
    "roll": lambda x: x.roll(1, 1),
    "cumulative sum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(-1).values,
    "in place": lambda x: (x * 1.0).mul_(0.5).tanh_(),
    "written slice": lambda x: torch.slice_scatter(x, x[..., :1] * 0.3, -1, 0, 1),
    "through float32": lambda x: x.float().tanh().double(),
    "Fourier": lambda x: torch.fft.fft(x).real,
    "detached": lambda x: x.detach() + 0.1 * x,
    "no gradient": no_gradient,
    "custom backward": Doubled.apply,
    "gathered": lambda x: torch.gather(x, -1, x.argsort(-1)),
    "clamp": lambda x: x.clamp(-1.0, 1.0),
    "written view": written_view,
    "written where": lambda x: x.clone().masked_fill_(x > 0.5, 0.1),
    "indices added": lambda x: x.index_add(1, torch.tensor([0, 1, 0]), x[:, :3] * 0.2),
    "scattered": lambda x: torch.zeros_like(x).scatter_add(-1, x.argsort(-1) // 2, x),
    "largest": lambda x: x - x.amax(1, keepdim=True) / 2,
    "einsum": lambda x: torch.einsum("rlw,rmw,rmv->rlv", x, x, x) / WIDTH,
    "gradient of a row": gradient_of_a_row,
    "variance": lambda x: x / (1.0 + x.var(-1, keepdim=True)).sqrt(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "gate": lambda x, y: x * torch.sigmoid(y),
    "maximum": torch.maximum,
    "halves": lambda x, y: torch.cat([x[..., :2], y[..., 2:]], -1),
    "product": lambda x, y: (x @ y.transpose(1, 2)) @ y / WIDTH,
    "written into": lambda x, y: torch.slice_scatter(x, y[:, 1:], 1, 1),
    "add in place": lambda x, y: (x * 1.0).add_(y),
    "cross attention": lambda x, y: F.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None])[:, 0],
}
# Of a value and two matrices, which may be weights of layers that are used elsewhere too.
WEIGHTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weight": lambda x, a, b: F.linear(x, a),
    "weight transposed": lambda x, a, b: F.linear(x, a.T),
    "weights' product": lambda x, a, b: x @ (a @ b) / 2,
    "sum of weights": lambda x, a, b: F.linear(x, a + b.T),
    "parameter added": lambda x, a, b: x + torch.tanh(a).sum(0),
    "parameter gates": lambda x, a, b: x * torch.sigmoid(a[0]),
    "normalized weight": lambda x, a, b: F.linear(x, F.normalize(a)),
    "rows of a weight": lambda x, a, b: x + a[torch.tensor([0, 1, 1])],
    "triangles": lambda x, a, b: x @ a.triu() + x @ b.tril(-1),
    "weight of a weight": lambda x, a, b: F.linear(x, a * torch.sigmoid(b)),
}


@dataclass(frozen=True)
class Step:
    """One value: `kind` is a key of `LAYERS`, `UNARY`, `BINARY`, `WEIGHTED`, or one of a few by name in `compute`."""

    kind: str
    sources: tuple[int, ...]
    layers: tuple[int, ...] = ()  # indices of layers or of matrices


class Compute(nn.Module):
    """A step as a submodule of the model, so that a cut can name it. It owns nothing: layers are shared."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, model: RandomModel, values: list[Tensor], inputs: Inputs) -> Tensor:
        step = self.step
        chosen = [values[k] for k in step.sources]
        if step.kind in LAYERS:
            return model.layers[step.layers[0]](*chosen)
        if step.kind in UNARY:
            return UNARY[step.kind](*chosen)
        if step.kind in BINARY:
            return BINARY[step.kind](*chosen)
        if step.kind in WEIGHTED:
            return WEIGHTED[step.kind](*chosen, *(model.matrices[k] for k in step.layers))
        return SPECIAL[step.kind](model, chosen[0], inputs)


@dataclass(frozen=True)
class Inputs:
    """What the model is called with, besides its first value."""

    ids: Tensor
    mask: Tensor  # (rows, LENGTH), boolean
    scale: Tensor  # (WIDTH,), float32, the same for every microbatch


SPECIAL: dict[str, Callable[[RandomModel, Tensor, Inputs], Tensor]] = {
    "embedding": lambda model, x, inputs: x + model.embedding(inputs.ids),
    "tied head": lambda model, x, inputs: F.linear(x, model.embedding.weight).softmax(-1) @ model.embedding.weight,
    "masked": lambda model, x, inputs: x.masked_fill(inputs.mask[..., None], 0.0),
    "where": lambda model, x, inputs: torch.where(inputs.mask[..., None], x, x.flip(1)),
    "scaled by input": lambda model, x, inputs: x * inputs.scale,
    "positions": lambda model, x, inputs: x + torch.arange(LENGTH, dtype=x.dtype)[:, None] / 10,
    "buffer": lambda model, x, inputs: x * model.constant,
}


@dataclass(frozen=True)
class Recipe:
    """All choices that make a model."""

    layers: tuple[str, ...]
    matrix_count: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]  # the values that the model returns
    side: tuple[int, ...]  # the values whose mean square is added to the loss inside the model
    own_loss: bool  # the model computes its loss
    tied: tuple[tuple[int, int], ...]  # matrices that are a linear layer's weight: (matrix, layer)
    frozen: tuple[int, ...]  # layers without gradients
    frozen_embedding: bool
    seed: int


class RandomModel(nn.Module):
    """The model of a recipe. Returns `values`, `side` and a None; or its loss, if the recipe says so."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.embedding: nn.Embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=DOUBLE)
        self.layers = nn.ModuleList(LAYERS[kind]() for kind in recipe.layers)
        matrices = [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=DOUBLE) / 2) for _ in range(recipe.matrix_count)]
        for matrix, layer in recipe.tied:
            matrices[matrix] = self.layers[layer].get_parameter("weight")
        self.matrices = nn.ParameterList(matrices)
        self.steps = nn.ModuleList(Compute(step) for step in recipe.steps)
        self.constant: Tensor
        self.register_buffer("constant", torch.linspace(0.5, 1.5, WIDTH, dtype=DOUBLE))
        for layer in recipe.frozen:
            self.layers[layer].requires_grad_(False)
        self.embedding.requires_grad_(not recipe.frozen_embedding)
        self.uncertainty = nn.Parameter(torch.tensor(0.3, dtype=DOUBLE))

    def forward(self, x: Tensor, ids: Tensor, *, mask: Tensor, scale: Tensor, target: Tensor | None = None) -> Any:
        values, inputs = [x], Inputs(ids, mask, scale)
        for step in self.steps:
            values.append(step(self, values, inputs))
        outputs = {"values": [values[k] for k in self.recipe.outputs], "side": self.side_loss(values), "none": None}
        if target is None:
            return outputs
        return {"loss": loss_of(outputs, target) * torch.exp(-self.uncertainty) + self.uncertainty}

    def side_loss(self, values: list[Tensor]) -> Tensor | float:
        return sum((values[k].square().mean() for k in self.recipe.side), 0.0)


def loss_of(outputs: Any, target: Tensor) -> Tensor:
    """A scalar of every output."""
    losses = [F.mse_loss(value, target / (k + 1)) for k, value in enumerate(outputs["values"])]
    return torch.stack(losses).sum() + 0.3 * outputs["side"]


def draw_recipe(random: Random) -> Recipe:
    """A random recipe of 3 to 12 steps."""
    layers = tuple(random.choice(list(LAYERS)) for _ in range(random.randint(2, 6)))
    plain = [k for k, kind in enumerate(layers) if kind in ("linear", "linear without bias")]
    matrix_count = random.randint(1, 3)
    tied = tuple((k, random.choice(plain)) for k in range(matrix_count) if plain and random.random() < 0.4)
    count = random.randint(3, 12)
    steps = tuple(draw_step(random, layers, matrix_count, k) for k in range(count))
    outputs = {count, *(random.randint(1, count) for _ in range(random.choice((0, 0, 0, 1, 2))))}
    side = {random.randint(1, count) for _ in range(random.choice((0, 0, 1, 2)))}
    frozen = tuple(k for k in range(len(layers)) if random.random() < 0.2)
    return Recipe(
        layers,
        matrix_count,
        steps,
        tuple(sorted(outputs)),
        tuple(sorted(side)),
        own_loss=random.random() < 0.3,
        tied=tied,
        frozen=frozen,
        frozen_embedding=random.random() < 0.3,
        seed=random.randint(0, 99),
    )


def draw_step(random: Random, layers: tuple[str, ...], matrix_count: int, position: int) -> Step:
    """The step that makes value `position + 1`: mostly of the newest value, at times of an older one (a skip)."""

    def source() -> int:
        return position if random.random() < 0.75 else random.randint(0, position)

    group = random.choice(("layer", "layer", "layer", "unary", "unary", "binary", "weighted", "special"))
    if group == "layer":
        layer = random.randrange(len(layers))
        return Step(layers[layer], (source(),), (layer,))
    if group == "unary":
        return Step(random.choice(list(UNARY)), (source(),))
    if group == "binary":
        return Step(random.choice(list(BINARY)), (source(), random.randint(0, position)))
    if group == "weighted":
        matrices = random.randrange(matrix_count), random.randrange(matrix_count)
        return Step(random.choice(list(WEIGHTED)), (source(),), matrices)
    return Step(random.choice(list(SPECIAL)), (source(),))
