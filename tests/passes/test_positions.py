"""Where nodes sit along the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import Problem, gpt, mlp, numbers, squares
from tests.support.reference import traced, traced_model
from zbfx.graphs import Role
from zbfx.passes.nodes import is_random
from zbfx.passes.positions import dependents, line_up

aten = torch.ops.aten


def test_forward_is_in_graph_order_and_backward_runs_back() -> None:
    joint = traced_model(mlp)
    line = line_up(joint)
    order = {node: k for k, node in enumerate(joint.graph.nodes)}
    assert [order[node] for node in line.forward] == sorted(order[node] for node in line.forward)
    assert [line.position[node] for node in line.forward] == list(range(len(line.forward)))
    chain = [n for n in joint.graph.nodes if n.target is aten.tanh_backward.default]
    forward = [n for n in line.forward if n.target is aten.tanh.default]
    assert [line.position[n] for n in chain] == [line.position[n] for n in reversed(forward)]


def test_gradients_only_flow_back() -> None:
    """A gradient is never earlier on the line than the gradients it depends on are later."""
    for make in (mlp, gpt):
        line = line_up(traced_model(make))
        for node in line.gradients & set(line.position):
            sources = [s for s in node.all_input_nodes if s in line.gradients and s in line.position]
            assert all(line.position[node] <= line.position[source] for source in sources)


def test_views_of_parameters_and_values_of_inputs_have_no_position() -> None:
    joint = traced_model(gpt)
    line = line_up(joint)
    ports = joint.input_ports()
    transposed = [n for n in joint.graph.nodes if n.target is aten.t.default and n.args[0] in ports]
    assert len(transposed) >= 17  # four a block, and the head
    assert not any(node in line.position for node in transposed)
    positions = joint.graph.find_nodes(op="call_function", target=aten.arange.start_step)
    positions += joint.graph.find_nodes(op="call_function", target=aten.arange.default)
    assert len(positions) == 1
    assert positions[0] not in line.position


def test_every_other_node_has_one() -> None:
    joint = traced_model(gpt)
    line = line_up(joint)
    heavy = (aten.mm.default, aten.addmm.default, aten.native_layer_norm.default, aten.gelu.default, aten.add.Tensor)
    calls = [node for node in joint.graph.nodes if node.target in heavy]
    assert all(0 <= line.position[node] < len(line.forward) for node in calls)
    assert dependents(joint, Role.LOSS_GRADIENT) == {*line.gradients}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_recomputed_nodes_stand_where_the_first_run_stands() -> None:
    joint = traced(Problem(Checkpointed(), squares, (numbers(2, 4),)))
    line = line_up(joint)
    draws = [node for node in joint.graph.nodes if is_random(node)]
    assert len(draws) == 6
    assert [node for node in draws if node in line.original] == draws[3:]
    assert [line.original[node] for node in draws[3:]] == draws[2::-1]
    assert all(line.position[node] == line.position[line.original[node]] for node in line.original)


def test_gradients_of_what_is_recomputed_stand_where_its_forward_stands() -> None:
    """Also where the forward op is not repeated, like the last one of a checkpointed part: its backward needs only its
    inputs again."""
    joint = traced(Problem(Checkpointed(), squares, (numbers(2, 3, 4),)))
    line = line_up(joint)
    own = [(node, line.position[node]) for node in line.forward if node.target is aten.addmm.default]
    for node, position in own:
        same_op = [n for n in line.gradients if n.target is aten.mm.default and n.meta["seq_nr"] == node.meta["seq_nr"]]
        assert [line.position[found] for found in same_op] == [position] * len(same_op)
        assert same_op
