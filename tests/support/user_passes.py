"""Passes as users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from zbfx.graphs import Joint, copy_graph

aten = torch.ops.aten


def sine_for_tanh(joint: Joint) -> Joint:
    """sin(x) for tanh(x), and its derivative in the backward: g * cos(x) for g * (1 - tanh(x) ** 2)."""
    graph = copy_graph(joint.graph)
    for node in graph.nodes:
        if node.target is aten.tanh.default:
            node.target = aten.sin.default
    for node in graph.find_nodes(op="call_function", target=aten.tanh_backward.default):
        gradient, result = node.args
        with graph.inserting_before(node):
            slope = graph.call_function(aten.cos.default, (result.args[0],))
            product = graph.call_function(aten.mul.Tensor, (gradient, slope))
        slope.meta, product.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
    return replace(joint, graph=graph)


def scaled(factor: float) -> Callable[[Joint], Joint]:
    """A pass that holds a value."""

    def untouched(joint: Joint) -> Joint:
        assert factor > 0
        return joint

    return untouched
