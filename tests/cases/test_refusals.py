"""Every kind of refusal says what was found, where (file and line, node or name), and what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.cases.common import WIDTH, layers, line_of, of, refusal
from tests.support.models import Problem, numbers, squares
from tests.support.reference import compiled
from zbfx import InputError, TraceError
from zbfx.errors import first_line, listed


class Branch(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.ones(WIDTH))
        self.kept = [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * (2 if x.sum() > 0 else 1)


class ToNumpy(Branch):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * float(x.detach().numpy().sum())


class Mismatched(Branch):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) @ x


class WritesInput(Branch):
    def forward(self, x: Tensor) -> Any:
        x += 1
        return self.layer(x)


class WritesList(Branch):
    def forward(self, x: Tensor) -> Any:
        self.kept[0].mul_(2)
        return self.layer(x) * self.kept[0]


class Backward(Branch):
    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        h.sum().backward(retain_graph=True)
        return h


class Draws(Branch):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.layer(x))
        return sum(checkpoint(self.drop, h, factor, use_reentrant=False) for factor in (1.0, 2.0))

    def drop(self, h: Tensor, factor: float) -> Tensor:
        return nn.functional.dropout(h, 0.5) * torch.tanh(h * factor)


class Reentrant(Branch):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, torch.tanh(self.layer(x)), use_reentrant=True)


class Flexible(Branch):
    def forward(self, x: Tensor) -> Any:
        h = self.layer(x).view(1, 1, *x.shape)
        return flex_attention(h, h, h, score_mod=lambda score, *_: score * 2)


class Sparse(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.table((x > 0).long()))


class Grows(Branch):
    def forward(self, x: Tensor) -> Any:
        self.seen = torch.cat([self.seen, self.seen])
        return self.layer(x) * self.seen[:WIDTH]


class OwnGenerator(Branch):
    def forward(self, x: Tensor) -> Any:
        generator = torch.Generator().manual_seed(0)
        return self.layer(x) + torch.randn(WIDTH, generator=generator)


class OwnBernoulli(Branch):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * torch.full_like(x, 0.5).bernoulli_(generator=torch.Generator())


class Prints(Branch):
    def forward(self, x: Tensor) -> Any:
        torch.ops.aten._print("seen")
        return self.layer(x)


# model, its line or None, what was found, what to change
TRACING: dict[str, tuple[type[nn.Module], str | None, str, str]] = {
    "branch on a value": (Branch, "x.sum() > 0", "a tensor's value", "torch.where"),
    "numpy": (ToNumpy, ".numpy()", ".numpy() is not supported", "torch.library.custom_op"),
    "error of the model": (Mismatched, "@ x", "RuntimeError", "or change that line"),
    "write into an input": (WritesInput, "x += 1", "input inputs[0]", "x.clone()"),
    "write into a hidden tensor": (WritesList, "mul_(2)", "(mul_) into a tensor of shape (6,)", "register_buffer"),
    "backward of its own": (Backward, ".backward(", "Tensor.backward", "torch.autograd.Function"),
    "draws alike": (Draws, "dropout(h, 0.5)", "draws more than once", "x.clone()"),
    "reentrant checkpoint": (Reentrant, None, "use_reentrant=True", "use_reentrant=False"),
    "flex attention": (Flexible, "flex_attention(h", "what it does to the scores is a graph", "as attn_mask"),
    "sparse gradient": (Sparse, "self.table((x", "sparse=True (node embedding)", "Set sparse=False"),
    "generator": (OwnGenerator, "randn(", "from a torch.Generator (randn) at", "Leave out generator="),
    "generator, in place": (OwnBernoulli, "bernoulli_(", "from a torch.Generator (bernoulli_) at", "(seed, step, "),
    "effect": (Prints, "_print(", "runs aten._print.default, which acts beside its results", "Take it out"),
    "buffer of another shape": (Grows, None, "replaces seen, torch.float64 of shape (6,), by", "Keep shape and dtype"),
}


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize(("model", "text", "found", "way_out"), TRACING.values(), ids=TRACING.keys())
def test_what_cannot_be_traced(model: type[Any], text: str | None, found: str, way_out: str) -> None:
    with pytest.raises(TraceError) as caught:
        compiled(Problem(model(), squares, (numbers(6, WIDTH),)), 1, 3)
    message = str(caught.value)
    assert found in message
    assert way_out in message
    if text is not None:
        function = model.drop if model is Draws else model.forward
        assert line_of(function, text) in message


LOSSES: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "detached": (lambda output: squares(output).detach(), "does not require grad", "Check requires_grad"),
    "vector": (lambda output: output.sum(1), "a tensor of shape (2,)", "Pass loss_fn="),
    "number": (lambda output: 3.0, "found float", "Pass loss_fn="),
    "count missing": (lambda output: (squares(output),), "found 1 entries", "Count on tensors"),
    "count of outputs": (lambda output: (squares(output), (output > 0).sum()), "depends on", "Return a mean loss"),
}


@pytest.mark.parametrize(("loss_fn", "found", "way_out"), LOSSES.values(), ids=LOSSES.keys())
def test_losses(loss_fn: Any, found: str, way_out: str) -> None:
    message = refusal(Problem(layers(2), loss_fn, (numbers(6, WIDTH),)))
    assert found in message
    assert way_out in message


OPTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "stages": ({"stages": 40}, "stages=40", "Ask for fewer"),
    "cuts": ({"cuts": ["nowhere"]}, "'nowhere'", "Known: 0, 1, 2"),
    "order of cuts": ({"cuts": ["0"]}, "['0']", "in the order in which they run"),
    "schedule": ({"schedule": "zb-h9"}, "'zb-h9'", "zb-h1"),
    "case of a schedule": ({"schedule": "ZB_H1"}, "'ZB_H1'", "did you mean 'zb-h1'?"),
    "misspelt cut": ({"cuts": ["2x"]}, "'2x'", "did you mean '2'?"),
    "missing action": ({"schedule": ["F0.0 B0.0 W0.0", "F1.0 B1.0"]}, "missing", "F0.1"),
    "memory": ({"schedule": "auto", "mem_limit": 1}, "1", "smallest"),
    "loss reduction": ({"loss_reduction": "avg"}, "'avg'", "'mean', 'sum'"),
    "device": ({"device": "gpu"}, "'gpu'", "'cpu' or 'cuda'"),
}


@pytest.mark.parametrize(("options", "found", "way_out"), OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options: dict[str, Any], found: str, way_out: str) -> None:
    message = refusal(Problem(layers(2), squares, (numbers(6, WIDTH),)), **{"stages": 2, **options})
    assert found in message
    assert way_out in message


BATCHES: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "size": ((numbers(5, WIDTH), 2.0), "found (5, 6)", "on_new_shape='recompile'"),
    "dtype": ((numbers(6, WIDTH).float(), 2.0), "found torch.float32", "expected dtype torch.float64"),
    "constant": ((numbers(6, WIDTH), 3.0), "inputs[1] was 2.0", "Pass it as a tensor, or compile again"),
    "no tensor": ((None, 2.0), "inputs[0] was a tensor", "Pass a tensor, or compile again"),
    "missing": ((numbers(6, WIDTH),), "found (inputs[0])", "expected (inputs[0], inputs[1])"),
}


@pytest.mark.parametrize(("batch", "found", "way_out"), BATCHES.values(), ids=BATCHES.keys())
def test_batches(batch: tuple[Any, ...], found: str, way_out: str) -> None:
    step = compiled(of(lambda self, x, k: torch.tanh(x @ self.a) * k, 2.0), 1, 3).run_local()
    if isinstance(batch[0], Tensor):
        batch = (batch[0].double() if "dtype" not in way_out else batch[0], *batch[1:])
    with pytest.raises(InputError) as caught:
        step(*batch)
    assert found in str(caught.value)
    assert way_out in str(caught.value)


@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [
        (lambda output, targets: squares(output - targets), "missing 1 required positional argument: 'targets'"),
        (lambda: 0.0, "takes 0 positional arguments but 1 was given"),
    ],
)
def test_arguments_that_the_call_does_not_take(loss_fn: Any, found: str) -> None:
    message = refusal(Problem(layers(2), loss_fn, (numbers(6, WIDTH),)))
    assert found in message
    assert "example_targets as loss_fn does" in message
    assert "unknown line" not in message


def test_long_lists_and_long_errors_are_cut() -> None:
    message = refusal(Problem(layers(60), squares, (numbers(6, WIDTH),)), cuts=["nowhere"])
    assert "Known: 0, 1, 2" in message
    assert message.endswith("... and 108 more")
    assert len(message) < 250
    assert listed(range(3)) == "0, 1, 2"
    assert first_line(ValueError("what\nCPU: registered at ...")) == "what"
    assert first_line(ValueError("x" * 400)) == "x" * 300 + " ..."
