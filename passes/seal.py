"""Phase graph -> phase graph with operators of zbfx where torch's inductor would change what an operator does.

Takes   the graph of a phase that inductor will compile.
Gives   a copy with `zbfx::addmm_` and `zbfx::check` for `addmm_` and checks of values. Inductor would copy a gradient
        to add to it and copy it back, 3 % of a GPT's F, B and W; a check would become part of a kernel, and no call
        could leave it out.
Raises  nothing. Source: ours; both were found by profiling.
"""

from __future__ import annotations

from torch import fx

from zbfx import _torch
from zbfx._torch import aten
from zbfx.graphs import copy_graph
from zbfx.passes.operators import ADD_PRODUCT, CHECK

OURS = {aten.addmm_.default: ADD_PRODUCT, _torch.ASSERT: CHECK, _torch.ASSERT_WITH_MESSAGE: CHECK}


def sealed(graph: fx.Graph) -> fx.Graph:
    """A copy of a phase's graph with operators that inductor leaves alone."""
    graph = copy_graph(graph)
    for node in [node for node in graph.nodes if node.target in OURS and not node.users]:
        with graph.inserting_before(node):
            graph.call_function(OURS[node.target], node.args).meta = dict(node.meta)
        graph.erase_node(node)
    return graph
