"""Ws that run beside Bs: what the program says, and that nothing but the moment of a W changes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.support.models import Maker, Problem, gpt, gpt2, numbers, squares, unet_batch_norm
from tests.support.reference import assert_same, beside, compiled, shared, shared_problem, stepped
from zbfx.plan import CostTable, Kind

ORDERS = ("F0.0 F0.1 F0.2 B0.0 W0.0 B0.1 W0.1 B0.2 W0.2", "F1.0 B1.0 F1.1 W1.0 B1.1 F1.2 W1.1 B1.2 W1.2")


def costs_beside(pipe: zbfx.Pipeline) -> CostTable:
    """The pipeline's costs on a device where half of every W disappears beside a B."""
    stages = [replace(s, beside_s=s.backward_input_s + s.backward_weight_s / 2) for s in pipe.schedule.costs.stages]
    return replace(pipe.schedule.costs, stages=tuple(stages))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("maker", "schedule"),
    [(gpt, "zb-h2"), (gpt, "interleaved-1f1b"), (gpt2, "interleaved-1f1b"), (unet_batch_norm, "zb-h2")],
)
def test_equal_in_bits_to_one_after_the_other(maker: Maker, schedule: str) -> None:
    problem = shared_problem(maker, 6, torch.float32)
    plain = shared(maker, 2, 6, schedule=schedule, stages_per_rank=2 if schedule == "interleaved-1f1b" else None)
    overlapped = beside(plain)
    assert plain.schedule.beside == ()
    assert len(overlapped.schedule.beside) >= 8
    assert_same(stepped(problem, overlapped), stepped(problem, plain), tolerance=0)


@cache
def overlapping() -> zbfx.Pipeline:
    return shared(gpt, 2, 3, schedule=ORDERS, costs=costs_beside(shared(gpt, 2, 3, schedule=ORDERS)), overlap=True)


@pytest.mark.slow
def test_the_program_starts_a_w_before_its_b_and_joins_it_after_the_b_was_sent() -> None:
    pipe = overlapping()
    assert [(str(w), str(b)) for w, b in pipe.schedule.beside] == [
        ("W0.0", "B0.1"),
        ("W0.1", "B0.2"),
        ("W1.0", "B1.1"),
        ("W1.1", "B1.2"),
    ]
    called = re.findall(r"= (self\.\w+|zbfx_program_(?:ops_send|streams_join))\(", pipe.programs[1].code)
    assert called == [
        *("self.F1", "self.B1", "zbfx_program_ops_send"),
        *("self.F1", "self.W1_beside", "self.B1", "zbfx_program_ops_send", "zbfx_program_streams_join"),
        *("self.F1", "self.summary", "zbfx_program_ops_send"),
        *("self.W1_beside", "self.B1", "zbfx_program_ops_send", "zbfx_program_streams_join"),
        "self.W1",
    ]


@pytest.mark.slow
def test_what_a_w_reads_lives_until_it_is_joined() -> None:
    pipe = overlapping()
    nodes = list(pipe.programs[0].module.graph.nodes)
    for guest, _ in pipe.schedule.beside:
        if guest.stage != 0:
            continue
        started = next(node for node in nodes if node.meta.get("action") == guest)
        join = next(user for user in started.users)
        assert {f"microbatch_{guest.microbatch}"} < {node.name for node in started.all_input_nodes}
        assert set(started.all_input_nodes) <= set(join.all_input_nodes)


@pytest.mark.slow
def test_no_w_that_would_break_the_limit_runs_beside_another() -> None:
    costs = costs_beside(shared(gpt, 2, 6))
    found = {}
    for limit in ("1x", "1.5x", "2x"):
        free, serial = (
            shared(gpt, 2, 6, schedule="auto", overlap=overlap, costs=costs, mem_limit=limit).schedule
            for overlap in (True, False)
        )
        assert free.mem_limit is not None
        assert all(peak <= allowed for peak, allowed in zip(free.peak_bytes, free.mem_limit, strict=True))
        assert (free.expected_s or free.iteration_s) <= serial.iteration_s
        found[limit] = len(free.beside)
    assert found["1x"] < found["2x"]


class Dropped(nn.Module):
    """Its W draws random numbers: the masks of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(
                lambda x, layer=layer: nn.functional.dropout(layer(x).tanh(), 0.5), x, use_reentrant=False
            )
        return x


def test_phases_that_share_what_they_write_are_kept_apart() -> None:
    problem = Problem(Dropped(), squares, (numbers(6, 4),))
    plain = compiled(problem, 2, 3, schedule="zb-h1")
    pipe = compiled(problem, 2, 3, schedule="zb-h1", overlap=True, costs=costs_beside(plain))
    for guest, _ in pipe.schedule.beside:
        phases = pipe.stages[guest.stage].phases
        assert not phases[Kind.W].is_random
        assert not set(phases[Kind.W].gradients) & set(phases[Kind.B].gradients)


def test_overlap_is_for_devices_with_streams() -> None:
    assert shared(gpt, 2, 3).schedule.beside == ()
    with pytest.raises(zbfx.errors.ZbfxError, match="overlap is True, False or None; found 'yes'"):
        compiled(gpt(3), 2, 3, overlap="yes")
