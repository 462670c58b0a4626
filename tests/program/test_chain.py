"""How the loss goes back along the chain of ranks, by hand."""

from __future__ import annotations

import torch

from zbfx.plan import CostTable, StageCost
from zbfx.program.chain import Chain, chain_of, order_of_ranks
from zbfx.program.messages import TensorLayout
from zbfx.schedule import plan

LOSS = (("loss", TensorLayout((), (), torch.float32)),)


def chain(orders: list[str]) -> Chain:
    costs = CostTable.chain([StageCost(2, 3, 5)] * len(orders), 7)
    schedule = plan(costs, 2, schedule=orders)
    return chain_of(schedule, (), order_of_ranks(schedule, len(orders) - 1), LOSS)


def test_the_loss_is_passed_on_as_soon_as_nobody_waits_for_it() -> None:
    """F1.0 9-11, B1.0 11-14, F1.1 14-16: rank 1 has the loss at 16; rank 0 starts B0.0 at 21."""
    found = chain(["F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 B1.0 F1.1 B1.1 W1.0 W1.1"])
    assert found.ranks == (0, 1)
    assert found.loss_at == (2, 3)
    assert found.prefix == (0, 0)  # no optimizer step is looked at


def test_every_rank_passes_it_on_after_the_one_before() -> None:
    """Rank 2 has it at 25, before its B2.1; B1.0 starts at 30, rank 0's last two Fs before: 2-4, then B0.0 at 40."""
    found = chain(["F0.0 F0.1 B0.0 B0.1 W0.0 W0.1", "F1.0 F1.1 B1.0 B1.1 W1.0 W1.1", "F2.0 B2.0 F2.1 B2.1 W2.0 W2.1"])
    assert found.ranks == (0, 1, 2)
    assert found.loss_at == (2, 2, 3)
