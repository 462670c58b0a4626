"""Phase graph -> phase graph with operators of zbfx where torch's inductor would change what an operator does.

Takes   the graph of a phase that inductor will compile.
Gives   a copy with `zbfx::addmm_` and `zbfx::check` for `addmm_` and checks of values. Inductor would copy a gradient
        to add to it and copy it back, 3 % of a GPT's F, B and W; a check would become part of a kernel, and no call
        could leave it out.
Raises  nothing. Source: ours; both were found by profiling.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from zbfx import _torch
from zbfx._torch import aten
from zbfx.graphs import copy_graph

SEALED_OPS = torch.library.Library("zbfx", "FRAGMENT")
SEALED_OPS.define("addmm_(Tensor(a!) gradient, Tensor left, Tensor right) -> ()")
SEALED_OPS.define("check(Tensor condition, str message='a check failed') -> ()")
fx.has_side_effect(torch.ops.zbfx.check.default)  # fx would take it for dead code

OURS = {
    aten.addmm_.default: torch.ops.zbfx.addmm_.default,
    _torch.ASSERT: torch.ops.zbfx.check.default,
    _torch.ASSERT_WITH_MESSAGE: torch.ops.zbfx.check.default,
}


@torch.library.impl(SEALED_OPS, "addmm_", "CompositeExplicitAutograd")
def add_product(gradient: Tensor, left: Tensor, right: Tensor) -> None:
    gradient.addmm_(left, right)


@torch.library.impl(SEALED_OPS, "check", "CompositeExplicitAutograd")
def assert_true(condition: Tensor, message: str = "a check failed") -> None:
    _torch.ASSERT_WITH_MESSAGE(condition, message)


def sealed(graph: fx.Graph) -> fx.Graph:
    """A copy of a phase's graph with operators that inductor leaves alone."""
    graph = copy_graph(graph)
    for node in [node for node in graph.nodes if node.target in OURS and not node.users]:
        with graph.inserting_before(node):
            graph.call_function(OURS[node.target], node.args).meta = dict(node.meta)
        graph.erase_node(node)
    return graph
