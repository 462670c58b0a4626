"""Models and losses that compile refuses, with messages that say what was expected, found, where, and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases.common import line_of
from tests.refusals.common import refusal
from tests.support.models import Problem, mlp, numbers, squares
from tests.support.reference import assert_same, compiled, reference, stepped
from zbfx import PipelineFault, TraceError, ZbfxError

WIDTH = 6


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h * 2 if h.sum() > 0 else h - 1


class Routing(Branching):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        chosen = int(h.sum(0).argmax().item())
        return h * chosen


class Selecting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h[h > 0]


class Asserting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        assert (h < 1e9).all()
        return h


class Repeating(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).repeat_interleave((x[:, 0] > -9).long(), 0)


class Finding(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[(x[:, 0] > 0).nonzero().flatten()]


def test_values_that_are_checked_where_steps_run() -> None:
    """`torch._check_tensor_all` is part of the graph, with its message; a forward and a backward run on good values."""

    class Checking(Branching):
        def forward(self, x: Tensor) -> Tensor:
            torch._check_tensor_all(x < 100, lambda: "x is large")
            torch._check_tensor_all(self.layer(x) > -1000)
            return self.layer(x)

    problem = Problem(Checking(), squares, (numbers(4, WIDTH),))
    step = compiled(problem, 2, 2).run_local()
    loss = step(*problem.inputs)
    expected = reference(problem, 2)
    assert_same((loss, {name: p.grad for name, p in problem.model.named_parameters()}), expected, 1e-6)
    with pytest.raises(PipelineFault, match="x is large"):
        step(problem.inputs[0] + 200)
    with pytest.raises(PipelineFault, match=r"found False where torch\._check_tensor_all expects True"):
        compiled(problem, 2, 2).run_local()(problem.inputs[0] - 1e6)


def test_reentrant_checkpointing() -> None:
    class Checkpointed(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda h: torch.tanh(self.layer(h)), self.layer(x), use_reentrant=True)

    message = refusal(Problem(Checkpointed(), squares, (numbers(4, WIDTH),)), TraceError)
    assert "checkpoints a part with use_reentrant=True" in message
    assert "Pass use_reentrant=False to torch.utils.checkpoint" in message


def test_wrapped_models() -> None:
    """Wrappers that add up gradients by themselves, around the model or in it."""
    problem = Problem(nn.DataParallel(Branching()), squares, (numbers(4, WIDTH),))
    assert "model is wrapped in DataParallel" in refusal(problem)
    inner = replace(problem, model=nn.Sequential(problem.model))
    assert "0 is wrapped in DataParallel" in refusal(inner)
    assert "bind a DeviceMesh with the dimensions ('dp', 'pp')" in refusal(inner)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with torch.no_grad():
            model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
        with pytest.raises(ZbfxError, match=r"model is wrapped in DistributedDataParallel.*Pass what it wraps"):
            compiled(replace(problem, model=model), 1, 2)
    finally:
        torch.distributed.destroy_process_group()


def test_sums_and_counts_in_a_list() -> None:
    """As in a tuple."""
    problem = Problem(nn.Linear(WIDTH, WIDTH), squares, (numbers(4, WIDTH),), (torch.tensor([1, -100, 1, 1]),))

    def counted(y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        kept = targets != -100
        return (y.square().mean(-1) * kept).sum(), kept.sum()

    nothing: Any = lambda *_: []  # noqa: E731
    functions: list[Any] = [counted, lambda y, targets: [*counted(y, targets)]]
    losses = [
        compiled(replace(problem, loss_fn=loss_fn), 1, 2).run_local()(*problem.inputs, *problem.targets)
        for loss_fn in functions
    ]
    output = problem.model(*problem.inputs).square().mean(-1)
    assert torch.equal(losses[0], losses[1])
    assert torch.allclose(losses[0], output[[0, 2, 3]].mean())
    assert "loss_fn must return a scalar loss; found list" in refusal(replace(problem, loss_fn=nothing))


@pytest.mark.parametrize(
    ("model", "text", "way_out"),
    [
        (Branching, "if h.sum() > 0", "Use torch.where for a choice between values"),
        (Routing, ".item()", "keep numbers in tensors (no .item(), int(), .tolist())"),
        (Asserting, "assert", "give torch._check_tensor_all the tensor of booleans"),
        (Selecting, "h[h > 0]", "Compute with all entries and weigh them by a mask (x * mask"),
        (Repeating, "repeat_interleave", "give sizes as numbers (output_size=)"),
        (Finding, "nonzero", "find the indices outside of the model and pass them as inputs"),
    ],
)
def test_control_flow_by_values(model: type[nn.Module], text: str, way_out: str) -> None:
    message = refusal(Problem(model(), squares, (numbers(4, WIDTH),)), TraceError)
    assert line_of(model.forward, text) in message
    assert "value" in message
    assert way_out in message
    assert ("Use torch.where" in message) is (model in (Branching, Routing))


def test_error_of_the_model_itself_names_its_line() -> None:
    class Wrong(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ x

    message = refusal(Problem(Wrong(), squares, (numbers(4, WIDTH),)), TraceError)
    assert line_of(Wrong.forward, "@ x") in message
    assert "the arguments of the example do not fit the model, which fails on them without zbfx too" in message


def test_model_that_cannot_be_copied() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model.stream = (word for word in ("a", "b"))  # type: ignore[assignment]
    message = refusal(Problem(model, squares, (numbers(4, WIDTH),)), TraceError)
    assert "copy.deepcopy" in message
    assert "generator" in message


def test_weight_that_a_hook_computed_before_the_model_was_converted() -> None:
    layer = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    problem = Problem(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer).double(), squares, (numbers(4, WIDTH).double(),))
    assert refusal(problem, TraceError) == (
        f"the model replaces 1.weight, torch.float32 of shape {(WIDTH, WIDTH)}, by torch.float64 of shape "
        f"{(WIDTH, WIDTH)}: one graph cannot hold both. Keep shape and dtype, or keep the value out of the model. If "
        f"it only is what a forward made before the model was converted (model.double()), run the model once before "
        f"compile: model(*example_inputs) under torch.no_grad()"
    )
    with torch.no_grad():
        problem.model(numbers(4, WIDTH).double())
    compiled(problem, 2, 2).run_local()(*problem.inputs)


def test_write_into_an_input() -> None:
    class Writing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return self.layer(x)

    message = refusal(Problem(Writing(), squares, (numbers(4, WIDTH),)), TraceError)
    assert "inputs[0]" in message
    assert line_of(Writing.forward, "x += 1") in message
    assert "x.clone()" in message


def test_write_into_a_parameter() -> None:
    class Writing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
            return self.layer(x)

    message = refusal(Problem(Writing(), squares, (numbers(4, WIDTH),)), TraceError)
    assert "layer.weight" in message


def test_loss_that_does_not_require_grad() -> None:
    problem = mlp(2)
    problem.model.requires_grad_(False)
    message = refusal(problem, TraceError)
    assert "loss_fn" in message
    assert "does not require grad" in message
    assert "requires_grad of the parameters" in message


def test_detached_loss() -> None:
    problem = replace(mlp(2), loss_fn=lambda output, targets: squares(output - targets).detach())
    assert "detaches the loss" in refusal(problem, TraceError)


def test_complex_loss() -> None:
    problem = replace(mlp(2), loss_fn=lambda output, targets: squares(output - targets) * 1j)
    assert "loss_fn must return a real loss, as backward asks for; found torch.complex" in refusal(problem, TraceError)
    counting: Any = lambda output, targets: (output.sum(), (targets * 1j).sum())  # noqa: E731
    assert "found a count of torch.complex" in refusal(replace(mlp(2), loss_fn=counting), TraceError)
    real = replace(mlp(2), loss_fn=lambda output, targets: (squares(output - targets) * 1j).imag)
    assert_same(stepped(real, compiled(real, 2, 2)), reference(real, 2), 1e-6)


class Distributed(nn.Module):
    """Draws by the reparametrisation trick; a log-probability. What torch checks by default, a process may change."""

    def __init__(self, *, validate_args: bool) -> None:
        super().__init__()
        self.first, self.last, self.validate_args = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), validate_args

    def forward(self, x: Tensor) -> Tensor:
        found = torch.distributions.Normal(self.first(x), 1.0, validate_args=self.validate_args)
        return self.last(found.rsample() + found.log_prob(x))


def test_distributions_that_check_their_arguments() -> None:
    problem = Problem(Distributed(validate_args=True), squares, (numbers(4, WIDTH),))
    message = refusal(problem, TraceError)
    assert "decides by a tensor's value" in message
    assert "test_models.py" in message
    assert "pass validate_args=False" in message
    problem = replace(problem, model=Distributed(validate_args=False))
    assert torch.isfinite(compiled(problem, 2, 2).run_local()(*problem.inputs))

    class Deciding(Distributed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.first(x).sum() > 0 else x

    assert "Use torch.where" in refusal(replace(problem, model=Deciding(validate_args=False)), TraceError)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_loss_that_is_a_parameter(name: str) -> None:
    class Returning(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return getattr(self.layer, name).view(-1)[0]

    message = refusal(Problem(Returning(), lambda output: output, (numbers(4, WIDTH),)), TraceError)
    assert "no gradient of any parameter" in message
    assert "loss.clone()" in message


def test_loss_that_is_no_scalar() -> None:
    problem = replace(mlp(2), loss_fn=lambda output, targets: (output - targets).square())
    message = refusal(problem, TraceError)
    assert "scalar loss" in message
    assert "shape (2, 8)" in message


def test_loss_that_is_a_class() -> None:
    message = refusal(replace(mlp(2), loss_fn=nn.MSELoss), ZbfxError)  # type: ignore[arg-type]
    assert message == (
        "loss_fn is an instance of a module, or a function; found the class MSELoss: call it to make an instance"
    )


@pytest.mark.parametrize("loss", [None, 3.0, {"loss": 1}])
def test_loss_that_is_no_tensor(loss: Any) -> None:
    message = refusal(replace(mlp(2), loss_fn=lambda output, targets: loss), TraceError)
    assert f"found {type(loss).__name__}" in message


def test_model_without_a_loss() -> None:
    message = refusal(replace(mlp(2), loss_fn=None, targets=()), TraceError)
    assert "the model must return a scalar loss" in message
    assert "Pass loss_fn=" in message


class SumAndCount(nn.Module):
    """A model that returns the sum of a loss over tokens, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x).square().sum(), (x > 0).sum()


def test_model_that_returns_a_loss_and_a_count() -> None:
    problem = Problem(SumAndCount(), None, (torch.randn(4, 8),), ())
    assert "the model returns two numbers, the second of torch.int64" in refusal(problem, TraceError)
    for own, is_mean in ((lambda out: out, False), (lambda out: out[0], True)):
        step = compiled(replace(problem, loss_fn=own), 1, 2).run_local()
        sums = [problem.model(x) for x in problem.inputs[0].chunk(2)]
        wanted = sums[0][0] + sums[1][0]
        wanted = wanted / 2 if is_mean else wanted / (sums[0][1] + sums[1][1])
        torch.testing.assert_close(step(*problem.inputs), wanted)


def test_attributes_that_cannot_be_copied_are_named() -> None:
    problem = mlp(2)
    problem.model.register_module("inner", nn.ReLU())
    problem.model.inner.seen = [problem.model[0](torch.ones(1, problem.model[0].in_features))]  # type: ignore
    message = refusal(problem, TraceError)
    assert "copy.deepcopy of it failed for inner.seen: RuntimeError: " in message
