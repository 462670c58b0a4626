"""Models that change after compile or bind in what graph and tensors do not follow: refused before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Problem, mlp, numbers, squares
from tests.support.reference import assert_same, compiled, reference
from zbfx import InputError, ZbfxError, check
from zbfx.modes import Modes
from zbfx.runtime.watch import Watch
from zbfx.trace.guard import Guard, Source

WIDTH = 6


class Tempered(nn.Module):
    """Two layers, the second tied to the first, and every kind of thing that a forward reads from its module."""

    level = 0.5
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.second.weight = self.first.weight
        self.drop = nn.Dropout(0.0)
        self.register_buffer("bias", torch.ones(WIDTH))
        self.tau, self.shift, self.function = 1.0, torch.ones(WIDTH), torch.sin
        self.unread, self.gain = [1.0], numpy.float32(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.act(self.first(x) / self.tau + self.bias))
        return self.function(self.second(h) * (self.level * float(self.gain)) + self.shift)


def problem() -> Problem:
    return Problem(Tempered(), squares, (numbers(4, WIDTH),))


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def untie(model: Any) -> None:
    model.second.weight = nn.Parameter(model.first.weight.detach().clone())


def shadow(model: Any) -> None:
    model.level = 0.25


def reshape(model: Any) -> None:
    model.first.bias.data = torch.ones(2 * WIDTH)


CHANGES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "assigned state": (assign, "first.weight, first.bias", "without assign=True"),
    "new parameter": (lambda m: setattr(m.first, "bias", nn.Parameter(torch.ones(WIDTH))), "first.bias", "in place"),
    "untied": (untie, "second.weight", "in place"),
    "buffer": (lambda m: setattr(m, "bias", torch.zeros(WIDTH)), "to, which it would go on with: bias", "fill_"),
    "tensor": (lambda m: setattr(m, "shift", torch.zeros(WIDTH)), "to, which it would go on with: shift", "fill_"),
    "bfloat16": (lambda m: m.bfloat16(), "bias was torch.float32 when the model", "found torch.bfloat16 (so did"),
    "half": (
        lambda m: m.half(),
        "found torch.float16 (so did first.bias, first.weight, second.bias)",
        "before compile",
    ),
    "double": (lambda m: m.double(), "found torch.float64", "change it back, or compile again"),
    "dtype of a parameter": (lambda m: m.first.bfloat16(), "first.bias was torch.float32", "found torch.bfloat16"),
    "dtype of a buffer": (lambda m: setattr(m, "bias", m.bias.double()), "bias was torch.float32", "torch.float64. C"),
    "dtype of a tensor": (lambda m: setattr(m, "shift", m.shift.int()), "shift was torch.float32", "torch.int32. Con"),
    "shape": (reshape, "first.bias had shape (6,) when the model was traced", "found (12,). Convert"),
    "layer": (lambda m: setattr(m, "act", nn.ReLU()), "act was replaced", "Compile again"),
    "layer of a kind": (lambda m: setattr(m, "act", nn.Tanh()), "found another Tanh than the Tanh", "Compile again"),
    "more layers": (lambda m: setattr(m, "third", nn.Tanh()), "['third']", "Compile again"),
    "hook": (lambda m: m.act.register_forward_hook(lambda *_: None), "the hooks of act", "before compile"),
    "pre-hook": (lambda m: m.register_forward_pre_hook(lambda *_: None), "the hooks of the model", "before compile"),
    "backward hook": (
        lambda m: m.act.register_full_backward_hook(lambda *_: None),
        "the hooks of act",
        "before compile",
    ),
    "number": (lambda m: setattr(m, "tau", 2.0), "tau was 1.0", "register_buffer"),
    "number of numpy": (lambda m: setattr(m, "gain", numpy.float32(0.25)), "gain was", "found"),
    "number of another kind": (lambda m: setattr(m, "tau", 1), "tau was 1.0", "found 1"),
    "tensor for a number": (lambda m: setattr(m, "tau", torch.tensor([1.0, 2.0])), "tau was 1.0", "in place"),
    "dropout": (lambda m: setattr(m.drop, "p", 0.5), "drop.p was 0.0", "found 0.5"),
    "number of the class": (shadow, "level was 0.5", "found 0.25"),
    "function": (lambda m: setattr(m, "function", torch.cos), "function was <built-in method sin", "input tensor"),
    "deleted": (lambda m: delattr(m, "tau"), "tau was 1.0", "found 'nothing'"),
}


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(WIDTH)


@pytest.mark.parametrize(
    ("gradient", "found"),
    [
        (torch.zeros(1).expand(WIDTH), "an expanded tensor, whose entries share memory, as the gradient of first.bias"),
        (torch.eye(WIDTH)[0].to_sparse(), "a sparse tensor as the gradient of first.bias"),
        (in_inference_mode(), "a tensor made in inference mode as the gradient of first.bias"),
    ],
)
def test_gradients_that_cannot_be_added_to(gradient: Tensor, found: str) -> None:
    given = problem()
    step = compiled(given, 2, 2).run_local()
    step(*given.inputs)
    bias = given.model.get_parameter("first.bias")
    own = bias.grad
    bias.grad = gradient
    with pytest.raises(InputError, match=f"a step adds to .grad in place; found {found}. Set it to None"):
        step(*given.inputs)
    step.evaluate(*given.inputs)  # adds to none
    bias.grad = own
    step(*given.inputs)
    assert step.count == 2


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float64, None])
def test_gradients_of_another_dtype(wanted: torch.dtype | None, *, accumulated: bool) -> None:
    """Refused before anything runs, from the first step on; the parameter's own dtype may be named."""
    given = problem()
    model = given.model.bfloat16()
    given = Problem(model, given.loss_fn, tuple(tensor.bfloat16() for tensor in given.inputs))
    step = compiled(given, 2, 2, check=False).run_local()
    bias: Any = model.get_parameter("first.bias")
    bias.grad_dtype = torch.bfloat16
    step(*given.inputs)
    bias.grad = None
    bias.grad_dtype = wanted
    if accumulated:
        bias.grad = torch.zeros_like(bias, dtype=wanted or torch.float32)
    found = f"a gradient of {wanted or torch.float32}" if accumulated else f"grad_dtype = {wanted}"
    compiled_for = "gradients of torch.bfloat16 at first.bias, which is torch.bfloat16"
    with pytest.raises(InputError, match=f"{compiled_for}; found {found}. Set .grad to None"):
        step(*given.inputs)
    assert step.count == 1
    bias.grad, bias.grad_dtype = None, torch.bfloat16
    step(*given.inputs)
    assert step.count == 2


@pytest.mark.slow
@pytest.mark.parametrize(("change", "found", "way_out"), CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("evaluates", [False, True], ids=["step", "evaluate"])
def test_changes_after_the_first_step(
    change: Callable[[nn.Module], Any], found: str, way_out: str, evaluates: bool
) -> None:
    given = problem()
    step = compiled(given, 2, 2).run_local()
    call = step.evaluate if evaluates else step
    call(*given.inputs)
    change(given.model)
    count, before = step.count, [None if p.grad is None else p.grad.clone() for p in step.parameters()]
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            call(*given.inputs)
        assert found in str(caught.value)
        assert way_out in str(caught.value)
    assert step.count == count
    for gradient, parameter in zip(before, step.parameters(), strict=True):
        after = parameter.grad
        assert after is None if gradient is None or after is None else torch.equal(gradient, after)


def test_changes_in_place_are_followed() -> None:
    given = problem()
    model: Any = given.model
    step = compiled(given, 2, 2).run_local()
    step(*given.inputs)
    step.evaluate(*given.inputs)
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    model.shift.fill_(0.25)
    model.tau = float("1.0")
    model.unread = [2.0]
    model.eval().train()
    model.zero_grad()
    loss = step(*given.inputs)
    found = {name: parameter.grad for name, parameter in step.named_parameters()}
    assert_same((loss, found), reference(given, 2), 1e-6)


def test_values_that_come_and_go_between_steps_are_seen() -> None:
    """The memory of a number that is gone may hold the next one."""
    given = problem()
    step = compiled(given, 2, 2).run_local()
    for _ in range(3):
        given.model.tau = float("1.0")  # type: ignore[assignment]
        step(*given.inputs)
        given.model.tau = float("3.0")  # type: ignore[assignment]
        with pytest.raises(InputError, match=r"tau was 1\.0"):
            step(*given.inputs)


def test_changes_between_compile_and_bind() -> None:
    """New tensors are those of the pipeline; a new layer is not in its graph."""
    given = problem()
    pipe = compiled(given, 2, 2)
    given.model.first.bias = nn.Parameter(torch.zeros(WIDTH))  # type: ignore[union-attr]
    loss = pipe.run_local()(*given.inputs)
    assert given.model.first.bias.grad is not None  # type: ignore[union-attr]
    assert torch.allclose(loss, reference(given, 2)[0])
    given.model.act = nn.ReLU()
    with pytest.raises(InputError, match="act was replaced"):
        pipe.run_local()(*given.inputs)


@pytest.mark.parametrize("name", ["bfloat16", "dtype of a buffer", "dtype of a tensor", "shape"])
def test_other_dtypes_and_shapes_between_compile_and_bind(name: str) -> None:
    given = problem()
    pipe = compiled(given, 2, 2)
    change, *parts = CHANGES[name]
    change(given.model)
    with pytest.raises(InputError) as caught:
        pipe.run_local()
    assert all(part in str(caught.value) for part in parts)


def test_dtypes_that_come_back() -> None:
    """The values are those that the detour left: float32 numbers survive it."""
    given = problem()
    step = compiled(given, 2, 2).run_local()
    step(*given.inputs)
    given.model.first.double()
    with pytest.raises(InputError, match=r"first.bias was torch\.float32"):
        step(*given.inputs)
    given.model.first.float()
    given.model.zero_grad()
    loss = step(*given.inputs)
    found = {name: parameter.grad for name, parameter in step.named_parameters()}
    assert_same((loss, found), reference(given, 2), 1e-6)


def test_tensors_that_were_moved() -> None:
    """As `model.cpu()` does on a GPU, and here a pipeline that is said to have been bound elsewhere."""
    given = problem()
    source = Source(given.model, squares, Guard.of(given.model, squares), Modes.now())
    watch = Watch(source, torch.device("cpu"), {})
    watch.check(lambda: {"first.bias", "bias"}, evaluation=False)
    watch.device = torch.device("meta")
    watch.check(lambda: {"first.bias", "bias"}, evaluation=False)  # nothing has changed since
    with pytest.raises(InputError) as caught:
        watch.check_tensors({"first.bias", "bias"})
    assert str(caught.value) == (
        "the pipeline was bound on meta; found bias, first.bias on cpu. Move the model back (model.to('meta')), or "
        "bind the pipeline again"
    )


def test_what_the_pipeline_does_not_read_may_change() -> None:
    given = problem()
    given.model.register_buffer("idle", torch.ones(1))
    step = compiled(given, 2, 2).run_local()
    step(*given.inputs)
    given.model.idle = torch.zeros(2)
    step(*given.inputs)
    given.model.idle = torch.zeros(2, dtype=torch.int64)
    step(*given.inputs)
    assert step.count == 3


class Counted(nn.Module):
    """Its forward reads `scale` by a function of its file and `offset` by name, not `epoch`, nor what it sets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.epoch, self.scale, self.offset, self.last_rows = 0, 2.0, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.last_rows = len(x)
        return torch.tanh(self.layer(x)) * scale_of(self) + getattr(self, "offset")  # noqa: B009


def scale_of(counted: Any) -> float:
    return float(counted.scale)


def test_attributes_that_no_code_reads_may_change() -> None:
    case = Problem(Counted(), squares, (numbers(4, WIDTH),))
    model: Any = case.model
    step = compiled(case, 1, 2).run_local()
    for epoch in range(3):
        model.epoch, model.last_rows = epoch, epoch
        step(*case.inputs)
    for name in ("scale", "offset"):
        before = getattr(model, name)
        setattr(model, name, 3.0)
        with pytest.raises(InputError, match=f"{name} was {before}"):
            step(*case.inputs)
        setattr(model, name, before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_where_no_gradients_are_asked_for(mode: Callable[[], Any]) -> None:
    case = problem()
    step = compiled(case, 2, 2).run_local(on_new_shape="recompile")
    with mode():
        found = [float(step.evaluate(*(t[:rows] for t in case.inputs))) for rows in (4, 2)]
    with torch.no_grad():
        expected = [float(squares(case.model(case.inputs[0][:rows]))) for rows in (4, 2)]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiling_and_stepping_where_no_gradients_are_asked_for(mode: Callable[[], Any]) -> None:
    case = problem()
    expected = reference(case, 2)
    with mode():
        pipe = compiled(case, 2, 2, check=True)
        assert check(pipe)
        step = pipe.run_local()
        loss = step(*case.inputs)
    assert_same((loss, {name: p.grad for name, p in step.named_parameters()}), expected, 1e-6)


class Derived(nn.Module):
    """Its forward replaces a tensor derived from parameters, which it does not read before, and a counter that it does;
    and its first layers are normed by hooks that do the like."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.first = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second, self.third = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(()))
        self.squared = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.squared = self.third.bias * self.third.bias
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(h) / self.count + self.squared


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_forwards_of_the_model_between_steps(mode: Callable[[], Any], backend: str) -> None:
    """Plain forwards count, and what they derive is derived again: as for plain autograd."""
    case, alone = (Problem(Derived(), squares, (numbers(4, WIDTH),)) for _ in range(2))
    model: Any = case.model
    pipe = compiled(case, 2, 2, backend=backend)
    optimizers = []

    def plain(model: nn.Module) -> None:
        with mode():
            model(case.inputs[0][:3])
            model.eval()(case.inputs[0])
        model.train()

    for when in ("compile", "bind", "step", "evaluate"):
        for one in (model, alone.model):
            plain(one)
        if when == "compile":
            step = pipe.run_local()
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone.model)]
        if when == "evaluate":
            alone.model.eval()
            with torch.no_grad():
                expected = torch.stack([squares(alone.model(rows)) for rows in case.inputs[0].chunk(2)]).mean()
            alone.model.train()
            assert torch.allclose(step.evaluate(*case.inputs), expected, rtol=1e-5)
        wanted = reference(alone, 2, alone.model)
        loss = step(*case.inputs)
        assert_same((loss, {name: p.grad for name, p in step.named_parameters()}), wanted, 1e-5)
        assert float(model.count) == float(alone.model.count)  # type: ignore[arg-type]
        for name in ("first.weight", "second.weight", "squared"):
            module, _, attribute = name.rpartition(".")
            found, expected = (getattr(m.get_submodule(module), attribute) for m in (model, alone.model))
            assert torch.allclose(found, expected, rtol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_tensors_that_only_the_user_replaces_are_refused_all_the_same() -> None:
    """Or in another layout than the forward gives them."""
    case = Problem(Derived(), squares, (numbers(4, WIDTH),))
    model: Any = case.model
    step = compiled(case, 2, 2).run_local()
    step(*case.inputs)
    bound = model.count
    model.count = torch.full((), 5.0)
    step(*case.inputs)
    assert model.count is bound
    assert float(bound) == 7.0
    model.count = torch.zeros(1)
    with pytest.raises(InputError, match=r"count had shape \(\) when the model was traced"):
        step(*case.inputs)
    model.count = bound
    model.second.weight_u = torch.ones(WIDTH)
    with pytest.raises(InputError, match=r"found other tensors .* second\.weight_u"):
        step(*case.inputs)


def test_changes_in_a_loss_module() -> None:
    loss_fn = nn.SmoothL1Loss(beta=0.5)
    given = replace(mlp(2), loss_fn=loss_fn)
    step = compiled(given, 2, 2).run_local()
    step(*given.inputs, *given.targets)
    loss_fn.beta = 1.0
    with pytest.raises(InputError, match=r"loss_fn\.beta was 0\.5"):
        step(*given.inputs, *given.targets)


def test_local_steps_close() -> None:
    given = mlp(2)
    step = compiled(given, 2, 2).run_local()
    step(*given.inputs, *given.targets)
    step.close()
    step.close()
    for call in (step, step.evaluate):
        with pytest.raises(ZbfxError, match="this step was closed; bind the pipeline again"):
            call(*given.inputs, *given.targets)
    with pytest.raises(ZbfxError, match="this step was closed"):
        step.run_split([])
    assert step.count == 1


def test_a_forward_of_the_modules_own_is_seen() -> None:
    given = problem()
    step = compiled(given, 2, 1).run_local()
    layer: Any = given.model.get_submodule("first")
    before = layer.forward
    layer.forward = lambda x: 100 * before(x)
    with pytest.raises(InputError, match=r"^first\.forward was replaced since the model was traced"):
        step(*given.inputs)
    del layer.forward
    step(*given.inputs)
