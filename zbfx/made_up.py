"""Values to call phases with before there are real ones: to time them, and to load their code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zbfx.graphs import Phase, copy_graph
from zbfx.passes.nodes import is_view

aten = torch.ops.aten

# Of values outside of their domain these stop a GPU for good.
OF_PROBABILITIES = {
    aten.bernoulli,
    aten.bernoulli_,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binomial,
    aten.multinomial,
    aten.poisson,
}


def made_up(value: Any, device: torch.device, *, positive: bool = False) -> Any:
    """A real tensor of a fake one's size, strides and dtype: small random floats, zeros otherwise (safe as indices)."""
    if not isinstance(value, Tensor):
        return value
    spans = [(size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True)]
    memory = torch.zeros(1 + sum(spans) if value.numel() else 0, dtype=value.dtype, device=device)
    if value.is_floating_point():
        memory.normal_(std=0.02)
    if positive:
        memory.abs_()
    return memory.as_strided(value.size(), value.stride())  # entries may share memory, as in an expanded tensor


def probabilities(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What any of these nodes takes for probabilities, and what those are views of."""
    found: set[fx.Node] = set()
    for node in nodes:
        if getattr(node.target, "overloadpacket", None) in OF_PROBABILITIES:
            for source in node.all_input_nodes:
                found.add(source)
                while is_view(source):
                    source = source.all_input_nodes[0]
                    found.add(source)
    return found


def arguments_of(graph: fx.Graph, device: torch.device) -> list[Callable[[], Any]]:
    """What makes each argument of a phase's graph."""
    positive = probabilities(graph.nodes)

    def maker(node: fx.Node) -> Callable[[], Any]:
        if "val" not in node.meta:  # a seed
            return lambda: 0
        return lambda: made_up(node.meta["val"], device, positive=node in positive)

    return [maker(node) for node in graph.find_nodes(op="placeholder")]


def made_up_storage(values: Sequence[Tensor], size: int, device: torch.device) -> list[Tensor]:
    """Tensors like these fake ones in one storage of so many bytes, as theirs have; zeros."""
    memory = torch.zeros(size, dtype=torch.uint8, device=device)

    def like(value: Tensor) -> Tensor:
        entries = memory[: size // value.element_size() * value.element_size()].view(value.dtype)
        return entries.as_strided(value.size(), value.stride(), value.storage_offset())

    return [like(value) for value in values]


def argument_keys(phase: Phase) -> list[Any]:
    """What tells the arguments of a stage's phases apart: equal in two phases that get the same tensor."""
    gradients = [("gradient", name) for name in phase.gradients]
    return [*phase.ports, *phase.values, *gradients, *(["seed"] if phase.is_random else [])]


def without_checks(phase: Phase) -> Phase:
    """The phase without checks of values, which made-up ones would not pass. The same phase if it has none: what is
    compiled for one would be compiled again for its copy."""
    if not any(map(is_check, phase.module.graph.nodes)):
        return phase
    graph = copy_graph(phase.module.graph)
    for node in graph.nodes:
        if is_check(node):
            graph.erase_node(node)
    return replace(phase, module=fx.GraphModule(phase.module, graph, phase.name))


def is_check(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.users and node.meta.get("val", node) is None
