"""Graph -> graph whose computed sizes are arguments of nodes, and then numbers: for graphs whose sizes are symbols.

Takes   a joint graph that was traced with symbols for sizes, or a joint graph, phase or stage made from one.
Gives   `inline_sizes`: the joint graph without the nodes that compute sizes, as if traced with numbers.
        `joint_with_numbers`, `stage_with_numbers`: copies in which `numbers` has replaced every symbol.
Raises  nothing. Source: ours. The symbols are those of torch's ShapeEnv, which are sympy's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from zbfx._torch.compiling import graph_module
from zbfx.graphs import Joint, Stage, copy_graph

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Size:
    """A computed size as an argument of a node: an expression, and the type of the number that it stands for."""

    expression: sympy.Basic
    kind: type

    def __repr__(self) -> str:
        return str(self.expression)


def inline_sizes(joint: Joint) -> Joint:
    """The joint graph with every computed size as an argument of the nodes that use it, and no nodes to compute it."""
    graph = copy_graph(joint.graph)
    values = {node: node.meta.get("val") for node in graph.nodes}
    sizes: dict[fx.Node, Any] = {node: size_of(v) for node, v in values.items() if isinstance(v, SYMBOLIC)}
    for user in {user for size in sizes for user in size.users}:
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda node: sizes.get(node, node))
    for size in reversed(sizes):
        graph.erase_node(size)
    return replace(joint, graph=graph)


def size_of(value: Any) -> Size:
    return Size(value.node.expr, value.node.pytype)


def with_numbers(graph: fx.Graph, numbers: Callable[[Any], Any]) -> fx.Graph:
    """A copy of the graph with `numbers` applied to its arguments and fake values."""
    copy = copy_graph(graph)
    for node in copy.nodes:
        node.args = map_aggregate(node.args, numbers)
        node.kwargs = map_aggregate(node.kwargs, numbers)
        node.meta["val"] = numbers(node.meta.get("val"))
    return copy


def joint_with_numbers(joint: Joint, numbers: Callable[[Any], Any]) -> Joint:
    count = joint.count
    if count is not None:
        count = replace(count, module=module_with_numbers(count.module, numbers))
    return replace(joint, graph=with_numbers(joint.graph, numbers), count=count)


def stage_with_numbers(stage: Stage, numbers: Callable[[Any], Any]) -> Stage:
    return replace(
        stage,
        phases={k: replace(p, module=module_with_numbers(p.module, numbers)) for k, p in stage.phases.items()},
        examples={name: numbers(example) for name, example in stage.examples.items()},
        storages={name: (owner, numbers(size)) for name, (owner, size) in stage.storages.items()},
    )


def module_with_numbers(module: fx.GraphModule, numbers: Callable[[Any], Any]) -> fx.GraphModule:
    return graph_module(module, with_numbers(module.graph, numbers), module.__class__.__name__)
