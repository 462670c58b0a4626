"""The plain GPT of the benchmarks and the demo: pre-LN blocks, causal attention, untied head, mean cross entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT; `hidden` is the paper's h, `heads` its a, `sequence` its s."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 1024
    vocabulary: int = 50304


# Table 3 of the paper, and the two smaller models of the GPU benchmarks.
CONFIGS = {
    "350M": GPTConfig(24, 1024, 16),
    "1.5B": GPTConfig(22, 2304, 24),
    "3B": GPTConfig(30, 2560, 32),
    "6.2B": GPTConfig(30, 4096, 32),
    "14.6B": GPTConfig(46, 5120, 40),
    "28.3B": GPTConfig(62, 6144, 48),
}


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # (batch, sequence, hidden) -> the same
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, sequence, hidden / heads)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, sequence) -> (batch, sequence, vocabulary)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in float32: logits (batch, sequence, vocabulary), targets (batch, sequence) -> scalar."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
