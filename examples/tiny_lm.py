"""What the examples on language models share: a small causal model, log-probabilities of chosen tokens in chunks, and
processes that each run a rank. The model starts from random weights, and nothing is downloaded."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (rows, length, width)
        rows, length, width = x.shape
        parts = self.qkv(self.before(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.after(x))


class TinyLM(nn.Module):
    """A causal language model, which returns the log-probabilities of its input's tokens after the first."""

    def __init__(
        self, vocabulary: int = 61, width: int = 32, layers: int = 4, length: int = 24, chunk: int = 64
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm, self.head, self.chunk = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False), chunk

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, ids: Tensor) -> Tensor:  # (rows, length) -> (rows, length - 1)
        hidden = self.hidden(ids)[:, :-1].flatten(0, 1)
        return chosen_log_probs(hidden, self.head.weight, ids[:, 1:].flatten(), self.chunk).view(len(ids), -1)

    @torch.no_grad()
    def generate(self, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
        """Prompts with sampled tokens after them, up to this length."""
        ids = prompts
        while ids.shape[1] < length:
            odds = self.head(self.hidden(ids)[:, -1]).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(odds, 1, generator=generator)], dim=1)
        return ids


def chunked_log_probs(hidden: Tensor, weight: Tensor, tokens: Tensor, chunk: int) -> Tensor:
    """Log-probabilities of `tokens` (n) where the logits are `hidden @ weight.T`. Only `chunk` rows of logits are there
    at a time, in float32 at least."""
    found = []
    for rows, own in zip(hidden.split(chunk), tokens.split(chunk), strict=True):
        logits = (rows @ weight.T).to(torch.promote_types(rows.dtype, torch.float32))
        found.append(logits.gather(-1, own[:, None])[:, 0] - logits.logsumexp(-1))
    return torch.cat(found)


def chunked_gradients(
    gradient: Tensor, hidden: Tensor, weight: Tensor, tokens: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states and weights. Each chunk's probabilities are computed again, and die with it."""
    of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    parts = (tensor.split(chunk) for tensor in (gradient, hidden, tokens, of_hidden))
    for scale, rows, own, out in zip(*parts, strict=True):
        logits = (rows @ weight.T).to(torch.promote_types(rows.dtype, torch.float32))
        slope = torch.softmax(logits, -1).neg_()
        slope.scatter_add_(-1, own[:, None], torch.ones_like(slope[:, :1])).mul_(scale[:, None])
        slope = slope.to(rows.dtype)
        out.copy_(slope @ weight)
        of_weight.addmm_(slope.T, rows)
    return of_hidden, of_weight


# Operators of their own keep the loops whole: else the slopes of all chunks would be kept between a stage's B and W.
chosen_log_probs = torch.library.custom_op("zbfx_examples::chosen_log_probs", chunked_log_probs, mutates_args=())
chosen_gradients = torch.library.custom_op("zbfx_examples::chosen_gradients", chunked_gradients, mutates_args=())


@chosen_log_probs.register_fake
def _(hidden: Tensor, weight: Tensor, tokens: Tensor, chunk: int) -> Tensor:
    return hidden.new_empty(tokens.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))


@chosen_gradients.register_fake
def _(gradient: Tensor, hidden: Tensor, weight: Tensor, tokens: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return (*chosen_gradients(gradient, *ctx.saved_tensors, ctx.chunk), None, None)


chosen_log_probs.register_autograd(backward, setup_context=keep)


class WithReference(nn.Module):
    """A policy that trains and a frozen reference, over the same ranks. The reference runs first, so that its stages
    come first: the policy's forward and backward stay together."""

    def __init__(self, policy: TinyLM, reference: TinyLM) -> None:
        super().__init__()
        self.reference, self.policy = reference.requires_grad_(False), policy

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            reference = self.reference(ids)
        return {"reference": reference, "policy": self.policy(ids)}


def run_rank(rank: int, processes: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    try:
        work(*arguments)
    finally:
        dist.destroy_process_group()


def over_processes(processes: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work` in so many processes of one pipeline, a rank each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, (processes, port, work, arguments), nprocs=processes)
