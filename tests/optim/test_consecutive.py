"""Consecutive steps, simulated."""

from __future__ import annotations

import pytest
import torch

from zbfx.optim.consecutive import OptimizerCosts, planned
from zbfx.plan import Action, CostTable, Kind, StageCost, parts
from zbfx.program.chain import chain_of, order_of_ranks, prefixes
from zbfx.program.messages import Message, TensorLayout
from zbfx.schedule import plan
from zbfx.schedule.schedule import Schedule

RANKS, MICROBATCHES = 3, 6
F, B, W, COMM, STEP, REDO, HOP = 2, 3, 5, 7, 11, 13, 0.5


def messages_of(schedule: Schedule) -> list[Message]:
    """Those of a plain chain, each sender's in the order of sending."""
    found = []
    for rank, order in enumerate(schedule.ranks):
        for action in (part for fused in order for part in parts(fused)):
            step = {Kind.F: 1, Kind.B: -1, Kind.W: 0}[action.kind]
            if step and 0 <= rank + step < RANKS:
                consumer = Action(action.kind, rank + step, action.microbatch)
                found.append(Message(f"{action}>{rank + step}", action, consumer, rank, rank + step, (), ()))
    return found


def table(comm: float = 0.0, f: float = 1, b: float = 1, w: float = 1) -> CostTable:
    return CostTable.chain([StageCost(f, b, w, 1, 0)] * RANKS, comm)


def plans(schedule: Schedule, costs: OptimizerCosts) -> tuple[float, float, float]:
    messages = messages_of(schedule)
    loss = (("loss", TensorLayout((), (), torch.float32)),)
    chain = chain_of(schedule, messages, order_of_ranks(schedule, RANKS - 1), loss, 5)
    found = planned(schedule, messages, chain, costs)
    return found.barrier_s, found.validated_s, found.repeat_s


def costs(step: float = 0.0, redo: float = 0.0, hop: float = 0.0) -> OptimizerCosts:
    return OptimizerCosts((step,) * RANKS, (redo,) * RANKS, hop, (1,) * RANKS)


def test_zero_bubble_needs_steps_without_a_barrier() -> None:
    """ZB-H2 has no bubble within a step: with equal times a step takes 3 m, and a barrier adds p - 1 forwards."""
    schedule = plan(table(), MICROBATCHES, schedule="zb-h2")
    barrier, validated, repeat = plans(schedule, costs())
    assert validated == 3 * MICROBATCHES
    assert barrier == 3 * MICROBATCHES + (RANKS - 1)
    assert repeat == 5  # rank 0 runs its 2 p - 1 forwards again


def test_gpipe_gains_nothing() -> None:
    schedule = plan(table(), MICROBATCHES, schedule="gpipe")
    barrier, validated, repeat = plans(schedule, costs())
    assert barrier == validated == RANKS - 1 + 3 * MICROBATCHES + RANKS - 1  # the B of a fused backward sends first
    assert repeat == MICROBATCHES + RANKS - 1  # all forwards


def test_optimizer_and_messages_take_their_time() -> None:
    schedule = plan(table(COMM, F, B, W), MICROBATCHES, schedule="zb-h1")
    barrier, validated, _ = plans(schedule, costs(STEP, REDO, HOP))
    assert barrier == pytest.approx(schedule.makespan_s + STEP + HOP * (RANKS - 1))
    assert validated < barrier


def test_prefixes_are_the_forwards_before_the_first_backward() -> None:
    for name, expected in (("1f1b", (3, 2, 1)), ("zb-h1", (3, 2, 1)), ("zb-h2", (5, 3, 1)), ("gpipe", (6, 6, 6))):
        schedule = plan(table(), MICROBATCHES, schedule=name)
        orders = [[part for action in order for part in parts(action)] for order in schedule.ranks]
        assert prefixes(orders, messages_of(schedule)) == expected, name


def test_a_prefix_ends_where_it_reads_what_no_prefix_makes() -> None:
    def order(text: str) -> list[Action]:
        return [Action.parse(word) for word in text.split()]

    orders = [order("F0.0 B0.0 F0.1 B0.1"), order("F1.0 F1.1 B1.1 B1.0")]
    read = Message("F0.1>1", Action.parse("F0.1"), Action.parse("F1.1"), 0, 1, (), ())
    assert prefixes(orders, [read]) == (1, 1)
