"""Costs in closed form, by value."""

from __future__ import annotations

import torch
from torch import nn

import zbfx
from zbfx.costs.estimate import Hardware, estimate
from zbfx.plan import Kind

WIDTH, BATCH, LAYERS = 64, 16, 4


def test_every_phase_of_a_linear_stack_counts_its_products() -> None:
    """F, B and W of a middle stage each hold as many products, also where W adds its product into the gradient."""
    batch = torch.zeros(BATCH, WIDTH)
    pipe = zbfx.compile(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))),
        stages=LAYERS,
        microbatches=2,
        example_inputs=(batch,),
        loss_fn=lambda output: output.sum(),
        schedule="zb-h1",
    )
    only_products = Hardware(
        flops_per_s=1.0, bytes_per_s=1e30, launch_s=0.0, link_bytes_per_s=1e30, link_latency_s=0.0, beside=1.0
    )
    middle = estimate(pipe.stages, range(LAYERS), only_products).stages[1]
    assert [middle.seconds(kind) for kind in (Kind.F, Kind.B, Kind.W)] == [2 * BATCH * WIDTH * WIDTH] * 3
