"""Splitting the backward into B and W."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases.common import WIDTH, Body, check, count_ops, layers, linears, of, phases
from tests.support.models import Problem, ids, mean_squares, numbers, squares, token_loss
from tests.support.reference import activations, assert_same, compiled, default_dtype, gradients, reference, stepped
from zbfx import InputError, InvalidSchedule, Kind, ZbfxError

aten = torch.ops.aten


def three_times(self: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(x @ self.a)
    return x


def gated_by_itself(self: Any, x: Tensor) -> Tensor:
    h = x @ self.a
    return h * (h @ self.a)


class Reused(nn.Module):
    """One linear layer called on both sides of another, with a skip over both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears("shared", "other")

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layers["shared"](x))
        return self.layers["shared"](torch.tanh(self.layers["other"](h))) + h


@pytest.mark.slow
def test_case_01_same_weight_twice() -> None:
    check(of(lambda self, x: x @ self.a @ self.a))
    check(of(three_times))
    check(of(gated_by_itself))
    check(of(lambda self, x: (x @ self.a) @ self.b + (x @ self.b) @ self.a))
    check(Problem(Reused(), squares, (numbers(6, WIDTH),)), schedule="1f1b")


class Tied(nn.Module):
    """Token embedding and head are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.layer = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.tokens(tokens))) @ self.tokens.weight.T


def tokens_problem(model: nn.Module) -> Problem:
    return Problem(model, token_loss, (ids(6, 3, vocabulary=8),), (ids(6, 3, vocabulary=8, seed=2),))


def test_case_02_embedding_and_head_tied_in_one_stage() -> None:
    for problem in (of(lambda self, x: F.gelu(x @ self.a) @ self.a.T), tokens_problem(Tied())):
        pipe = check(problem, 1)
        given = [name for phase in phases(pipe) for name in phase.gradients]
        trained = [name for name, p in problem.model.named_parameters() if p.grad is not None]
        assert sorted(set(given)) == sorted(trained)
        assert all(len(set(phase.gradients)) == len(phase.gradients) for phase in phases(pipe))


class Product(torch.autograd.Function):
    """x @ w that saves both, with the weight's gradient tripled: not the true one, on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.T, 3.0 * x.T @ gradient


class BetweenTwoCalls(nn.Module):
    """A custom Function between two calls of one linear layer."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        return self.linear(torch.tanh(self.product(h, self.weight)))


@torch.library.custom_op("zbfx_cases::product", mutates_args=())
def opaque_product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@opaque_product.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@torch.library.custom_op("zbfx_cases::product_backward", mutates_args=())
def opaque_backward(gradient: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return gradient @ w.T, 3.0 * (x.T @ gradient)


@opaque_backward.register_fake
def _(gradient: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward_of_product(ctx: Any, gradient: Tensor) -> Any:
    return opaque_backward(gradient, *ctx.saved_tensors)


opaque_product.register_autograd(backward_of_product, setup_context=save)


@pytest.mark.slow
def test_case_04_custom_function() -> None:
    pipe = check(Problem(BetweenTwoCalls(Product.apply), squares, (numbers(6, WIDTH),)))
    assert not any("not split" in note for note in pipe.schedule.notes)  # made of aten ops, which split
    opaque = Problem(BetweenTwoCalls(lambda x, w: opaque_product(x, w)), squares, (numbers(6, WIDTH),))
    for stages in (1, 2, 3):
        pipe = check(opaque, stages)
        target = torch.ops.zbfx_cases.product_backward.default
        assert count_ops(phases(pipe), target) == count_ops(phases(pipe, Kind.B), target) == 1  # once, whole, in B
        (note,) = (note for note in pipe.schedule.notes if "product_backward" in note)
        assert note.startswith("not split: zbfx_cases.product_backward.default")
        assert "test_splitting.py:" in note


class Checkpointed(nn.Module):
    """A linear layer, then n recomputed pairs of linear and ReLU."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(b for _ in range(pairs) for b in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.blocks, self.first(x), use_reentrant=False)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [1, 2, 4, 8, 16])
def test_case_05_checkpointed_block_is_recomputed_once(pairs: int) -> None:
    """Also where cuts go through it: each stage recomputes its own part."""
    problem = Problem(Checkpointed(pairs), squares, (numbers(6, WIDTH),))
    for stages in (1, min(pairs, 3)):
        pipe = check(problem, stages)
        assert count_ops(phases(pipe, Kind.F), aten.relu.default) == pairs
        again = count_ops(phases(pipe, Kind.B, Kind.W), aten.relu.default)
        assert 0 < again <= pairs
        assert count_ops(phases(pipe, Kind.W), aten.relu.default) == 0
    recomputed = {n.name for n in phases(pipe, Kind.B)[0].module.graph.nodes if n.target is aten.relu.default}
    held = {name for name in pipe.stages[0].phases[Kind.W].values if name in recomputed}
    assert held == recomputed & set(pipe.stages[0].phases[Kind.B].results)


class SideOutput(nn.Module):
    """Every stage also gives an output that depends on parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears("a", "b", "c")
        self.p, self.q = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.layers["a"](x))
        h = torch.tanh(self.layers["b"](h))
        side = self.p.expand(h.shape[0], WIDTH)
        product = torch.tanh(self.p @ self.q)
        return self.layers["c"](h), side, product


def side_loss(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return squares(output[0] * output[1]) + output[2].sum()


def test_case_06_output_of_parameters_only() -> None:
    problem = Problem(SideOutput(), side_loss, (numbers(6, WIDTH),))
    for options in ({"stages": 1}, {"stages": 2}, {"stages": 3, "cuts": ["layers.b", "layers.c"]}):
        pipe = check(problem, **options)
        given = {name for phase in phases(pipe, Kind.B, Kind.W) for name in phase.gradients}
        assert given == {name for name, _ in problem.model.named_parameters()}
    check(of(lambda self, x: torch.tanh(x @ self.a) @ self.b + torch.tanh(self.c).sum(0)))


def late(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ self.a) @ self.b) @ self.c + y


@pytest.mark.slow
def test_case_07_input_not_used_or_used_later_only() -> None:
    y = numbers(6, WIDTH, seed=3)
    check(of(lambda self, x, y: torch.tanh(x @ self.a) @ self.b, y))
    pipe = check(of(late, y))
    assert ["inputs[1]" in r.input_names for r in pipe.run_local().engine.runners] == [False, True, False]
    returned = of(lambda self, x, y: (torch.tanh(torch.tanh(x @ self.a) @ self.b) @ self.c, y), y)
    check(Problem(returned.model, lambda output: squares(output[0] * output[1]), returned.inputs))
    zero = of(lambda self, x, y: torch.tanh(x @ self.a) @ self.b + torch.zeros_like(y @ self.c), y)
    pipe = check(zero)
    assert zero.model.get_parameter("c").grad is None
    sent = [layout for m in activations(pipe) for layout in m.layouts]
    assert sent
    assert all(layout.dtype.is_floating_point for layout in sent)
    wants = of(lambda self, x, y: torch.tanh(x @ self.a) @ self.b, y.clone().requires_grad_())
    with pytest.raises(ZbfxError, match=r"inputs\[1\]"):
        compiled(wants, 2, 3).run_local()(*wants.inputs)


class Scale:
    """An argument that is no tensor: neither a pytree nor comparable."""

    def __init__(self, factor: float, shift: Tensor | None = None) -> None:
        self.factor, self.shift = factor, shift


def scaled(self: Any, x: Tensor, scale: Scale) -> Tensor:
    h = torch.tanh(x @ self.a) * scale.factor
    return (h if scale.shift is None else h + scale.shift) @ self.b


def test_case_08_input_that_is_no_tensor() -> None:
    scale = Scale(2.0)
    problem = of(scaled, scale)
    check(problem)
    check(of(scaled, Scale(2.0, numbers(WIDTH, seed=5))))
    check(of(lambda self, x, mask: torch.tanh(x @ self.a) * mask["k"] @ self.b, {"k": 3.0, "unused": None}))
    step = compiled(problem, 2, 3).run_local()
    loss = step(problem.inputs[0], Scale(2.0))  # another object that means the same
    assert loss == compiled(problem, 2, 3).run_local()(*problem.inputs)
    with pytest.raises(InputError, match=r"inputs\[1\] was"):
        step(problem.inputs[0], Scale(3.0))
    scale.factor = 3.0
    with pytest.raises(InputError, match="compile again with this value"):
        step(*problem.inputs)


def written_through_a_view(self: Any, x: Tensor) -> Tensor:
    h = x @ self.a
    flat = h.view(-1)
    flat.mul_(2.0)
    return torch.tanh(h) @ self.b + flat.view(-1, WIDTH)


VIEWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flattened": lambda self, x: (x @ self.a).view(-1),
    "chunk": lambda self, x: (x @ self.a).chunk(2, -1)[0],
    "transposed": lambda self, x: (x @ self.a).t(),
    "flattened between": lambda self, x: torch.tanh((x @ self.a).view(-1)).view(-1, WIDTH) @ self.b,
    "chunks between": lambda self, x: torch.mul(*(x @ self.a).chunk(2, -1)) @ self.b[:3],
    "identity between": lambda self, x: (x @ self.a).view_as(x).view_as(x) @ self.b,
    "written through a view": written_through_a_view,
}


@pytest.mark.slow
@pytest.mark.parametrize("body", VIEWS.values(), ids=VIEWS.keys())
def test_case_09_stage_returns_a_view(body: Callable[[Any, Tensor], Tensor]) -> None:
    stages = (1,) if body in (VIEWS["flattened"], VIEWS["chunk"], VIEWS["transposed"]) else (1, 2)
    problem = of(body)
    check(problem, stages)
    if len(stages) == 1:  # now between two stages
        turned = of(lambda self, x: torch.tanh(body(self, x).reshape(-1, 3)) @ self.b[:3])
        check(turned, (2, 3))


def test_case_09_stage_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Flatten(), nn.Unflatten(1, (2, 3)), nn.Flatten())
    problem = Problem(model.append(nn.Linear(WIDTH, WIDTH)), squares, (numbers(6, WIDTH),))
    pipe = check(problem, 3, cuts=["1", "5"])
    assert pipe.stages[1].phases[Kind.W].is_empty


def test_case_10_parameter_hooks_are_refused() -> None:
    """Of both kinds, at any time before a step; hooks on activations act as in eager."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        problem = Problem(layers(2), squares, (numbers(4, WIDTH),))
        pipe = compiled(problem, 2, 2)
        step = pipe.run_local()
        handle = getattr(problem.model.get_parameter("2.weight"), register)(lambda _: None)
        for run in (pipe.run_local, lambda step=step, problem=problem: step(*problem.inputs)):
            with pytest.raises(ZbfxError, match=r"found hooks on the gradients of 2\.weight") as caught:
                run()
            assert "after the step" in str(caught.value)
        assert all(parameter.grad is None for parameter in problem.model.parameters())
        handle.remove()
        expected = reference(problem, 2)
        assert_same((step(*problem.inputs), gradients(problem.model)), expected, 1e-12)

    def hooked(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.a)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        return h @ self.b

    check(of(hooked))


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + (x @ self.down) @ self.up)


def frozen(model: nn.Module, keep: Callable[[str], bool]) -> Problem:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(keep(name))
    return Problem(model, mean_squares, (numbers(6, WIDTH),), (numbers(6, WIDTH, seed=2),))


def test_case_11_frozen_parameters() -> None:
    pipe = check(frozen(layers(6), lambda name: not name.startswith("0.")), 3, cuts=["2", "6"])
    assert [phase.is_empty for phase in pipe.stages[0].phases.values()] == [True, False, True, True]  # F alone
    assert not any(message.target == 0 for message in activations(pipe))
    pipe = check(frozen(layers(6), lambda name: name[0] not in "46"), 3, cuts=["4", "8"])
    assert [phase.is_empty for phase in pipe.stages[1].phases.values()] == [True, False, False, True]  # F and B
    check(Problem(nn.Sequential(LoRA(), LoRA(), LoRA()), squares, (numbers(6, WIDTH),)))
    pipe = check(frozen(layers(4), lambda name: name.endswith("bias")))
    assert not any(name.endswith("weight") for phase in phases(pipe) for name in phase.gradients)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears("used", "unused", "head")

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["head"](torch.tanh(self.layers["used"](x)))


@pytest.mark.parametrize("stages", [1, 2])
def test_case_12_unused_parameters_do_not_move(stages: int) -> None:
    problem = Problem(HalfUsed(), squares, (numbers(6, WIDTH),))
    eager = copy.deepcopy(problem.model)
    step = compiled(problem, stages, 3).run_local()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (problem.model, eager)]
    for _ in range(3):
        step(*problem.inputs)
        reference(problem, 3, eager)
        assert problem.model.get_parameter("layers.unused.weight").grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(problem.model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_case_13_first_stage_on_integers_has_a_real_b() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    problem = tokens_problem(model)
    check(problem, 1)
    pipe = check(problem, 2, cuts=["3"])
    first = pipe.stages[0].phases
    assert not first[Kind.B].is_empty
    assert count_ops([first[Kind.W]], aten.tanh_backward.default) == 0  # the activation's gradient is B's
    assert set(first[Kind.B].gradients) | set(first[Kind.W].gradients) == {"0.weight", "1.weight", "1.bias"}
    assert pipe.schedule.costs.stages[0].backward_input_s > 0  # the planner's costs are those of what runs
    assert [m.key for m in pipe.programs[0].messages.values() if m.producer is None] == ["loss>0"]  # no shared gradient


ORDERS: dict[str, tuple[list[str], str]] = {
    "removed": (["F0.0 B0.0 F0.1 B0.1 W0.1"], "W0.0 is missing"),
    "doubled": (["F0.0 B0.0 W0.0 W0.0 F0.1 B0.1 W0.1"], "W0.0"),
    "before its B": (["F0.0 W0.0 B0.0 F0.1 B0.1 W0.1"], "W0.0"),
    "B removed": (["F0.0 W0.0 F0.1 B0.1 W0.1"], "B0.0"),
    "B before its F": (["B0.0 F0.0 W0.0 F0.1 B0.1 W0.1"], "B0.0"),
    "BW and W": (["F0.0 BW0.0 W0.0 F0.1 B0.1 W0.1"], "W0.0"),
}


@pytest.mark.parametrize(("orders", "named"), ORDERS.values(), ids=ORDERS.keys())
def test_case_15_w_without_its_b(orders: list[str], named: str) -> None:
    problem = Problem(layers(2), squares, (numbers(4, WIDTH),))
    with pytest.raises(InvalidSchedule) as caught:
        compiled(problem, 1, 2, schedule=orders)
    assert named in str(caught.value)


def test_case_15_every_action_has_run_at_the_end_of_a_step() -> None:
    problem = Problem(layers(2), squares, (numbers(4, WIDTH),))
    check(problem, 1, 2, schedule=["F0.0 F0.1 B0.1 B0.0 W0.0 W0.1"])
    check(problem, 1, 2, schedule=["F0.0 BW0.0 F0.1 B0.1 W0.1"])


def weight_normed(old: bool) -> nn.Module:
    torch.manual_seed(0)
    made = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    if not old:
        return nn.Sequential(*(b for layer in made for b in (nn.utils.parametrizations.weight_norm(layer), nn.Tanh())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(*(b for layer in made for b in (nn.utils.weight_norm(layer), nn.Tanh())))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-2p"])
def test_case_16_w_reads_parameters_before_the_optimizer_writes_them(old: bool, schedule: str) -> None:
    """A step returns after its last W: training with an optimizer in between equals one process."""
    problem, eager = (Problem(weight_normed(old), squares, (numbers(8, WIDTH),)) for _ in range(2))
    step = compiled(problem, 2, 4, schedule=schedule).run_local()
    optimizers = [torch.optim.SGD(p.model.parameters(), lr=0.5) for p in (problem, eager)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = step(*problem.inputs)
        expected = reference(eager, 4, eager.model)
        assert_same((loss, gradients(problem.model)), expected, 1e-10)
        for optimizer in optimizers:
            optimizer.step()


def test_case_16_a_step_that_ends_before_its_last_w_is_rejected() -> None:
    problem = Problem(weight_normed(False), squares, (numbers(4, WIDTH),))
    with pytest.raises(InvalidSchedule, match=r"W0\.1 is missing"):
        compiled(problem, 1, 2, schedule=["F0.0 F0.1 B0.0 B0.1 W0.0"])


def test_case_17_order_of_accumulation() -> None:
    """Ws run in the order of the microbatches under every schedule that zbfx makes: equal bits. Another order, given by
    hand, rounds differently, and always the same."""
    with default_dtype(torch.bfloat16):
        problem = Problem(layers(2), squares, (numbers(16, WIDTH) * 3,))
    found = {s: stepped(problem, compiled(problem, 2, 8, schedule=s)) for s in ("gpipe", "1f1b", "zb-h1", "zb-2p")}
    for other in ("1f1b", "zb-h1", "zb-2p"):
        assert_same(found[other], found["gpipe"], 0.0)
    forward = [f"F0.{k} B0.{k}" for k in range(8)]
    up, down = ([" ".join([*forward, *(f"W0.{k}" for k in order)])] for order in (range(8), reversed(range(8))))
    ascending, *descending = (stepped(problem, compiled(problem, 1, 8, schedule=s)) for s in (up, down, down))
    assert_same(ascending, found["gpipe"], 0.0)
    assert_same(descending[0], descending[1], 0.0)
    assert any(not torch.equal(g, ascending[1][n]) for n, g in descending[0][1].items() if g is not None)  # type: ignore[arg-type]
    exact = Problem(copy.deepcopy(problem.model).double(), squares, (problem.inputs[0].double(),))
    for run in (ascending, descending[0]):
        wide = (run[0].double(), {name: g if g is None else g.double() for name, g in run[1].items()})
        assert_same(wide, reference(exact, 8), 5e-2)


class Branches(nn.Module):
    """A branch chosen by a flag, beside an output without gradient."""

    def __init__(self, left: bool) -> None:
        super().__init__()
        self.layers, self.left = linears("first", "left", "right"), left

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.layers["first"](x))
        return self.layers["left" if self.left else "right"](h), h > 0


@pytest.mark.parametrize("left", [True, False])
def test_case_18_set_of_gradients_is_fixed(left: bool) -> None:
    def loss_fn(output: tuple[Tensor, Tensor]) -> Tensor:
        return squares(output[0]) + output[1].double().mean()

    problem = Problem(Branches(left), loss_fn, (numbers(6, WIDTH),))
    pipe = check(problem, (1, 2))
    other = "right" if left else "left"
    assert problem.model.get_parameter(f"layers.{other}.weight").grad is None
    assert not any(other in name for phase in phases(pipe) for name in phase.gradients)


def test_case_18_parameter_frozen_after_compile() -> None:
    problem = Problem(Body(three_times), squares, (numbers(6, WIDTH),))
    step = compiled(problem, 2, 3).run_local()
    problem.model.get_parameter("a").requires_grad_(False)
    with pytest.raises(InputError, match="a had requires_grad=True when the model was traced"):
        step(*problem.inputs)
