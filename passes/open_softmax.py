"""Joint -> Joint in which the logarithm of a softmax is made of its parts, for phases that are compiled.

Takes   a joint graph.
Gives   a copy in which `_log_softmax` is two differences: from the row's maximum, and from the logarithm of the row's
        sum of exponentials. Compiled phases take it apart in the same way, but each for itself: the forward would save
        the whole result, float32 for each entry of the vocabulary. In parts, recomputation saves two numbers a row, and
        the backward makes the rest from the logits while it reads them.
Raises  nothing. Source: the decomposition of torch's inductor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zbfx._torch.operators import CAST, LOG_SOFTMAX, aten
from zbfx.graphs import Joint, copy_graph


def open_softmax(joint: Joint) -> Joint:
    """A copy of the joint graph without `_log_softmax`."""
    graph = copy_graph(joint.graph)
    for node in graph.find_nodes(op="call_function", target=LOG_SOFTMAX):
        logits, dim, _ = node.args
        dtype = node.meta["val"].dtype
        computed = torch.promote_types(dtype, torch.float32)  # half precision cannot hold the sum

        def call(target: Any, *args: Any, node: fx.Node = node, **kwargs: Any) -> fx.Node:
            with graph.inserting_before(node):
                made = graph.call_function(target, args, kwargs)
            values = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
            made.meta = {**node.meta, "val": target(*values[0], **values[1])}
            return made

        if logits.meta["val"].dtype is not computed:
            logits = call(CAST, logits, dtype=computed)
        shifted = call(aten.sub.Tensor, logits, call(aten.amax.default, logits, [dim], True))
        total = call(aten.sum.dim_IntList, call(aten.exp.default, shifted), [dim], True)
        found = call(aten.sub.Tensor, shifted, call(aten.log.default, total))
        node.replace_all_uses_with(found if dtype is computed else call(CAST, found, dtype=dtype))
        graph.erase_node(node)
    graph.lint()
    return replace(joint, graph=graph)
