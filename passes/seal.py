"""Phase graph -> phase graph with operators of zbfx where torch's inductor would change what an operator does.

Takes   the graph of a phase that inductor will compile.
Gives   a copy with `zbfx::addmm_` and `zbfx::check` for `addmm_` and checks of values. Inductor would copy a gradient
        to add to it and copy it back, 3 % of a GPT's F, B and W; a check would become part of a kernel, and no call
        could leave it out. The gradient of an embedding is `zbfx::add_rows_`: dense, as large as the vocabulary, it
        would be 1 % of the F, B and W of a Llama.
Raises  nothing. Source: ours; all were found by profiling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from zbfx._torch.operators import ASSERT, ASSERT_WITH_MESSAGE, aten
from zbfx.graphs import copy_graph
from zbfx.passes.nodes import is_widening
from zbfx.passes.operators import ADD_PRODUCT, ADD_ROWS, CHECK

ASSERTS = {ASSERT: CHECK, ASSERT_WITH_MESSAGE: CHECK}
OURS = {aten.addmm_.default: ADD_PRODUCT, **ASSERTS}


def with_operators(graph: fx.Graph, others: Mapping[Any, Any]) -> fx.Graph:
    """A copy of a phase's graph with other operators in the place of those without results."""
    graph = copy_graph(graph)
    for node in [node for node in graph.nodes if node.target in others and not node.users]:
        with graph.inserting_before(node):
            graph.call_function(others[node.target], node.args).meta = dict(node.meta)
        graph.erase_node(node)
    return graph


def has_asserts(graph: fx.Graph) -> bool:
    """Whether a phase checks values of the model's."""
    return any(graph.find_nodes(op="call_function", target=target) for target in ASSERTS)


def sealed(graph: fx.Graph) -> fx.Graph:
    """A copy of a phase's graph with operators that inductor leaves alone."""
    graph = with_operators(graph, OURS)
    for addition in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        add_embedded_rows(graph, addition)
    return graph


def add_embedded_rows(graph: fx.Graph, addition: fx.Node) -> None:
    """Add the rows of an embedding's gradient to a parameter's, if that is what an addition adds."""
    gradient, term = addition.args
    assert isinstance(term, fx.Node), "a contribution"
    dense = term.all_input_nodes[0] if is_widening(term) else term
    if dense.target is not aten.embedding_dense_backward.default or {*term.users, *dense.users} - {addition, term}:
        return
    rows, indices, _, padding_index, by_frequency = dense.args
    if by_frequency:
        return
    with graph.inserting_before(addition):
        graph.call_function(ADD_ROWS, (gradient, rows, indices, padding_index))
    for dead in dict.fromkeys((addition, term, dense)):
        graph.erase_node(dead)
