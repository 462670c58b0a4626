"""Ws that run beside Bs: what the program says, and that nothing but the moment of a W changes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.models import Problem, gpt, gpt2, numbers, squares, unet_batch_norm
from tests.reference import assert_same, compiled, stepped
from zbfx.plan import Kind

ORDERS = ["F0.0 F0.1 F0.2 B0.0 W0.0 B0.1 W0.1 B0.2 W0.2", "F1.0 B1.0 W1.0 F1.1 B1.1 W1.1 F1.2 B1.2 W1.2"]


@pytest.mark.parametrize("maker", [gpt, gpt2, unet_batch_norm])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_equal_in_bits_to_one_after_the_other(maker: object, schedule: str) -> None:
    problem = maker(6)  # type: ignore[operator]
    plain = compiled(problem, 2, 6, schedule=schedule, overlap=False)
    beside = compiled(problem, 2, 6, schedule=schedule, overlap=True)
    assert plain.schedule.beside == ()
    assert len(beside.schedule.beside) >= 2
    assert_same(stepped(problem, beside), stepped(problem, plain), tolerance=0)


def test_the_program_starts_a_w_before_its_b_and_joins_it_after_the_b_was_sent() -> None:
    pipe = compiled(gpt(3), 2, 3, schedule=ORDERS, overlap=True)
    assert [(str(w), str(b)) for w, b in pipe.schedule.beside] == [
        ("W0.0", "B0.1"),
        ("W0.1", "B0.2"),
        ("W1.0", "B1.1"),
        ("W1.1", "B1.2"),
    ]
    called = re.findall(r"= (self\.\w+|zbfx_(?:comm_send|streams_join))\(", pipe.programs[1].code)
    assert called == [
        *("self.F1", "self.B1", "zbfx_comm_send"),
        *("self.F1", "self.W1_beside", "self.B1", "zbfx_comm_send", "zbfx_streams_join"),
        *("self.F1", "self.W1_beside", "self.B1", "zbfx_comm_send", "zbfx_streams_join"),
        "self.W1",
    ]


def test_what_a_w_reads_lives_until_it_is_joined() -> None:
    pipe = compiled(gpt(3), 2, 3, schedule=ORDERS, overlap=True)
    nodes = list(pipe.programs[0].module.graph.nodes)
    for guest, _ in pipe.schedule.beside:
        if guest.stage != 0:
            continue
        started = next(node for node in nodes if node.meta.get("action") == guest)
        join = next(user for user in started.users)
        assert set(started.all_input_nodes) - set(join.all_input_nodes) == {
            node for node in nodes if node.name == f"microbatch_{guest.microbatch}"
        }


def test_a_memory_limit_keeps_ws_apart() -> None:
    free = compiled(gpt(3), 2, 3, schedule=ORDERS, overlap=True)
    serial = compiled(gpt(3), 2, 3, schedule=ORDERS, overlap=False)
    assert free.schedule.peak_bytes[1] > serial.schedule.peak_bytes[1]
    limited = compiled(gpt(3), 2, 3, schedule=ORDERS, overlap=True, mem_limit=serial.schedule.peak_bytes)
    assert all(guest.stage == 0 for guest, _ in limited.schedule.beside)
    assert limited.schedule.peak_bytes == serial.schedule.peak_bytes


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
    pipe = compiled(problem, 2, 3, schedule="zb-h1", overlap=True)
    for guest, _ in pipe.schedule.beside:
        phases = pipe.stages[guest.stage].phases
        assert not phases[Kind.W].is_random
        assert not set(phases[Kind.W].gradients) & set(phases[Kind.B].gradients)


def test_overlap_is_for_devices_with_streams() -> None:
    assert compiled(gpt(3), 2, 3).schedule.beside == ()
    with pytest.raises(zbfx.errors.ZbfxError, match="overlap is True, False or None; found 'yes'"):
        compiled(gpt(3), 2, 3, overlap="yes")
