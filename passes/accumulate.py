"""Phase graph -> phase graph that accumulates gradients inside the matrix products that make them.

Takes   the graph of a phase, in which `add_` adds each contribution to the gradient of a parameter.
Gives   a copy in which `add_(gradient, mm(a, b))` is `addmm_(gradient, a, b)`. The product needs no memory of its own,
        and no second pass over the gradient. Transposes between product and sum move to the factors.
Raises  nothing. Source: gemm of BLAS, which computes C := A B + C.
"""

from __future__ import annotations

from torch import fx

from zbfx._torch import aten
from zbfx.graphs import copy_graph


def accumulate_in_products(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph, with each product that one `add_` alone reads fused into that `add_`."""
    graph = copy_graph(graph)
    for addition in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        gradient, term = addition.args
        transposes = []
        while term.target is aten.t.default and len(term.users) == 1:
            transposes.append(term)
            term = term.args[0]
        if term.target is not aten.mm.default or len(term.users) != 1:
            continue
        left, right = term.args
        if len(transposes) % 2:  # (a b)^T = b^T a^T
            with graph.inserting_before(addition):
                left, right = (transposed(graph, factor) for factor in (right, left))
        with graph.inserting_before(addition):
            fused = graph.call_function(aten.addmm_.default, (gradient, left, right))
        fused.meta = dict(term.meta)
        for dead in (addition, *transposes, term):
            graph.erase_node(dead)
    graph.eliminate_dead_code()
    graph.lint()
    return graph


def transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The transpose of a matrix; for a matrix that is a transpose itself, its source."""
    if node.target is aten.t.default:
        return node.args[0]  # type: ignore[return-value]
    result = graph.call_function(aten.t.default, (node,))
    result.meta = {**node.meta, "val": node.meta["val"].t()}
    return result
