"""The joint graph in its canonical form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import Problem, gpt, mlp, numbers, squares, unet_batch_norm, unet_group_norm
from tests.support.reference import traced, traced_model
from zbfx.graphs import Joint, Role
from zbfx.passes.canonicalize import canonicalize
from zbfx.trace.tracer import trace

aten = torch.ops.aten


def raw(problem: Problem) -> Joint:
    joint, _ = trace(
        problem.model,
        problem.loss_fn,
        problem.inputs,
        dict(problem.kwargs),
        problem.targets,
        device=torch.device("cpu"),
    )
    return joint


def count(joint: Joint, target: Any) -> int:
    return len(joint.graph.find_nodes(op="call_function", target=target))


def gradient_names(joint: Joint) -> list[str]:
    return [port.name for port in joint.outputs if port.role is Role.GRADIENT]


def test_input_stays_untouched() -> None:
    joint = raw(unet_batch_norm(1))
    before = [(node.name, node.target, str(node.args)) for node in joint.graph.nodes]
    outputs = joint.outputs
    canonicalize(joint)
    assert [(node.name, node.target, str(node.args)) for node in joint.graph.nodes] == before
    assert joint.outputs == outputs


def test_identities_are_gone() -> None:
    problem = gpt(1)
    assert count(raw(problem), aten.detach.default) > 0
    joint = traced_model(gpt)
    assert count(joint, aten.detach.default) == 0
    assert count(joint, aten.alias.default) == 0


def test_convolution_backward_is_split_by_its_mask() -> None:
    """Six convolutions that need both kinds of gradient, and the first one, whose input needs none."""
    problem = unet_group_norm(1)
    whole = raw(problem).graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert [node.args[10][0] for node in whole].count(True) == 6
    halves = traced_model(unet_group_norm).graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default
    )
    masks = [list(node.args[10]) for node in halves]
    assert masks.count([True, False, False]) == 6
    assert len([mask for mask in masks if not mask[0]]) == 7
    assert all(any(mask) for mask in masks)


def test_norm_backward_stays_one_node() -> None:
    assert count(traced_model(gpt), aten.native_layer_norm_backward.default) == 9  # two a block, and the last
    assert count(traced_model(unet_group_norm), aten.native_group_norm_backward.default) == 5
    assert count(traced_model(unet_batch_norm), aten.native_batch_norm_backward.default) == 5


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


def test_each_use_of_a_weight_is_a_contribution_of_its_own() -> None:
    problem = Problem(Twice(), squares, (numbers(2, 4),))
    assert gradient_names(raw(problem)) == ["weight"]
    assert gradient_names(traced(problem)) == ["weight", "weight"]
    assert gradient_names(traced_model(mlp)) == gradient_names(raw(mlp(1)))


class OnlyParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.clone()


def test_output_that_is_an_input_is_computed() -> None:
    """The gradient of a copied parameter is the gradient of the loss."""
    joint = traced(Problem(OnlyParameter(), None, (numbers(2),)))
    assert [value.op for value in joint.output_values] == ["call_function"] * 2
    assert {port.role for port in joint.outputs} == {Role.LOSS, Role.GRADIENT}


class Counting(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + self.calls
        self.calls += 1
        return x


def test_written_buffer_is_read_once_through_a_clone() -> None:
    joint = traced(Problem(Counting(), squares, (numbers(2, 4),)))
    buffer = next(node for node, port in joint.input_ports().items() if port == port_of(joint, Role.BUFFER))
    readers: list[fx.Node] = list(buffer.users)
    assert [reader.target for reader in readers] == [aten.clone.default]
    assert len(readers[0].users) >= 2


def port_of(joint: Joint, role: Role) -> Any:
    return next(port for port in joint.inputs if port.role is role)


def test_nothing_is_computed_that_no_output_needs() -> None:
    joint = traced_model(gpt)
    assert [node.name for node in joint.graph.nodes if node.op == "call_function" and not node.users] == []


class Unread(nn.Module):
    """Draws noise beside its result, which nothing reads, and again where a checkpointed part is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        (torch.randn_like(x) * x).bernoulli(0.5)
        return checkpoint(lambda x: self.second(x).tanh() + torch.randn_like(x).detach(), x, use_reentrant=False)


def test_draws_that_nothing_reads_are_left_out() -> None:
    problem = Problem(Unread(), squares, (numbers(2, 4),))
    joint = traced(problem)
    assert count(joint, aten.bernoulli.default) == 0
    assert count(joint, aten.randn_like.default) == 1
