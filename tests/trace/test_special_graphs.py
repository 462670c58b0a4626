"""Graphs that splitting a backward or cutting a model gets wrong easily, each against plain autograd in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.live_bytes import measured_peaks
from tests.support.models import Problem, mean_squares, numbers, squares
from tests.support.reference import (
    TRACES,
    activations,
    assert_same,
    compiled,
    default_dtype,
    gradients,
    one_trace,
    reference,
    stepped,
)
from zbfx import Kind, PipelineFault
from zbfx.runtime import captured
from zbfx.runtime.captured import Captured, Launched

TOLERANCE = 1e-12
WIDTH = 6


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield


class Body(nn.Module):
    """A model that is one function of its parameters `a`, `b` and `c` (square matrices) and its input."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(3))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def of(body: Callable[[Any, Tensor], Any], microbatches: int = 3) -> Problem:
    return Problem(Body(body), squares, (numbers(2 * microbatches, WIDTH),))


@cache
def shared_problem_of(body: Callable[[Any, Tensor], Any]) -> Problem:
    return of(body)


def check(problem: Problem, stages: int, microbatches: int = 3, **options: Any) -> None:
    expected = reference(problem, microbatches)
    with one_trace(TRACES):
        pipe = compiled(problem, stages, microbatches, **options)
    assert_same(stepped(problem, pipe), expected, TOLERANCE)


def written_view(self: Any, x: Tensor) -> Tensor:
    """Parts of a product, and of one of its views, are written."""
    h = x @ self.a
    h[:, 1:3] *= 2.0
    h[:, :4][:, 2:] = torch.tanh(h[:, 4:]) @ self.b[:2, :2]
    h.t()[0].fill_(0.5)
    return torch.tanh(h) @ self.c


def written_input(self: Any, x: Tensor) -> Tensor:
    return torch.slice_scatter(x, x[:, :2] @ self.a[:2, :2], 1, 4, 6) @ self.b


def of_patches(self: Any, x: Tensor) -> Tensor:
    patches = F.unfold((x @ self.a).view(-1, 1, 2, 3), 3, padding=1)
    return torch.tanh(F.fold(patches, (2, 3), 3, padding=1)).flatten(1) @ self.b


def gradient_per_row(self: Any, x: Tensor) -> Tensor:
    """What the model computes is a gradient itself, row by row, with a write in place on the way."""

    def energy(row: Tensor) -> Tensor:
        return torch.tanh((row @ self.a).mul_(2.0)).sum()

    return torch.func.vmap(torch.func.grad(energy))(x) @ self.b


def three_times(self: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(x @ self.a)
    return x


def gated_by_itself(self: Any, x: Tensor) -> Tensor:
    h = x @ self.a
    return h * (h @ self.a)


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "weight twice": lambda self, x: x @ self.a @ self.a,
    "weight tied to its transpose": lambda self, x: F.gelu(x @ self.a) @ self.a.T,
    "weight three times": three_times,
    "weight twice, gated": gated_by_itself,
    "weights on both branches": lambda self, x: (x @ self.a) @ self.b + (x @ self.b) @ self.a,
    "view": lambda self, x: torch.tanh((x @ self.a).view(-1, 2)).view(-1, WIDTH) @ self.b,
    "chunk": lambda self, x: torch.tanh((x @ self.a).chunk(2, -1)[0]) @ self.b[:3],
    "both chunks": lambda self, x: torch.mul(*(x @ self.a).chunk(2, -1)) @ self.b[:3],
    "transpose": lambda self, x: torch.tanh((x @ self.a).t()).t() @ self.b,
    "expand": lambda self, x: torch.tanh((x @ self.a).sum(1, keepdim=True).expand(-1, WIDTH)) @ self.b,
    "view at the end": lambda self, x: (x @ self.a @ self.b).t().reshape(-1, 2).unbind(1)[1],
    "skip": lambda self, x: torch.tanh(torch.tanh(x @ self.a) @ self.b) @ self.c + torch.tanh(x @ self.a),
    "input skips to the end": lambda self, x: torch.tanh(torch.tanh(x @ self.a) @ self.b) * x,
    "parameter without input": lambda self, x: torch.tanh(x @ self.a) @ self.b + torch.tanh(self.c).sum(0),
    "parameter product": lambda self, x: torch.tanh(x @ (self.a @ self.b)) @ self.c,
    "weight of a weight": lambda self, x: torch.tanh(x @ self.a) @ (self.b * torch.sigmoid(self.a @ self.c)),
    "normed weight": lambda self, x: torch.tanh(x @ F.normalize(self.a)) @ F.normalize(self.b),
    "constant term": lambda self, x: torch.tanh(x @ self.a + torch.arange(WIDTH, dtype=x.dtype)) @ self.b,
    "in-place on an activation": lambda self, x: (x @ self.a).mul_(2.0).tanh_() @ self.b,
    "detached branch": lambda self, x: torch.tanh(x @ self.a) @ self.b + (x @ self.a).detach() @ self.c,
    "sort": lambda self, x: torch.sort(x @ self.a, dim=1).values @ self.b,
    "times 1j": lambda self, x: torch.tanh((x @ self.a) * 1j).imag @ self.b,
    "1j times a parameter": lambda self, x: (x @ self.a) @ torch.exp(1j * self.b).real,
    "over a complex number": lambda self, x: ((x @ self.a) / (1 + 2j)).abs() @ (self.b * 2j).imag,
    "less a complex number": lambda self, x: ((x @ self.a) - 1j).abs() @ (2j - self.b).angle(),
    "power of a complex number": lambda self, x: torch.pow(1 + 2j, x @ self.a).real @ (self.b**2j).abs(),
    "complex scale": lambda self, x: torch.add((x @ self.a) * 1j, self.c[0], alpha=2j).imag @ self.b,
    "cholesky": lambda self, x: x @ torch.linalg.cholesky(self.a @ self.a.T + torch.eye(WIDTH)) @ self.b,
    "solve": lambda self, x: torch.tanh(torch.linalg.solve(self.a, (x @ self.c).T).T) @ self.b,
    "inverse": lambda self, x: torch.tanh(x @ torch.linalg.inv(self.a)) @ torch.linalg.inv(self.b),
    "eigenvalues": lambda self, x: torch.tanh(x @ self.b) * torch.linalg.eigvals(self.a).abs(),
    "written view": written_view,
    "written input": written_input,
    "sum of patches": of_patches,
    "gradient per row": gradient_per_row,
    "split sizes": lambda self, x: torch.cat((x @ self.a).split([1, 5], 1)[::-1], 1) @ self.b,
}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_gradients_equal_autograd(body: Callable[[Any, Tensor], Tensor], stages: int) -> None:
    check(shared_problem_of(body), stages)


LAID_OUT = {"expanded": lambda h: h.mean(1, keepdim=True).expand(h.shape), "real part": lambda h: torch.fft.fft(h).real}
HELD = {name: BODIES[name] for name in ("written view", "written input", "sum of patches")} | {
    f"loss of {name}": lambda self, x, change=change: F.mse_loss(change(x @ self.a), x) * torch.ones(1, 1)
    for name, change in LAID_OUT.items()
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("body", HELD.values(), ids=HELD.keys())
def test_writes_into_parts_hold_what_is_predicted(body: Callable[[Any, Tensor], Tensor], stages: int) -> None:
    """The microbatches are parts of one tensor, which no step copies whole."""
    problem = shared_problem_of(body)
    with one_trace(TRACES):
        pipe = compiled(problem, stages, 3)
    rows = pipe.compiled.signature.split(problem.inputs, {}, 3)
    peaks = [counter.peak for counter in measured_peaks(pipe, rows)]
    assert [memory.highest.peak_bytes for memory in pipe.memory] == peaks


def of_products(self: Any, x: Tensor) -> Tensor:
    """Positive definite for any parameters, but not for those that costs are measured with."""
    h = x @ self.a
    return torch.linalg.cholesky(h.T @ h + torch.eye(WIDTH)) @ torch.linalg.inv(self.b)


def test_checks_of_values_do_not_stop_measuring() -> None:
    check(of(of_products), 2, costs="measure")


@pytest.mark.skipif(torch.__version__ < "2.13", reason="earlier tracers leave the checks out")
@pytest.mark.parametrize(
    ("function", "found"), [(torch.linalg.inv, "singular"), (torch.linalg.cholesky, "not positive-definite")]
)
def test_checks_of_torch_linalg_run_in_a_step(function: Callable[[Tensor], Tensor], found: str) -> None:
    problem = of(lambda self, x: torch.tanh(x @ self.a) @ function(self.b))
    pipe = compiled(problem, 2, 3, check=False)
    with torch.no_grad():
        problem.model.get_parameter("b").fill_(-1.0)
    with pytest.raises(PipelineFault, match=rf"LinAlgError.*{found}"):
        pipe.run_local()(*problem.inputs)


def finite(self: Any, x: Tensor) -> Tensor:
    x = torch.tanh(x @ self.a)
    torch._assert_async((x < 0.999).all(), "x is small")
    torch._assert_async((x > -0.999).all())
    return x @ self.b


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(("value", "found"), [(1e9, "x is small"), (-1e9, "a check failed|Expected Tensor with")])
def test_checks_of_a_model_run_in_a_step(backend: str, value: float, found: str) -> None:
    problem = of(finite)
    pipe = compiled(problem, 1, 3, backend=backend)
    step = pipe.run_local()
    for call in step.engine.runners[0].calls:
        call.run = pipe.compiler(call.phase)
    step(*problem.inputs)
    inputs = torch.full_like(problem.inputs[0], value) @ problem.model.get_parameter("a").detach().inverse()
    with pytest.raises(PipelineFault, match=found):
        step(inputs)


class Judging(Launched):
    """Launches a step as captured ones run: no check raises by itself."""

    judges_checks = True


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_checks_that_cannot_raise_are_judged_when_the_step_has_run(backend: str) -> None:
    problem = of(finite)
    pipe = compiled(problem, 2, 3, backend=backend)
    step = pipe.run_local()
    step.worker.launch = Judging()
    step.engine.run_phases_by(pipe.compiler)
    step(*problem.inputs)
    step.evaluate(*problem.inputs)
    inputs = problem.inputs[0].clone()
    inputs[-1] = torch.full_like(inputs[-1], 1e9) @ problem.model.get_parameter("a").detach().inverse()
    with pytest.raises(PipelineFault, match=r"rank 0, step 1, action F0\.2 \(stage 0, microbatch 2\): .*x is small$"):
        step(inputs)


def test_a_captured_step_is_judged_at_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph that runs at its capture, and whose replays write nothing new."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(captured, "channels_of", lambda _: None)
    monkeypatch.setattr(captured, "part", lambda run, *_, **__: run() or SimpleNamespace(replay=lambda: None))
    problem = of(finite)
    step = compiled(problem, 1, 3, check=False).run_local()
    step.worker.launch = Captured()
    step.worker.launch.prepare(step.engine)
    for _ in range(3):  # warms up, captures, replays
        step(*problem.inputs)
    step.engine.captured.checks[2].condition.fill_(False)
    with pytest.raises(PipelineFault, match=r"rank 0, step 3, action F0\.1 .*: RuntimeError: x is small$"):
        step(*problem.inputs)


@pytest.mark.parametrize("stages", [1, 2])
def test_unused_parameter_has_no_gradient(stages: int) -> None:
    problem = of(lambda self, x: torch.tanh(x @ self.a) @ self.b)
    _, found = stepped(problem, compiled(problem, stages, 3))
    assert found["c"] is None
    assert found["a"] is not None


def test_optimizer_leaves_an_unused_parameter_alone() -> None:
    problem = of(lambda self, x: torch.tanh(x @ self.a) @ self.b)
    before = problem.model.get_parameter("c").detach().clone()
    step = compiled(problem, 2, 3).run_local()
    optimizer = torch.optim.AdamW(problem.model.parameters(), weight_decay=0.5)
    step(*problem.inputs)
    optimizer.step()
    assert torch.equal(problem.model.get_parameter("c"), before)


def layers(count: int = 6) -> nn.Sequential:
    """Linear and tanh in turn: layer k is "2k" by name."""
    torch.manual_seed(0)
    return nn.Sequential(*(block for _ in range(count) for block in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def frozen(model: nn.Module, *prefixes: str) -> Problem:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return Problem(model, mean_squares, (numbers(6, WIDTH),), (numbers(6, WIDTH, seed=2),))


def calls(pipe: Any, rank: int) -> set[str]:
    return {str(node.target) for node in pipe.programs[rank].module.graph.find_nodes(op="call_module")}


def test_frozen_prefix_runs_forward_only_and_gets_no_message() -> None:
    problem = frozen(layers(), "0.", "2.")
    pipe = compiled(problem, 3, 3, cuts=["4", "8"])
    assert calls(pipe, 0) == {"F0"}
    assert [message.key for message in activations(pipe) if message.target == 0] == []
    assert calls(pipe, 1) == {"F1", "B1", "W1"}
    assert_same(stepped(problem, pipe), reference(problem, 3), TOLERANCE)
    assert problem.model.get_parameter("0.weight").grad is None


def test_frozen_part_of_a_stage_is_not_sent_back_through() -> None:
    problem = frozen(layers(), "0.", "2.", "4.")
    pipe = compiled(problem, 2, 3, cuts=["4"])
    assert calls(pipe, 0) == {"F0"}
    assert_same(stepped(problem, pipe), reference(problem, 3), TOLERANCE)


def test_frozen_middle_has_a_b_and_no_w() -> None:
    problem = frozen(layers(), "4.", "6.")
    pipe = compiled(problem, 3, 3, cuts=["4", "8"])
    assert calls(pipe, 1) == {"F1", "B1"}
    assert pipe.stages[1].phases[Kind.W].is_empty
    assert_same(stepped(problem, pipe), reference(problem, 3), TOLERANCE)


class LoRA(nn.Module):
    """A frozen linear layer with a trainable low-rank branch."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + (x @ self.down) @ self.up)


@pytest.mark.parametrize("stages", [1, 3])
def test_lora(stages: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(), LoRA(), LoRA())
    check(Problem(model, squares, (numbers(6, WIDTH),)), stages)
    assert model.get_parameter("0.base.weight").grad is None


@pytest.mark.parametrize("stages", [1, 3])
def test_only_biases_train(stages: int) -> None:
    model = layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    check(Problem(model, squares, (numbers(6, WIDTH),)), stages)


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity tripled: not the true gradient, on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3.0 * gradient


class Product(torch.autograd.Function):
    """x @ w that saves its inputs and gives both gradients, the weight's doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.T, 2.0 * x.T @ gradient


def rounded(self: Any, x: Tensor) -> Tensor:
    return Rounded.apply(torch.tanh(x @ self.a) * 4) @ self.b


def of_custom_product(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(Product.apply(torch.tanh(x @ self.a), self.b)) @ self.a


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_custom_function_keeps_its_own_gradient(stages: int) -> None:
    for body in (rounded, of_custom_product):
        check(shared_problem_of(body), stages)


class Counter(nn.Module):
    """Counts its calls in a buffer that the result depends on."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def with_buffers(*middle: nn.Module) -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), *middle, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
    )
    return Problem(model, squares, (numbers(12, WIDTH) + torch.arange(12).unsqueeze(1),))


@cache
def shared_with(middle: Callable[[], nn.Module]) -> Problem:
    return with_buffers(middle())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("middle", [lambda: nn.BatchNorm1d(WIDTH), Counter], ids=["batch-norm", "counter"])
def test_buffers_are_updated_once_per_microbatch_in_order(
    middle: Callable[[], nn.Module], stages: int, schedule: str
) -> None:
    problem = shared_with(middle)
    eager = copy.deepcopy(problem.model)
    expected = reference(problem, 4, eager)
    with one_trace(TRACES):
        pipe = compiled(problem, stages, 4, schedule=schedule)
    assert_same(stepped(problem, pipe), expected, TOLERANCE)
    wanted = dict(eager.named_buffers())
    for name, buffer in problem.model.named_buffers():
        torch.testing.assert_close(buffer, wanted[name], rtol=TOLERANCE, atol=0)
        assert buffer.dtype == wanted[name].dtype


@pytest.mark.parametrize("stages", [1, 2])
def test_checkpointed_parts_write_buffers_once(stages: int) -> None:
    """As without the checkpoint; plain PyTorch writes in the backward once more."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=False)

    torch.manual_seed(0)
    model = nn.Sequential(Checkpointed(), nn.Tanh(), Checkpointed())
    plain = nn.Sequential(*(getattr(layer, "part", layer) for layer in copy.deepcopy(model)))
    problem = Problem(model, squares, (numbers(6, WIDTH),))
    expected = reference(replace(problem, model=plain), 3, plain)
    loss, found = stepped(problem, compiled(problem, stages, 3))
    assert_same((loss, {name.replace("part.", ""): g for name, g in found.items()}), expected, TOLERANCE)
    for name, buffer in problem.model.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name.replace("part.", "")), rtol=TOLERANCE, atol=0)


def test_frozen_batch_norm_in_evaluation_mode_keeps_its_statistics() -> None:
    problem = with_buffers(nn.BatchNorm1d(WIDTH))
    problem.model.get_submodule("1").eval()
    before = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
    check(problem, 3, 4)
    assert all(torch.equal(buffer, before[name]) for name, buffer in problem.model.named_buffers())


class Frequencies(nn.Module):
    """Every layer multiplies by one complex buffer that is not persistent."""

    phases: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("phases", torch.polar(torch.ones(WIDTH // 2), torch.rand(WIDTH // 2)), persistent=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x).unflatten(-1, (-1, 2)))
            x = torch.tanh(torch.view_as_real(pairs * self.phases).flatten(-2))
        return x


def test_complex_buffer_used_by_every_stage() -> None:
    model = Frequencies()
    check(Problem(model, squares, (numbers(6, WIDTH),)), 4)
    assert "phases" not in model.state_dict()


class DiagonalStates(nn.Module):
    """The kernel of a diagonal state-space model, of complex parameters and numbers, along the rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rates = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.phases = nn.Parameter(torch.rand(WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.5 + 0.25j))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.exp((self.rates + 1j * self.phases)[:, None] / 3j * torch.arange(WIDTH))
        return self.layer(torch.tanh(self.layer(x)) @ (powers * (self.scale * 2j)).real)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("costs", ["estimate", "measure"])
def test_complex_parameters_and_numbers(stages: int, costs: str) -> None:
    check(Problem(DiagonalStates(), squares, (numbers(6, WIDTH),)), stages, costs=costs)


def test_two_steps_accumulate_like_autograd() -> None:
    problem = of(three_times)
    eager = copy.deepcopy(problem.model)
    reference(problem, 3, eager)
    loss, _ = reference(problem, 3, eager)
    step = compiled(problem, 2, 3).run_local()
    step(*problem.inputs)
    assert_same((step(*problem.inputs), gradients(problem.model)), (loss, gradients(eager)), TOLERANCE)


class SideLoss(nn.Module):
    """Adds a penalty on a middle activation to what the model returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(h), torch.softmax(h, -1).square().mean()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one entry": lambda self, x: (x @ self.a).sum(1).mean(0, keepdim=True),
    "entry of an activation": lambda self, x: (x @ self.a).reshape(-1)[3],
    "copy of a parameter's entry": lambda self, x: self.a[1, 2].clone(),
}


@pytest.mark.parametrize("body", LOSSES.values(), ids=LOSSES.keys())
def test_loss_that_is_a_view(body: Callable[[Any, Tensor], Tensor]) -> None:
    check(Problem(Body(body), lambda output: output.reshape(()), (numbers(6, WIDTH),)), 1)


def test_side_loss_of_a_middle_stage() -> None:
    def loss_fn(output: tuple[Tensor, Tensor]) -> Tensor:
        return squares(output[0]) + 0.1 * output[1]

    check(Problem(SideLoss(), loss_fn, (numbers(6, WIDTH),)), 3)


WEIGHTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weighed by uncertainty": lambda loss, p, q: loss * torch.exp(-p) + p,
    "a term twice": lambda loss, p, q: loss + (p + p),
    "a factor and a term": lambda loss, p, q: loss * p + p,
    "a term and its multiple": lambda loss, p, q: loss + p - 3 * p,
    "a term": lambda loss, p, q: loss + p,
    "a term of what the first stage uses": lambda loss, p, q: loss + q,
    "a term, twice, and a factor": lambda loss, p, q: loss + q + q + p * q,
}


class Weighted(Body):
    """A model with scalar parameters whose gradient is, in part, that of the loss itself."""

    def __init__(self, weigh: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(lambda self, x: torch.tanh(x * self.q @ self.a) @ self.b @ self.c)
        self.p, self.q = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.5))
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(self.body(self, x).square().mean(), self.p, self.q)


@cache
def weighted(weigh: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Problem:
    return Problem(Weighted(weigh), None, (numbers(6, WIDTH),))


@pytest.mark.slow
@pytest.mark.parametrize("weigh", WEIGHTED.values(), ids=WEIGHTED)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_loss_with_a_parameter_as_a_term(weigh: Callable[[Tensor, Tensor, Tensor], Tensor], stages: int) -> None:
    check(weighted(weigh), stages)
