"""Costs measured on the device: made-up tensors of any layout, nothing disturbed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import zbfx
from zbfx.costs.made_up import argument_makers, made_up, positive_inputs
from zbfx.passes.nodes import is_view
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
    assert positive_inputs(graph.nodes) == {x, target, view}
    assert positive_inputs([view]) == set()
    makers = argument_makers(graph, CPU)
    assert all((make() >= 0).all() for make in makers)
    assert fx.GraphModule(nn.Module(), graph)(*[make() for make in makers]) > 0


class Draws(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.draw(x))


class Samples(nn.Module):
    """What is drawn from crosses the cut between the two stages."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), Draws(draw)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).softmax(-1).exp().reciprocal())  # more than a view of softmax


class Solves(nn.Module):
    """Pivots go from F to B."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(torch.linalg.solve(h.T @ h + torch.eye(8), h.T).T)


@torch.library.custom_op("zbfx_tests::positive_log", mutates_args=())
def positive_log(x: Tensor) -> Tensor:
    if not (x > 0).all():
        raise ValueError("a number is not above 0")
    return x.log()


positive_log.register_fake(torch.empty_like)
positive_log.register_autograd(
    lambda ctx, gradient: gradient / ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def measured(model: nn.Module) -> tuple[zbfx.Pipeline, str]:
    """A pipeline cut before the last layer, with measured costs, and what its notes say of made-up values."""
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    pipe = zbfx.compile(
        model,
        stages=2,
        microbatches=2,
        example_inputs=(batch[:4],),
        loss_fn=lambda output: output.square().sum(),
        schedule="zb-h1",
        costs="measure",
        cuts=["last"],
    )
    assert all(stage.seconds(kind) > 0 for stage in pipe.schedule.costs.stages for kind in (Kind.F, Kind.W))
    assert float(pipe.run_local()(batch)) > 0
    return pipe, "\n".join(note for note in pipe.schedule.notes if "made-up" in note)


@pytest.mark.parametrize(
    "model",
    [
        Samples(lambda p: p + torch.multinomial(p, 1)),
        Samples(lambda p: p * torch.bernoulli(p)),
        Samples(lambda p: p * torch.bernoulli((p / p.sum()).view(-1)).view(p.shape)),
        Samples(lambda p: p + torch.poisson(p)),
        Solves(),
    ],
)
def test_values_of_every_domain_are_made_up(model: nn.Module) -> None:
    assert measured(model)[1] == ""


class Logs(nn.Module):
    """Logarithms of what is above 0 in any run, and is not in made-up values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Sequential(Log(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).exp())


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return positive_log(x)


def test_a_phase_that_refuses_made_up_values_takes_what_its_nodes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, note = measured(model := Logs())
    assert note == (
        "the seconds of F1 are the sum of those of its nodes: called on made-up values, it raises ValueError: a number "
        "is not above 0"
    )
    nodes = pipe.stages[1].phases[Kind.F].module.graph.nodes
    taking = [n for n in nodes if n.op == "call_function" and not is_view(n)]
    monkeypatch.setattr("zbfx.costs.measure.call_s", lambda call, _: (call(), 3.0)[1])
    monkeypatch.setattr("zbfx.costs.measure.node_s", lambda *_: 0.25)
    assert measured(model)[0].schedule.costs.stages[1].seconds(Kind.F) == 3 * (len(taking) - 1) + 0.25
