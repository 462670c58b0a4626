"""Phase graph -> phase graph that accumulates gradients inside the matrix products that make them.

Takes   the graph of a phase, in which `add_` adds each contribution to the gradient of a parameter.
Gives   a copy in which `add_(gradient, mm(a, b))` is `addmm_(gradient, a, b)`. The product needs no memory of its own,
        and no second pass over the gradient. Transposes between product and sum move to the factors. A cast to the
        gradient's dtype that keeps every value goes: `add_` reads the narrower term, and rounds the sum once.
        The product of a gradient with a wider dtype is fused where the device multiplies into that dtype.
Raises  nothing. Source: gemm of BLAS, which computes C := A B + C.
"""

from __future__ import annotations

from torch import fx

from zbfx._torch.operators import aten
from zbfx.graphs import copy_graph
from zbfx.passes.nodes import is_widening
from zbfx.passes.operators import ADD_PRODUCT, widens_in_products


def accumulate_in_products(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph, with each product that one `add_` alone reads fused into that `add_`."""
    graph = copy_graph(graph)
    for addition in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        gradient, term = addition.args
        passed, transposes, widening = [], 0, None
        while len(term.users) == 1 and (term.target is aten.t.default or is_widening(term)):
            passed.append(term)
            transposes += term.target is aten.t.default
            widening = term if is_widening(term) else widening
            term = term.args[0]
        if widening is not None:
            widening.replace_all_uses_with(widening.args[0])
            passed.remove(widening)
            graph.erase_node(widening)
        if term.target is not aten.mm.default or len(term.users) != 1:
            continue
        left, right = term.args
        sum_value, factor = gradient.meta["val"], left.meta["val"]
        if sum_value.dtype is not factor.dtype and not widens_in_products(sum_value, factor):
            continue
        if transposes % 2:  # (a b)^T = b^T a^T
            with graph.inserting_before(addition):
                left, right = (transposed(graph, factor) for factor in (right, left))
        fusion = aten.addmm_.default if sum_value.dtype is factor.dtype else ADD_PRODUCT
        with graph.inserting_before(addition):
            fused = graph.call_function(fusion, (gradient, left, right))
        fused.meta = dict(term.meta)
        for dead in (addition, *passed, term):
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
