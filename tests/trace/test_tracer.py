"""What tracing must leave alone, and what it must understand: state, meta tensors, precision, nested calls."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.gpt import GPT, GPTConfig
from tests.support.models import Problem, gpt, mlp, numbers, squares, token_loss
from tests.support.reference import activations, assert_same, compiled, cut, default_dtype, reference, stepped
from zbfx.errors import InputError, TraceError
from zbfx.graphs import Role
from zbfx.passes.nodes import is_statistic
from zbfx.plan import Kind
from zbfx.runtime.digest import digest

WIDTH = 6


def stateful() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    model.register_buffer("unused", torch.zeros(2), persistent=False)
    return Problem(model, squares, (numbers(8, WIDTH),))


def test_compile_leaves_the_model_and_the_generator_alone() -> None:
    problem = stateful()
    model = problem.model
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before, versions = copy.deepcopy(tensors), {name: tensor._version for name, tensor in tensors.items()}
    generator, hooks = torch.get_rng_state(), [len(m._forward_hooks) for m in model.modules()]
    compiled(problem, 2, 4)
    assert torch.equal(torch.get_rng_state(), generator)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name: id(tensor) for name, tensor in after.items()} == {
        name: id(tensor) for name, tensor in tensors.items()
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert {name: tensor._version for name, tensor in after.items()} == versions
    assert all((p.grad == 3.0).all() for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert model.training


def test_compile_does_not_switch_gradients_or_flags() -> None:
    compiled(mlp(2), 2, 2)
    assert torch.is_grad_enabled()
    assert not torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()


def test_state_dict_keeps_its_keys_through_a_step() -> None:
    problem = stateful()
    keys = list(problem.model.state_dict())
    stepped(problem, compiled(problem, 2, 4))
    assert list(problem.model.state_dict()) == keys


@pytest.mark.slow
def test_model_on_the_meta_device_compiles_to_the_same_programs() -> None:
    problem = gpt(2)
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=4, hidden=16, heads=2, sequence=8, vocabulary=24))
    on_meta = replace(problem, model=model, inputs=meta(problem.inputs), targets=meta(problem.targets))
    pipe = compiled(on_meta, 4, 2)
    assert digest(pipe.compiled) == digest(compiled(problem, 4, 2).compiled)
    assert all(parameter.is_meta for parameter in model.parameters())


def meta(tensors: Any) -> Any:
    return pytree.tree_map(lambda tensor: tensor.to("meta"), tensors)


def test_model_filled_after_compile_trains() -> None:
    problem = gpt(2)
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=4, hidden=16, heads=2, sequence=8, vocabulary=24))
    pipe = compiled(replace(problem, model=model), 4, 2)
    model.to_empty(device="cpu")
    model.load_state_dict(problem.model.state_dict())
    assert_same(stepped(replace(problem, model=model), pipe), reference(problem, 2), 1e-5)


def test_model_of_billions_traces_without_memory() -> None:
    with torch.device("meta"):
        model = GPT(replace(GPTConfig(2, 16384, 128), sequence=256))
    tokens = torch.zeros(1, 256, dtype=torch.long, device="meta")
    pipe = compiled(Problem(model, token_loss, (tokens,), (tokens,)), 2, 1)
    assert sum(parameter.numel() for parameter in model.parameters()) > 7e9
    assert [phase.module.graph.output_node() is not None for s in pipe.stages for phase in s.phases.values()] == [
        True
    ] * 8


@dataclass
class Pair:
    left: Tensor
    right: Tensor | None


pytree.register_dataclass(Pair, serialized_type_name="tests.trace.test_tracer.Pair")


class Nested(nn.Module):
    """Takes and returns dictionaries, dataclasses, tuples and None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair, *, extra: dict[str, Any], scale: float, mode: str | None = None) -> dict[str, Any]:
        assert pair.right is None
        assert mode is None
        h = torch.tanh(self.first(pair.left)) + extra["shift"][0]
        return {"out": Pair(torch.tanh(self.second(h)) * scale, None), "nothing": None}


def nested_loss(output: dict[str, Any], targets: dict[str, Tensor]) -> Tensor:
    assert output["nothing"] is None
    return F.mse_loss(output["out"].left, targets["wanted"])


def nested() -> Problem:
    kwargs = {"extra": {"shift": (numbers(6, WIDTH, seed=3), None)}, "scale": 2.0, "mode": None}
    targets = {"wanted": numbers(6, WIDTH, seed=2)}
    return Problem(Nested(), nested_loss, (Pair(numbers(6, WIDTH), None),), (targets,), kwargs)


def test_nested_arguments_and_outputs() -> None:
    problem = nested()
    pipe = compiled(problem, 2, 3)
    names = [tensor.name for tensor in pipe.compiled.signature.tensors]
    assert names == ["inputs[0].left", "targets[0]['wanted']", "extra['shift'][0]"]
    assert_same(stepped(problem, pipe), reference(problem, 3), 1e-5)


class LatePositions(nn.Module):
    """Position ids enter the second half only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(16, WIDTH), nn.Embedding(8, WIDTH)
        self.first, self.second, self.head = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 16))

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.tokens(ids)))
        return self.head(torch.tanh(self.second(h)) + self.positions(position_ids))


def late_positions() -> Problem:
    ids = torch.arange(24).reshape(6, 4) % 16
    return Problem(LatePositions(), token_loss, (ids,), (ids,), {"position_ids": ids % 8})


def test_late_inputs_are_read_where_they_are_used() -> None:
    problem = late_positions()
    pipe = compiled(problem, 3, 3, cuts=["second", "head"])
    read = [runner.input_names for runner in pipe.run_local().engine.runners]
    assert read == [{"inputs[0]"}, {"position_ids"}, {"targets[0]"}]
    sent = {layout.dtype for m in activations(pipe) for layout in m.layouts}
    assert sent == {torch.float32}
    assert_same(stepped(problem, pipe), reference(problem, 3), 1e-5)


def test_loss_module_with_a_buffer() -> None:
    problem = late_positions()
    weight = torch.linspace(0.1, 1.0, 16)

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entropy = nn.CrossEntropyLoss(weight=weight)

        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            return self.entropy(logits.flatten(0, 1), targets.flatten())

    problem = replace(problem, loss_fn=Weighted())
    pipe = compiled(problem, 2, 3)
    used = {name for s in pipe.stages for phase in s.phases.values() for name in phase.port_names(Role.BUFFER)}
    assert used == {"loss_fn.entropy.weight"}
    assert_same(stepped(problem, pipe), reference(problem, 3), 1e-5)


def test_loss_module_given_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.3, 0.4]), label_smoothing=0.1)
    problem = Problem(model, loss_fn, (numbers(6, WIDTH),), (torch.arange(6) % 4,))
    assert_same(stepped(problem, compiled(problem, 2, 3)), reference(problem, 3), 1e-5)


def test_loss_with_a_trainable_parameter() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.tensor(0.3))

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(output, targets) * self.log_scale.exp() - self.log_scale

    problem = replace(mlp(3), loss_fn=Scaled())
    eager = copy.deepcopy(problem.loss_fn)
    expected = reference(replace(problem, loss_fn=eager), 3)
    pipe = compiled(problem, 2, 3)
    assert_same(stepped(problem, pipe), expected, 1e-5)
    gradients = [loss_fn.get_parameter("log_scale").grad for loss_fn in (problem.loss_fn, eager)]  # type: ignore[union-attr]
    assert gradients[0] is not None
    torch.testing.assert_close(gradients[0], gradients[1])
    assert "loss_fn.log_scale" in dict(pipe.run_local().named_parameters())


class Autocast(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(8, 8), norm or nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(torch.tanh(self.norm(self.first(x)))).float()


def test_autocast_in_the_model() -> None:
    problem = Problem(Autocast(), squares, (numbers(6, 8),))
    pipe = compiled(problem, 2, 3, cuts=["norm"])
    sent = {layout.dtype for m in activations(pipe) for layout in m.layouts}
    assert sent == {torch.bfloat16}
    found = stepped(problem, pipe)
    assert_same(found, reference(problem, 3), 1e-5)
    assert all(gradient is not None and gradient.dtype is torch.float32 for gradient in found[1].values())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)], ids=lambda n: type(n).__name__
)
def test_statistics_of_norms_over_half_precision(norm: nn.Module, backend: str) -> None:
    """Their fake versions have another dtype than kernels on the CPU give."""
    problem = Problem(Autocast(norm), squares, (numbers(6, 8),))
    expected = reference(problem, 3)
    pipe = compiled(problem, 2, 3, backend=backend, recompute="none")
    graphs = [stage.phases[Kind.F].module.graph for stage in pipe.stages]
    statistics = [node.meta["val"] for graph in graphs for node in graph.nodes if is_statistic(node)]
    assert [value.dtype for value in statistics] == [torch.float32, torch.float32]
    assert_same(stepped(problem, pipe), expected, 1e-5 if backend == "eager" else 1e-2)


def test_autocast_around_the_step_changes_nothing() -> None:
    problem = mlp(2)
    pipe = compiled(problem, 2, 2)
    expected = stepped(problem, pipe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(stepped(problem, pipe), expected, 0.0)


def test_model_in_bfloat16() -> None:
    with default_dtype(torch.bfloat16):
        problem = mlp(3)
    pipe = compiled(problem, 3, 3)
    loss, found = stepped(problem, pipe)
    assert loss.dtype is torch.float32  # of a batch
    assert all(gradient is not None and gradient.dtype is torch.bfloat16 for gradient in found.values())
    assert_same((loss, found), reference(problem, 3), 2e-2)


def test_model_that_returns_its_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.form = nn.Linear(WIDTH, 1), form

        def forward(self, x: Tensor) -> Any:
            output = torch.tanh(self.layer(x))
            loss = output.square().mean()
            return {"tensor": loss, "tuple": (loss, output), "dict": {"loss": loss, "output": output}}[self.form]

    for form in ("tensor", "tuple", "dict"):
        problem = Problem(WithLoss(form), None, (numbers(4, WIDTH),))
        loss, _ = stepped(problem, compiled(problem, 1, 2))
        expected = torch.tanh(problem.model.layer(problem.inputs[0])).square().mean()  # type: ignore[operator]
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_evaluation_mode_is_traced_as_it_is() -> None:
    problem = stateful()
    problem.model.eval()
    with default_dtype(torch.float32):
        assert_same(stepped(problem, compiled(problem, 2, 4)), reference(problem, 4), 1e-5)


def test_user_lines_reach_the_nodes() -> None:
    pipe = compiled(gpt(1), 2, 1)
    traces = [str(node.meta.get("stack_trace")) for node in pipe.compiled.joint.graph.nodes if "gelu" in node.name]
    assert len(traces) >= 4
    assert "benchmarks/gpt.py:" in traces[0]
    assert " in blocks.0" in traces[0]


def test_partial_and_lambda_losses() -> None:
    problem = mlp(2)
    loss_fn = functools.partial(F.smooth_l1_loss, beta=0.5)
    problem = replace(problem, loss_fn=loss_fn)
    assert_same(stepped(problem, compiled(problem, 2, 2)), reference(problem, 2), 1e-5)


def test_nothing_of_the_example_is_baked_in() -> None:
    """A batch that differs from the example in everything allowed to differ equals eager."""
    problem = late_positions()
    pipe = compiled(problem, 2, 3)
    other = replace(
        problem, inputs=(problem.inputs[0].flip(1),), kwargs={"position_ids": problem.kwargs["position_ids"] * 0}
    )
    assert_same(stepped(other, pipe), reference(other, 3), 1e-5)


def test_phases_are_named_after_stage_and_kind() -> None:
    pipe = compiled(mlp(1), 2, 1)
    assert [phase.name for stage in pipe.stages for phase in stage.phases.values()] == [
        *("P0", "F0", "B0", "W0"),
        *("P1", "F1", "B1", "W1"),
    ]
    assert [kind for stage in pipe.stages for kind in stage.phases] == [Kind.P, Kind.F, Kind.B, Kind.W] * 2
    assert len(cut(mlp(3).inputs, 3)) == 3


def test_tensors_elsewhere_that_want_a_gradient_are_refused() -> None:
    """They train in plain PyTorch, and would get no gradient from a graph in which they are constants."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    problem, scale = Problem(model, squares, (numbers(4, WIDTH),)), torch.tensor(2.0, requires_grad=True)
    weight = model.get_parameter("0.weight")

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scales = model, (nn.Parameter(torch.ones(())),)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) * self.scales[0]

    cases = [
        replace(problem, loss_fn=lambda output: squares(scale * output)),
        replace(problem, loss_fn=lambda output: squares(output) + weight.norm()),
        replace(problem, model=Scaled()),
    ]
    for case in cases:
        with pytest.raises(TraceError, match=r"requires a gradient is read at .*test_tracer\.py:\d+, and would get"):
            compiled(case, 2, 2)
    compiled(replace(problem, loss_fn=lambda output: squares(scale.detach() * output)), 2, 2)


def test_inputs_that_others_made_are_refused() -> None:
    """A gradient would end at the inputs."""
    model, encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH)
    step = compiled(Problem(model, squares, (numbers(4, WIDTH),)), 2, 2).run_local()
    with pytest.raises(InputError, match=r"inputs\[0\] is the result of other modules .*\(AddmmBackward0\): make"):
        step(encoder(numbers(4, WIDTH)))
    with torch.no_grad():
        made = encoder(numbers(4, WIDTH))
    step(made)


@pytest.mark.parametrize("kind", ["positional", "keyword", "target", "nested", "parameter"])
def test_tensors_of_a_batch_that_want_a_gradient_are_refused(kind: str) -> None:
    """Plain autograd would fill their `.grad`. Evaluation gives none in plain PyTorch either."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any, scale: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x["x"]) * scale))

    def given() -> dict[str, Tensor]:
        return {name: numbers(4, WIDTH, seed=seed) for seed, name in enumerate(("x", "scale", "target"))}

    problem = Problem(
        Scaled(), nn.functional.mse_loss, ({"x": given()["x"]},), (given()["target"],), {"scale": given()["scale"]}
    )
    step, batch = compiled(problem, 2, 2).run_local(), given()
    name, path = {
        "keyword": ("scale", "scale"),
        "target": ("target", r"targets\[0\]"),
    }.get(kind, ("x", r"inputs\[0\]\['x'\]"))
    batch[name] = nn.Parameter(batch[name]) if kind == "parameter" else batch[name].requires_grad_()
    arguments = {"x": batch["x"]}, batch["target"]
    with pytest.raises(InputError, match=f"{path} requires a gradient, .*Pass {path}.detach"):
        step(*arguments, scale=batch["scale"])
    halves = [
        (({"x": x}, target), {"scale": scale})
        for x, target, scale in zip(
            batch["x"].detach().split(2),
            batch["target"].detach().split(2),
            batch["scale"].detach().split(2),
            strict=True,
        )
    ]
    with pytest.raises(InputError, match="requires a gradient"):
        step.run_split(
            [(({"x": x.requires_grad_()}, target), scale) for ((a, target), scale) in halves for x in a.values()]
        )
    assert step.count == 0
    step.evaluate(*arguments, scale=batch["scale"])


class Masked(nn.Module):
    """Layers of torch that, in plain PyTorch, look at the values of a mask to find out whether it is causal."""

    def __init__(self, causal: bool, kept: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        self.register_buffer("mask", mask if causal else mask.T.contiguous())
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        mask = self.get_buffer("mask") if self.kept else nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        output: Tensor = self.layers(x, x, src_mask=self.get_buffer("mask"), tgt_mask=mask)
        return output


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "kept"), [(True, False), (True, True), (False, True)])
def test_masks_of_the_layers_of_torch(causal: bool, kept: bool) -> None:
    with default_dtype(torch.float64):
        problem = Problem(Masked(causal, kept), squares, (numbers(4, 4, 8),))
        expected = reference(problem, 2)
        pipe = compiled(problem, 2, 2)
        assert_same(stepped(problem, pipe), expected, 1e-12)
        with torch.no_grad():
            plain = [float(squares(problem.model.eval()(rows))) for rows in problem.inputs[0].chunk(2)]
        problem.model.train()
        assert float(pipe.run_local().evaluate(*problem.inputs)) == pytest.approx(sum(plain) / 2, rel=1e-12)


def test_lines_of_a_model_of_torchs_layers_alone_are_theirs() -> None:
    """Not that of who calls `compile`."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    pipe = compiled(Problem(model, squares, (torch.ones(1, 2),)), 1, 1, check=False)
    lines = {node.meta.get("stack_trace") for node in pipe.compiled.joint.graph.nodes if node.op == "call_function"}
    places = {line.rpartition("/")[2] for line in lines if line and "/nn/modules/" in line}
    assert {place.partition(":")[0] for place in places} == {"linear.py", "activation.py"}
    assert {place.partition(" in ")[2] for place in places} == {"0.0", "0.1", "1"}
    others = [line for line in lines if line and "/nn/modules/" not in line]
    assert all("models.py" in line for line in others), "the line of the loss"
    assert others
