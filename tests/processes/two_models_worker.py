"""Scenarios of examples/dpo.py and examples/grpo.py in float64, for test_two_models.py; see tests/support/pool.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import zbfx
from examples import dpo, grpo
from examples.tiny_lm import WithReference

STEPS = 10
EXAMPLES: dict[str, tuple[Callable[[torch.dtype], WithReference], Any, Any, int]] = {
    "dpo": (dpo.pair_of_models, dpo.pipeline, dpo.train, STEPS),
    "grpo": (grpo.models, grpo.pipeline, grpo.train, STEPS // grpo.STEPS_A_ROUND),
}
Rows = list[dict[str, float]]


class Plain:
    """Plain autograd, microbatch after microbatch, with the calls of a step that the examples make."""

    def __init__(self, model: WithReference, loss_fn: Callable[..., Any], microbatches: int) -> None:
        self.model, self.loss_fn, self.microbatches = model, loss_fn, microbatches
        self.metrics: dict[str, Tensor] = {}

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.policy.parameters())

    def full_state_dict(self, *, everywhere: bool) -> dict[str, Tensor]:
        return self.model.state_dict()

    @torch.no_grad()
    def forward(self, ids: Tensor, *, outputs: str, everywhere: bool) -> Tensor:
        found: Tensor = self.model(ids)[outputs]
        return found

    def __call__(self, *batch: Tensor) -> Tensor:
        losses, counts = list[Tensor](), list[Tensor]()
        metrics: list[dict[str, Any]] = []
        for ids, *targets in zip(*(tensor.chunk(self.microbatches) for tensor in batch), strict=True):
            loss, own = self.loss_fn(self.model(ids), *targets)
            total, count = loss if isinstance(loss, tuple) else (loss, torch.ones(()))
            losses.append(total)
            counts.append(count)
            metrics.append(own)
        loss = torch.stack(losses).sum() / torch.stack(counts).sum()
        loss.backward()
        self.metrics = {name: reduced([own[name] for own in metrics]) for name in metrics[0]}
        return loss.detach()


def reduced(values: list[Any]) -> Tensor:
    first = values[0]
    if isinstance(first, tuple):
        sums, counts = (torch.stack(column).double().sum().detach() for column in zip(*values, strict=True))
        return sums / counts
    if isinstance(first, zbfx.Metric):
        stacked = torch.stack([value.value.detach() for value in values])
        return stacked.amax(0) if first.reduction == "max" else stacked.sum(0)
    return torch.stack(values).mean().detach()


def plain(name: str) -> Rows:
    models, _, train, turns = EXAMPLES[name]
    example = {"dpo": dpo, "grpo": grpo}[name]
    rows: Rows = train(Plain(models(torch.float64), example.loss_fn, example.MICROBATCHES), turns)
    return rows


def one_process(name: str) -> Rows:
    models, pipeline, train, turns = EXAMPLES[name]
    rows: Rows = train(pipeline(models(torch.float64)).run_local(), turns)
    return rows


def trained(rank: int, name: str) -> Rows:
    models, pipeline, train, turns = EXAMPLES[name]
    step = pipeline(models(torch.float64)).bind()
    rows: Rows = train(step, turns)
    step.close()
    return rows
