"""Phase graph -> the same with ops of ours for those of which inductor makes something else."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from zbfx import _torch
from zbfx._torch import aten
from zbfx.graphs import copy_graph

library = torch.library.Library("zbfx", "FRAGMENT")
library.define("addmm_(Tensor(a!) gradient, Tensor left, Tensor right) -> ()")
library.define("check(Tensor condition, str message='a check failed') -> ()")
fx.has_side_effect(torch.ops.zbfx.check.default)  # else graphs leave it out

OURS = {
    aten.addmm_.default: torch.ops.zbfx.addmm_.default,
    _torch.ASSERT: torch.ops.zbfx.check.default,
    _torch.ASSERT_WITH_MESSAGE: torch.ops.zbfx.check.default,
}


@torch.library.impl(library, "addmm_", "CompositeExplicitAutograd")
def add_product(gradient: Tensor, left: Tensor, right: Tensor) -> None:
    gradient.addmm_(left, right)


@torch.library.impl(library, "check", "CompositeExplicitAutograd")
def check(condition: Tensor, message: str = "a check failed") -> None:
    _torch.ASSERT_WITH_MESSAGE(condition, message)


def sealed(graph: fx.Graph) -> fx.Graph:
    """A copy of a phase's graph with ops that inductor leaves alone.

    Of an `addmm_` it makes a new gradient, from a copy of the old one, which it copies back: 3 % of the time of a GPT's
    F, B and W. A check becomes part of a kernel, which no call could leave out then.
    """
    graph = copy_graph(graph)
    for node in [node for node in graph.nodes if node.target in OURS and not node.users]:
        with graph.inserting_before(node):
            graph.call_function(OURS[node.target], node.args).meta = dict(node.meta)
        graph.erase_node(node)
    return graph
