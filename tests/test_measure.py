"""Costs measured on the device: made-up tensors of any layout, nothing disturbed. Run: pytest tests/test_measure.py"""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import zbfx
from zbfx.made_up import arguments_of, made_up, probabilities
from zbfx.plan import Kind

CPU = torch.device("cpu")
aten = torch.ops.aten


@pytest.mark.parametrize(
    "example",
    [
        torch.empty(2, 3),
        torch.empty(3, 2).t(),
        torch.empty(3).expand(4, 3),
        torch.empty(()).expand(2, 2),
        torch.empty(0, 3),
        torch.empty(2, dtype=torch.long),
    ],
)
def test_dummies_have_the_layout_of_the_example(example: torch.Tensor) -> None:
    made = made_up(example, CPU)
    assert (made.shape, made.stride(), made.dtype) == (example.shape, example.stride(), example.dtype)
    assert (made.abs() < 1).all()


def test_measuring_leaves_the_random_state_as_it_was() -> None:
    """A loss that is a sum has an expanded gradient; dropout draws while it is timed."""
    batch = torch.ones(4, 8)
    before = torch.get_rng_state()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    torch.set_rng_state(before)
    pipe = zbfx.compile(
        model,
        stages=2,
        microbatches=2,
        example_inputs=(batch,),
        loss_fn=lambda output: output.sum(),
        schedule="zb-h1",
        costs="measure",
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(stage.seconds(kind) > 0 for stage in pipe.schedule.costs.stages for kind in (Kind.F, Kind.B, Kind.W))


def test_probabilities_are_made_up_in_their_domain() -> None:
    """What is no probability would stop a GPU for good."""
    graph = fx.Graph()
    x, target = graph.placeholder("x"), graph.placeholder("target")
    view = graph.call_function(aten.view.default, (x, [6]))
    loss = graph.call_function(aten.binary_cross_entropy.default, (view, target))
    graph.output(loss)
    for node in (x, target):
        node.meta["val"] = torch.empty(2, 3) if node is x else torch.empty(6)
    assert probabilities(graph.nodes) == {x, target, view}
    assert probabilities([view]) == set()
    makers = arguments_of(graph, CPU)
    assert all((make() >= 0).all() for make in makers)
    assert fx.GraphModule(nn.Module(), graph)(*[make() for make in makers]) > 0
