"""Own small models of `same_bits.py`, which differ in how parameters, buffers, losses and dtypes are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

WIDTH, LENGTH, VOCABULARY = 8, 6, 24


@dataclass(frozen=True)
class Problem:
    """A model with its loss, and a batch of `rows` rows: `targets` go to the loss, `options` to `zbfx.compile`.

    `autocast` says whether the model is compiled under autocast to bfloat16.
    """

    rows: int
    model: nn.Module
    loss_fn: Callable[..., Any] | None
    inputs: tuple[Any, ...] = ()
    targets: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    autocast: bool = False

    def first(self, rows: int) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """Inputs, targets and keyword arguments of the first rows."""

        def cut(tensor: Tensor) -> Tensor:
            return tensor[:rows] if tensor.dim() and len(tensor) == self.rows else tensor

        found = pytree.tree_map(cut, (self.inputs, self.targets, dict(self.kwargs)))
        return found[0], found[1], found[2]

    def batch(self, roll: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of a step, whose rows are rolled by so many."""

        def rolled(tensor: Tensor) -> Tensor:
            return tensor.roll(roll, 0) if tensor.dim() and len(tensor) == self.rows else tensor

        args, kwargs = pytree.tree_map(rolled, ((*self.inputs, *self.targets), dict(self.kwargs)))
        return args, kwargs


Maker = Callable[[int], Problem]  # number of rows -> a problem, with parameters that are the same every time


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ids(*shape: int, limit: int = VOCABULARY, seed: int = 1) -> Tensor:
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def regression(model: nn.Module, rows: int, **fields: Any) -> Problem:
    """Rows of numbers in, rows of numbers out."""
    inputs, targets = numbers(rows, WIDTH), numbers(rows, WIDTH, seed=2)
    return Problem(rows, model, F.mse_loss, (inputs,), (targets,), **fields)


def next_tokens(model: nn.Module, rows: int, loss_fn: Callable[..., Any] = token_loss) -> Problem:
    tokens = ids(rows, LENGTH + 1)
    return Problem(rows, model, loss_fn, (tokens[:, :-1],), (tokens[:, 1:],))


class Perceptron(nn.Sequential):
    """Linear layers, each followed by what `between` makes."""

    def __init__(self, *between: Callable[[], nn.Module], layers: int = 5) -> None:
        super().__init__(*(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), *(make() for make in between))))


def mlp(rows: int) -> Problem:
    return regression(Perceptron(nn.Tanh), rows)


def summed(rows: int) -> Problem:
    return regression(Perceptron(nn.GELU), rows, options={"loss_reduction": "sum"})


def dropout(rows: int) -> Problem:
    return regression(Perceptron(nn.Tanh, lambda: nn.Dropout(0.3)), rows)


def batch_norm(rows: int) -> Problem:
    return regression(Perceptron(lambda: nn.BatchNorm1d(WIDTH), nn.ReLU), rows)


def double(rows: int) -> Problem:
    inputs, targets = (numbers(rows, WIDTH, seed=seed, dtype=torch.float64) for seed in (1, 2))
    return Problem(rows, Perceptron(nn.SiLU).double(), F.mse_loss, (inputs,), (targets,))


def frozen(rows: int) -> Problem:
    """A first layer, a bias and a whole layer in the middle do not train."""
    model = Perceptron(nn.Tanh, layers=6)
    for module in (model[0], model[6]):
        module.requires_grad_(False)
    next(p for name, p in model[8].named_parameters() if name == "bias").requires_grad_(False)
    return regression(model, rows)


class Block(nn.Module):
    def __init__(self, heads: int, drop: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(drop)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class Decoder(nn.Module):
    """A GPT; with `tied`, the head's weight is the embedding's."""

    def __init__(self, *, tied: bool = False, drop: float = 0.0, blocks: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH + 4, WIDTH)
        self.blocks = nn.ModuleList(Block(2, drop) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(rows: int) -> Problem:
    return next_tokens(Decoder(), rows)


def tied(rows: int) -> Problem:
    return next_tokens(Decoder(tied=True), rows)


def tied_dropout(rows: int) -> Problem:
    return next_tokens(Decoder(tied=True, drop=0.2), rows)


class Cast(nn.Module):
    """A model whose forward runs under autocast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


def cast_inside(rows: int) -> Problem:
    return next_tokens(Cast(Decoder(tied=True)), rows)


def cast_outside(rows: int) -> Problem:
    return regression(Perceptron(nn.GELU), rows, autocast=True)


class Mixed(nn.Module):
    """Layers of float32, float64 and bfloat16 in turn."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(next(layer.parameters()).dtype)))
        return x.float()


def mixed_dtypes(rows: int) -> Problem:
    return regression(Mixed(), rows)


class Mirrored(nn.Module):
    """Layers down and up again; each one's output skips to its mirror, over all stages between them."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skipped.append(x)
        for layer in self.up:
            x = torch.tanh(layer(x + skipped.pop()))
        return x


def skips(rows: int) -> Problem:
    return regression(Mirrored(), rows)


class Repeated(nn.Module):
    """One layer that runs after each of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.own:
            x = self.shared(torch.tanh(layer(x)))
        return x


def shared_module(rows: int) -> Problem:
    return regression(Repeated(), rows)


class Routed(nn.Module):
    """Every layer adds to a loss beside that of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.gates = Decoder(), nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(4))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, side = self.decoder.tokens(tokens), torch.zeros(())
        for block, gate in zip(self.decoder.blocks, self.gates, strict=True):
            weights = gate(x).softmax(-1)
            x = block(x) * weights.amax(-1, keepdim=True)
            side = side + weights.mean((0, 1)).square().sum()
        return self.decoder.head(x), side


def side_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count over the tokens that are not ignored."""
    logits, side = outputs
    count = (targets != -100).sum()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return loss + 0.01 * side * count, count


def side_losses(rows: int) -> Problem:
    tokens = ids(rows, LENGTH + 1)
    targets = tokens[:, 1:].clone()
    targets[::3, 2:] = -100
    return Problem(rows, Routed(), side_loss, (tokens[:, :-1],), (targets,))


class Heads(nn.Module):
    """Outputs of several depths, in a dict; inputs nested, one of them the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Perceptron(nn.Tanh, layers=2), Perceptron(nn.Tanh, layers=3)
        self.classes = nn.Linear(WIDTH, 3)

    def forward(self, inputs: dict[str, Tensor], scale: Tensor) -> dict[str, Tensor]:
        middle = self.first(inputs["left"] + scale * inputs["right"])
        return {"middle": middle, "classes": self.classes(middle), "last": self.last(middle)}


def heads_loss(outputs: dict[str, Tensor], numbers: Tensor, classes: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs["classes"], classes)
    return loss + F.mse_loss(outputs["last"], numbers) + 0.1 * outputs["middle"].abs().mean()


def several_outputs(rows: int) -> Problem:
    inputs = {"left": numbers(rows, WIDTH), "right": numbers(rows, WIDTH, seed=2)}
    targets = numbers(rows, WIDTH, seed=3), ids(rows, limit=3)
    return Problem(rows, Heads(), heads_loss, (inputs, numbers(1, WIDTH, seed=4)), targets)


class Critic(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, WIDTH)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(self.scores(output), target)


def trained_loss(rows: int) -> Problem:
    inputs, targets = numbers(rows, WIDTH), numbers(rows, WIDTH, seed=2)
    return Problem(rows, Perceptron(nn.ELU), Critic(), (inputs,), (targets,))


class Counting(nn.Module):
    """Forwards write buffers that later forwards read: a count of microbatches and a running mean."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Perceptron(nn.Tanh, layers=2), Perceptron(nn.Tanh, layers=3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.training:
            self.count += 1
            self.mean.lerp_(x.detach().mean(0), 0.3)
        return self.after(x - self.mean)


def written_buffers(rows: int) -> Problem:
    return regression(Counting(), rows)


class Recurrent(nn.Module):
    """A cell unrolled over the sequence: every stage uses its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
        return self.head(state)


def recurrent(rows: int) -> Problem:
    inputs, targets = numbers(rows, 5, WIDTH), numbers(rows, WIDTH, seed=2)
    return Problem(rows, Recurrent(), F.mse_loss, (inputs,), (targets,))


def images(model: nn.Module, rows: int) -> Problem:
    return Problem(rows, model, F.cross_entropy, (numbers(rows, 2, 8, 8),), (ids(rows, limit=4),))


def convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
    channels = (2, 4, 8, 8, 8)
    layers = [
        layer
        for before, after in pairwise(channels)
        for layer in (nn.Conv2d(before, after, 3, padding=1), norm(after), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 4))


def conv_group_norm(rows: int) -> Problem:
    return images(convolutions(lambda channels: nn.GroupNorm(2, channels)), rows)


def conv_batch_norm(rows: int) -> Problem:
    return images(convolutions(nn.BatchNorm2d), rows)


def encoder_decoder(rows: int) -> Problem:
    """torch's own Transformer: the encoder's output is read by every decoder layer."""
    model = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
    inputs = numbers(rows, 5, WIDTH), numbers(rows, 4, WIDTH, seed=2)
    return Problem(rows, model, F.mse_loss, inputs, (numbers(rows, 4, WIDTH, seed=3),))
