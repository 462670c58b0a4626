"""What crosses a stage boundary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from tests.cases.common import TOLERANCE, WIDTH, check, line_of, linears, refusal
from tests.support.models import Problem, ids, mean_squares, numbers, squares, token_loss, unet_group_norm
from tests.support.reference import activations, assert_same, compiled, reference, stepped


class Named(NamedTuple):
    out: Tensor
    aux: Tensor | None


@dataclass
class Data:
    out: Tensor
    aux: Any


pytree.register_dataclass(Data, serialized_type_name="tests.cases.test_boundaries.Data")


class Structured(nn.Module):
    """Hands a structure with None between its halves and returns another."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers, self.form = linears("a", "b"), form

    def forward(self, x: Tensor) -> Any:
        between = {"h": torch.tanh(self.layers["a"](x)), "aux": None, "flags": (1, "text", True)}
        out = self.layers["b"](between["h"])
        return {"dict": {"out": out, "aux": None}, "named": Named(out, None), "data": Data(out, {"n": None})}[self.form]


def structured_loss(output: Any) -> Tensor:
    return squares(output["out"] if isinstance(output, dict) else output.out)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dict", "named", "data"])
def test_case_32_none_dict_and_dataclass_outputs(form: str) -> None:
    pipe = check(Problem(Structured(form), structured_loss, (numbers(6, WIDTH),)), (1, 2))
    assert all(len(m.names) == 1 for m in activations(pipe))  # None costs nothing


class Skip(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = linears(*(f"l{k}" for k in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        first, *middle, last = self.layers.values()
        h = y = torch.tanh(first(x))
        for layer in middle:
            y = torch.tanh(layer(y))
        return last(y) + h


@pytest.mark.slow
def test_case_34_skip_connection() -> None:
    for count in (3, 4):
        pipe = check(
            Problem(Skip(count), squares, (numbers(6, WIDTH),)), count, cuts=[f"layers.l{k}" for k in range(1, count)]
        )
        pairs = {(m.source, m.target) for m in activations(pipe)}
        assert (0, count - 1) in pairs  # straight from producer to consumer
    problem = unet_group_norm(2)
    assert_same(stepped(problem, compiled(problem, 4, 2)), reference(problem, 2), TOLERANCE)


class LateInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears("a", "b", "c")
        self.positions = nn.Embedding(8, WIDTH)

    def forward(self, x: Tensor, position_ids: Tensor, scale: Tensor) -> Tensor:
        h = torch.tanh(self.layers["b"](torch.tanh(self.layers["a"](x))))
        return (self.layers["c"](h) + self.positions(position_ids)) * scale


def test_case_35_inputs_and_labels_of_later_stages() -> None:
    kwargs = {"position_ids": torch.arange(6), "scale": numbers(6, 1, seed=4)}
    problem = Problem(LateInputs(), mean_squares, (numbers(6, WIDTH),), (numbers(6, WIDTH, seed=2),), kwargs)
    pipe = check(problem, 3, cuts=["layers.b", "layers.c"])
    read = [runner.input_names for runner in pipe.run_local().engine.runners]
    assert read == [{"inputs[0]"}, set(), {"position_ids", "scale", "targets[0]"}]
    names = {name for m in activations(pipe) for name in m.names}
    assert not any("position" in name or "target" in name for name in names)


class Tied(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h @ self.tokens.weight.T


@pytest.mark.slow
def test_case_36_tied_weights_over_stages() -> None:
    problem = Problem(Tied(), token_loss, (ids(6, 3, vocabulary=8),), (ids(6, 3, vocabulary=8, seed=2),))
    pipe = check(problem, (2, 3))
    (shared,) = pipe.compiled.shared_gradients
    assert (shared.name, shared.holders) == ("tokens.weight", (0, 2))
    assert [name for name, _ in pipe.run_local().named_parameters()].count("tokens.weight") == 1
    step = pipe.run_local()
    problem.model.zero_grad()
    step(*problem.inputs, *problem.targets)
    found = nn.utils.get_total_norm(p.grad for p in step.parameters() if p.grad is not None)
    expected = nn.utils.get_total_norm(g for g in reference(problem, 3)[1].values() if g is not None)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=0)
    pipe = check(problem, 2, schedule="zb-v")  # first and last stage share a rank: nothing to exchange
    assert {holders for g in pipe.compiled.shared_gradients for holders in [g.holders]} <= {(0,)}
    assert not any("tokens.weight" in m.names for m in activations(pipe))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears("a", "b", "c")
        self.fired = 0
        for layer in self.layers.values():
            layer.register_forward_pre_hook(self.watch)

    def watch(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def test_case_38_hooks_on_activations_act_once_per_microbatch() -> None:
    """Each hook doubles the gradient: one that fired once more would be seen. Five steps, five times the gradient."""
    problem = Problem(Hooked(), squares, (numbers(6, WIDTH),))
    pipe = check(problem, (1, 3))
    step, expected = pipe.run_local(), reference(problem, 3)[1]
    problem.model.zero_grad()
    sizes = set()
    for _ in range(5):
        step(*problem.inputs)
        sizes.add(len(step.worker.ranks.mailbox) + sum(len(vars(r.transport)["posted"]) for r in step.engine.runners))
    for name, parameter in problem.model.named_parameters():
        torch.testing.assert_close(parameter.grad, 5 * expected[name], rtol=1e-10, atol=0)  # type: ignore[operator]
    assert sizes == {0}  # no received buffer outlives its step


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


class Redistributed(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.layer, self.mesh = nn.Linear(WIDTH, WIDTH), [mesh]

    def __deepcopy__(self, memo: dict[int, Any]) -> Redistributed:
        copied = Redistributed(self.mesh[0])
        for name, parameter in self.layer.named_parameters():
            setattr(copied.layer, name, memo.get(id(parameter), parameter))
        return copied

    def forward(self, x: Tensor) -> Tensor:
        sharded = DTensor.from_local(self.layer(x), self.mesh[0], [Shard(0)])
        return sharded.redistribute(self.mesh[0], [Replicate()]).to_local()


def test_case_39_distributed_tensors_are_refused_unless_they_are_parameters(mesh: Any) -> None:
    problem = Problem(nn.Linear(WIDTH, 2), squares, (distribute_tensor(numbers(6, WIDTH), mesh, [Replicate()]),))
    message = refusal(problem, 1, 1)
    assert message.startswith("inputs[0] is a DTensor")
    assert "expected a plain torch.Tensor" in message
    assert "to_local()" in message
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    message = refusal(Problem(model, squares, (numbers(6, WIDTH),)), 1, 1)
    assert "mixed torch.Tensor and DTensor" in message


def test_case_39_collective_in_the_model_is_refused(mesh: Any) -> None:
    message = refusal(Problem(Redistributed(mesh), squares, (numbers(6, WIDTH),)), 1)
    assert "all_gather_into_tensor" in message
    assert line_of(Redistributed.forward, "redistribute") in message
    assert "Use plain tensors" in message
