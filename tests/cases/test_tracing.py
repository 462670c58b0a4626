"""Frontend and tracing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbfx
from tests.cases.common import TOLERANCE, WIDTH, check, line_of, linears, of, refusal
from tests.support.models import Problem, ids, llama, numbers, squares, token_loss
from tests.support.reference import activations, assert_same, compiled, default_dtype, reference, stepped
from zbfx import InputError, TraceError
from zbfx.graphs import Role


class Rotary(nn.Module):
    """Two decoder layers that turn queries and keys by angles computed once at the top."""

    inverse: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(4) / 4), persistent=False)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> dict[str, Any]:
        angles = position_ids.unsqueeze(-1) * self.inverse
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        h, cache = self.tokens(tokens), []
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(h).chunk(3, -1)
            q, k = (t * cos + torch.cat([-t[..., 4:], t[..., :4]], -1) * sin for t in (q, k))
            cache.append((k, v))
            h = h + out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return {"logits": self.head(h), "cache": tuple(cache)}


def rotary_loss(output: dict[str, Any], targets: Tensor) -> Tensor:
    return token_loss(output["logits"], targets)


@pytest.mark.transformers
def test_case_19_decoder_with_rotary_embedding() -> None:
    tokens, positions = ids(6, 5, vocabulary=16), torch.arange(5).expand(6, 5).contiguous()
    problem = Problem(Rotary(), rotary_loss, (tokens,), (tokens,), {"position_ids": positions})
    check(problem, (1, 2), cuts=None)
    check(problem, 3, cuts=["out.0", "head"])
    for use_cache in (False, True):  # the model's own cache in its outputs
        family = llama(2, use_cache=use_cache)
        assert_same(stepped(family, compiled(family, 3, 2)), reference(family, 2), TOLERANCE)


class Frequencies(nn.Module):
    """One complex buffer and one plain tensor used by every layer."""

    freqs: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears("a", "b", "c", "d")
        self.register_buffer("freqs", torch.polar(torch.ones(3), torch.rand(3)), persistent=False)
        self.gain = torch.full((WIDTH,), 1.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            pairs = torch.view_as_complex(layer(x).unflatten(-1, (-1, 2)))
            x = torch.tanh(torch.view_as_real(pairs * self.freqs).flatten(-2) * self.gain)
        return x


def test_case_20_constant_used_by_many_stages() -> None:
    problem = Problem(Frequencies(), squares, (numbers(6, WIDTH),))
    pipe = check(problem, 4, cuts=["layers.b", "layers.c", "layers.d"])
    layouts = {layout for m in activations(pipe) for layout in m.layouts}
    assert {layout.dtype for layout in layouts} == {torch.float64}  # activations alone travel
    for stage in pipe.stages:
        assert {"freqs", "gain"} <= set(stage.phases[zbfx.Kind.F].port_names(Role.BUFFER))
    problem.model.gain.fill_(0.5)  # type: ignore[operator]
    assert_same(stepped(problem, pipe), reference(problem, 3), TOLERANCE)


class Counting(nn.Module):
    """Adds to a plain tensor at every call: in place, or by a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layers, self.calls, self.in_place = linears("a", "b"), torch.ones(WIDTH), in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return self.layers["b"](torch.tanh(self.layers["a"](x) * self.calls))


@pytest.mark.parametrize("in_place", [True, False])
def test_case_20_plain_tensor_that_the_model_writes(in_place: bool) -> None:
    problem, eager = (Problem(Counting(in_place), squares, (numbers(6, WIDTH),)) for _ in range(2))
    pipe = compiled(problem, 1, 3)
    for count in (4, 7):
        problem.model.zero_grad()
        eager.model.zero_grad()
        assert_same(stepped(problem, pipe), reference(eager, 3, eager.model), TOLERANCE)
        assert problem.model.calls.tolist() == [count] * WIDTH  # type: ignore[operator]


def test_case_20_tensor_in_a_list_that_the_model_writes_is_refused() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(WIDTH, WIDTH), [torch.ones(WIDTH)]

        def forward(self, x: Tensor) -> Tensor:
            self.kept[0] += 1
            return self.layer(x) * self.kept[0]

    message = refusal(Problem(Listed(), squares, (numbers(6, WIDTH),)), 1)
    assert "register_buffer" in message
    assert line_of(Listed.forward, "self.kept[0] += 1") in message


@pytest.mark.slow
def test_case_21_buffers_keep_names_and_persistence() -> None:
    model = Frequencies()
    model.register_buffer("kept", torch.ones(2))
    model.layers["a"].register_buffer("alias", model.kept, persistent=False)
    keys, aliased = list(model.state_dict()), model.layers["a"].alias is model.kept
    problem = Problem(model, squares, (numbers(6, WIDTH),))
    stepped(problem, compiled(problem, 4, 3))
    assert list(model.state_dict()) == keys
    assert "freqs" not in keys
    assert "kept" in keys
    assert aliased
    assert model.layers["a"].alias is model.kept
    assert "gain" in vars(model)
    names = [name for name, _ in compiled(problem, 4, 3).run_local().named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_case_23_python_values_in_the_trace() -> None:
    """Sizes are those of a microbatch, and what microbatches differ in is an input."""
    problem = of(lambda self, x, k: torch.tanh(x @ self.a) / x.shape[0] + k, torch.arange(6.0).unsqueeze(1))
    pipe = check(problem)
    assert zbfx.check(pipe)
    shifted = replace(problem, inputs=(problem.inputs[0] * 2 - 1, problem.inputs[1] + 5))
    assert_same(stepped(shifted, pipe), reference(shifted, 3), TOLERANCE)


def test_case_23_value_that_changes_from_call_to_call_is_found() -> None:
    calls = itertools.count()
    body = of(lambda self, x: torch.tanh(x @ self.a) + next(calls))
    report = zbfx.check(compiled(body, 2, 3, check=False))
    assert not report
    assert "model itself" in str(report)

    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(self.layer(x)) * self.calls

    with pytest.raises(TraceError, match="a Python value that changes"):
        compiled(body, 2, 3)
    with pytest.raises(TraceError, match="calls changes in every forward, and what the forward computes depends on it"):
        compiled(Problem(Numbered(), squares, (numbers(6, WIDTH),)), 2, 3, check=False)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears("a", "b")

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["b"](F.dropout(self.layers["a"](x), 0.5, self.training))


def test_case_24_mode_is_part_of_the_graph() -> None:
    problem = Problem(Dropping(), squares, (numbers(6, WIDTH),))
    step = compiled(problem, 2, 3).run_local()
    problem.model.eval()
    with pytest.raises(InputError, match="the model was in train mode when the model was traced") as caught:
        step(*problem.inputs)
    assert "compile again" in str(caught.value)
    check(problem, 2)  # compiled in eval mode: nothing is dropped
    expected, _ = reference(problem, 3)
    assert step.evaluate(*problem.inputs).item() == pytest.approx(expected.item(), rel=TOLERANCE)
    problem.model.train()
    step(*problem.inputs)
    problem.model.get_submodule("layers.a").eval()
    with pytest.raises(InputError, match=r"layers\.a was in train mode"):
        step(*problem.inputs)


def positions(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ self.a) @ self.b + torch.arange(WIDTH, device=x.device) + torch.ones(WIDTH).to(x)


def test_case_25_device_of_factories() -> None:
    problem = of(positions)
    check(problem)
    on_meta = of(positions)
    on_meta.model.to("meta")
    pipe = compiled(replace(on_meta, inputs=(on_meta.inputs[0].to("meta"),)), 2, 3, device="cpu")
    devices = {n.kwargs["device"] for n in pipe.compiled.joint.graph.nodes if n.kwargs.get("device") is not None}
    assert devices == {torch.device("cpu")}
    on_meta.model.to_empty(device="cpu").load_state_dict(problem.model.state_dict())
    assert_same(stepped(on_meta, pipe), reference(problem, 3), TOLERANCE)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h * 2 if h.sum() > 0 else h - 1


class TopOne(Branching):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h * int(h.sum(0).argmax().item())


class Masking(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[torch.nonzero(x[:, 0] > 0)[:, 0]]


class Conditional(Branching):
    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return torch.cond(h.sum() > 0, lambda h: h * 2, lambda h: h - 1, (h,))


@pytest.mark.parametrize(
    ("model", "text"),
    [(Branching, "h.sum() > 0"), (TopOne, ".item()"), (Masking, "nonzero"), (Conditional, "torch.cond")],
)
def test_case_26_control_flow_by_values(model: type[nn.Module], text: str) -> None:
    message = refusal(Problem(model(), squares, (numbers(6, WIDTH),)))
    assert line_of(model.forward, text) in message
    assert "torch.where" in message


def test_case_26_the_way_out_is_right() -> None:
    check(of(lambda self, x: torch.where((x @ self.a).sum() > 0, x @ self.a * 2, x @ self.a - 1) @ self.b))
    routed = of(lambda self, x: (x @ self.a)[torch.arange(x.shape[0]), (x @ self.b).argmax(1)])
    check(routed, (1, 2))


class Stateful(nn.Module):
    calls: Tensor

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.layers, self.norm, self.in_place = linears("a", "b"), nn.BatchNorm1d(WIDTH), in_place
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return self.layers["b"](F.dropout(self.norm(self.layers["a"](x)), 0.0) * self.calls)


@pytest.mark.parametrize("in_place", [True, False])
def test_case_27_tracing_leaves_the_state_alone(in_place: bool) -> None:
    problem = Problem(Stateful(in_place), squares, (numbers(6, WIDTH),))
    for parameter in problem.model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before, generator = copy.deepcopy(problem.model.state_dict()), torch.get_rng_state()
    pipe = compiled(problem, 2, 3)
    pipe.run_local()
    zbfx.check(pipe)
    assert all(torch.equal(found, before[name]) for name, found in problem.model.state_dict().items())
    assert all(p.grad is not None and bool((p.grad == 3.0).all()) for p in problem.model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    problem.model.zero_grad()
    check(problem, (1, 2))  # three updates for three microbatches
    assert problem.model.calls.item() == 3  # type: ignore[operator]


class Recomputed(nn.Module):
    """Blocks with dropout, or another draw, stored or recomputed."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers, self.recompute = linears("a", "b", "c"), recompute

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers.values():
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.recompute else self.block(layer, x)
        return x

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(layer(x)), 0.5)
        return h * torch.rand_like(h)


class DrawnMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.weight * x, 0.5).sum()


@pytest.mark.slow
def test_case_28_randomness_in_forward_and_recompute() -> None:
    stored, again = (Problem(Recomputed(recompute), squares, (numbers(6, WIDTH),)) for recompute in (False, True))
    expected = stepped(stored, compiled(stored, 1, 3, schedule="gpipe"), seed=5)
    for stages, schedule in ((1, "zb-h1"), (2, "1f1b"), (3, "zb-h1")):
        assert_same(stepped(again, compiled(again, stages, 3, schedule=schedule), seed=5), expected, 0.0)
    masks = []
    for row in range(2):  # the gradient of a sum is the mask: one microbatch at a time shows its own
        batch = torch.zeros(2, 32)
        batch[row] = 1.0
        problem = Problem(DrawnMask(), None, (batch,))
        loss, found = stepped(problem, compiled(problem, 1, 2), seed=5)
        assert found["weight"] is not None
        assert loss == found["weight"].sum()  # the gradient belongs to the mask of its forward
        masks.append(found["weight"])
    assert not torch.equal(*masks)


class Histogram(nn.Module):
    """Counts active units in a recomputed block, or in a stored one."""

    count: Tensor

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers, self.recompute = linears("a", "b"), recompute
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.layers["a"](x))
        return checkpoint(self.block, h, use_reentrant=False) if self.recompute else self.block(h)

    def block(self, x: Tensor) -> Tensor:
        h = self.norm(self.layers["b"](x))
        self.count.add_((h > 0).sum(0))
        return torch.tanh(h) * self.count


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_case_29_writes_happen_once(stages: int) -> None:
    problem, stored = (Problem(Histogram(recompute), squares, (numbers(6, WIDTH),)) for recompute in (True, False))
    expected = reference(stored, 3, stored.model)
    assert_same(stepped(problem, compiled(problem, stages, 3)), expected, TOLERANCE)
    for found, wanted in zip(problem.model.buffers(), stored.model.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=0)


def doubled_in_place(self: Any, x: Tensor) -> Tensor:
    y = F.dropout(x @ self.a, p=0.0)
    y += y
    return torch.tanh(y) @ self.b


def test_case_29_write_to_a_value_of_the_graph() -> None:
    check(of(doubled_in_place))
    check(of(lambda self, x: checkpoint(doubled_in_place, self, x, use_reentrant=False) @ self.c))


class Mixed(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers, self.norm, self.inside = linears("a", "b"), nn.LayerNorm(WIDTH), inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.inside or torch.is_autocast_enabled("cpu")):
            return self.layers["b"](torch.tanh(self.norm(self.layers["a"](x)))).float()


def test_case_30_autocast() -> None:
    with default_dtype(torch.float32):
        for inside in (True, False):
            problem = Problem(Mixed(inside), squares, (numbers(6, WIDTH),))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
                expected, pipe = reference(problem, 3), compiled(problem, 2, 3, cuts=["norm"])
            sent = {layout.dtype for m in activations(pipe) for layout in m.layouts}
            assert sent == {torch.bfloat16}
            found = stepped(problem, pipe)
            assert_same(found, expected, 1e-5)
            with torch.autocast("cpu", dtype=torch.float16):  # around the step: changes nothing
                assert_same(stepped(problem, pipe), found, 0.0)


class ChunkedLoss(torch.autograd.Function):
    """A loss that computes its gradient chunk by chunk in its forward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        total = output.new_zeros(())
        gradients: list[Tensor] = []
        with torch.enable_grad():
            for chunk in output.detach().chunk(2):
                leaf = chunk.detach().requires_grad_()
                loss = leaf.square().sum() / output.numel()
                gradients += torch.autograd.grad(loss, leaf)
                total = total + loss.detach()
        ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def hidden_gradient(output: Tensor) -> Tensor:
    leaf = output.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(squares(leaf), leaf)
    return (output * gradient).sum()


def runs_backward(output: Tensor) -> Tensor:
    loss = squares(output)
    loss.backward(retain_graph=True)
    return loss


def detached_chunks(output: Tensor) -> Tensor:
    leaf = output.detach().requires_grad_()
    loss = squares(leaf)
    torch.autograd.grad(loss, leaf)
    return loss.detach()


def two_layers(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ self.a) @ self.b


@pytest.mark.slow
def test_case_31_loss_that_runs_backward_itself() -> None:
    check(of(two_layers, loss_fn=ChunkedLoss.apply), (1, 2))
    check(of(two_layers, loss_fn=hidden_gradient), (1, 2))
    message = refusal(of(two_layers, loss_fn=runs_backward))
    assert line_of(runs_backward, "loss.backward") in message
    assert "torch.autograd.Function" in message
    message = refusal(of(two_layers, loss_fn=detached_chunks))
    assert "does not require grad" in message
    assert "torch.autograd.Function" in message
    penalty: Callable[..., Any] = lambda self, x: (  # noqa: E731
        two_layers(self, x),
        torch.autograd.grad(two_layers(self, x).sum(), self.a, create_graph=True)[0],
    )
    check(of(penalty, loss_fn=lambda output: squares(output[0]) + squares(output[1])), (1, 2))
