"""Seconds of nodes that compiled phases fuse: what they read from memory and write to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Problem
from tests.support.reference import compiled, traced
from zbfx._torch.operators import aten
from zbfx.costs.fused import fused
from zbfx.graphs import Role
from zbfx.passes.nodes import value_bytes

ROWS, WIDTH, VOCABULARY = 4, 8, 1024


def problem() -> Problem:
    """Two products with a chain of others between them: cos(sin(x w) + 1) w, and its mean."""
    torch.manual_seed(0)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second((self.first(x).sin() + 1).cos())
            return out

    return Problem(Chain().double(), lambda out: out.mean(), (torch.randn(ROWS, WIDTH, dtype=torch.float64),))


def test_a_chain_reads_its_first_value_and_writes_its_last() -> None:
    joint = traced(problem())
    moved = {  # by a node of its own
        node.name: value_bytes(node) + sum(map(value_bytes, node.all_input_nodes))
        for node in joint.graph.nodes
        if node.op == "call_function"
    }
    seconds = fused(joint, lambda node: float(moved.get(node.name, 0)))
    forward = {n.target: n for n in joint.graph.nodes if n.op == "call_function" and not n.meta["is_backward"]}
    one = ROWS * WIDTH * 8
    assert seconds(forward[aten.sin.default]) == one  # reads the product, gives its result to the next one
    assert seconds(forward[aten.add.Tensor]) == 0
    assert seconds(forward[aten.cos.default]) == one  # writes what the second product reads
    product = forward[aten.mm.default]
    assert seconds(product) == moved[product.name]
    # A backward reads forward values from memory, and passes on what another product reads.
    backward = [n for n in joint.graph.nodes if n.target is aten.cos.default and n.meta["is_backward"]]
    assert [seconds(node) for node in backward] == [one] * len(backward) != []


@pytest.mark.parametrize(("backend", "layers"), [("eager", 5), ("inductor", 4)])
def test_compiled_stages_are_cut_by_what_they_move(backend: str, layers: int) -> None:
    """A loss over a vocabulary is many passes over its entries, and few where they are fused."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8)) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(8, VOCABULARY))
    batch = Problem(model, nn.functional.cross_entropy, (torch.randn(64, 8),), (torch.randint(VOCABULARY, (64,)),))
    pipe = compiled(batch, 2, 1, backend=backend, check=False)
    own = {port.name for phase in pipe.stages[0].phases.values() for port in phase.ports if port.role is Role.PARAMETER}
    assert max(int(name.partition(".")[0]) for name in own) == layers
