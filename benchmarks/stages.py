"""The GPT of the benchmarks cut by layers, the same weights and data for every system, and where to cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import gpt
from benchmarks.gpt import Block, GPTConfig

CONFIGS = gpt.CONFIGS | {"tiny": GPTConfig(layers=5, hidden=32, heads=2, sequence=16, vocabulary=64)}


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks `start` to `end` of a GPT, with the embeddings in front if `first` and norm and head behind if `last`."""

    start: int
    end: int
    first: bool
    last: bool

    @property
    def first_module(self) -> str:
        """The GPT's submodule that begins this piece."""
        if self.first:
            return "tokens"
        return f"blocks.{self.start}" if self.end > self.start else "norm"


class GPTStage(nn.Module):
    """A piece of a GPT whose parameters have the names that they have in the whole."""

    def __init__(self, config: GPTConfig, piece: Piece) -> None:
        super().__init__()
        self.piece = piece
        self.checkpoint = False  # keep the input of every block alone, and compute it again in the backward
        if piece.first:
            self.tokens = nn.Embedding(config.vocabulary, config.hidden)
            self.positions = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in range(piece.start, piece.end)})
        if piece.last:
            self.norm = nn.LayerNorm(config.hidden)
            self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, sequence) if first, else (batch, sequence, hidden)
        if self.piece.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return self.head(self.norm(x)) if self.piece.last else x


def stage(config: GPTConfig, piece: Piece, device: torch.device, dtype: torch.dtype) -> GPTStage:
    """The piece on `device` with the benchmark's weights; nothing else is allocated."""
    with torch.device("meta"):
        module = GPTStage(config, piece).to(dtype)
    module.to_empty(device=device)
    for name, parameter in module.named_parameters():
        fill(name, parameter)
    return module


@torch.no_grad()
def fill(name: str, parameter: Tensor) -> None:
    """The initial value of a parameter, which depends on its name alone: equal however the model is cut."""
    if name.endswith("bias"):
        parameter.zero_()
    elif "norm" in name:
        parameter.fill_(1.0)
    else:
        generator = torch.Generator(parameter.device).manual_seed(crc32(name.encode()))
        parameter.normal_(std=0.02, generator=generator)


def batch(config: GPTConfig, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and targets, each (rows, sequence): the same on every rank and for every system."""
    generator = torch.Generator().manual_seed(rows)
    data = torch.randint(config.vocabulary, (2, rows, config.sequence), generator=generator)
    return data[0].to(device), data[1].to(device)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What the parts beside the blocks cost, in blocks: the embeddings, and the head with its norm and the loss."""

    embedding: float
    head: float


def layers_per_stage(layers: int, placement: Sequence[int], costs: LayerCosts) -> list[int]:
    """How many blocks each stage gets so that ranks, and the stages within a rank, carry about the same load.

    `placement[stage]` is the stage's rank. Every block goes where the load is least.
    """
    load = [0.0] * len(placement)
    load[0] += costs.embedding
    load[-1] += costs.head
    counts = [0] * len(placement)

    def rank_and_stage_load(stage: int) -> tuple[float, float]:
        rank = sum(part for part, owner in zip(load, placement, strict=True) if owner == placement[stage])
        return rank, load[stage]

    for _ in range(layers):
        lightest = min(range(len(placement)), key=rank_and_stage_load)
        load[lightest] += 1.0
        counts[lightest] += 1
    return counts


def pieces(counts: Iterable[int]) -> list[Piece]:
    """Stages of so many blocks, one after the other."""
    ends: list[int] = []
    for count in counts:
        ends.append(count + (ends[-1] if ends else 0))
    starts = [0, *ends[:-1]]
    return [
        Piece(start, end, first=index == 0, last=index == len(ends) - 1)
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
