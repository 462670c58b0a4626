"""The tokens that order effects, taken out of a traced graph.

The tracer threads a token, which is an input and an output of the graph, through operators that do more than compute
results. Those that only check values, as torch.linalg does, need no order among them. Without tokens, each of these is
a plain node of the stage that it belongs to.
"""

from __future__ import annotations

import operator

from torch import fx

from zbfx import _torch
from zbfx.errors import TraceError
from zbfx.trace.refusals import UNKNOWN_LINE

fx.has_side_effect(_torch.ASSERT)  # else fx takes it for dead code, as it does not the one with a message


def without_tokens(module: fx.GraphModule) -> fx.GraphModule:
    """Take the tokens out of the graph of a module, and return that module.

    Raises `TraceError` for an operator that does more than check values.
    """
    graph, output = module.graph, module.graph.output_node()
    for node in graph.find_nodes(op="call_function", target=_torch.with_effects):
        token, target, *args = node.args
        if target not in _torch.CHECKING_OPERATORS:
            raise TraceError(
                f"the model runs {target}, which acts beside its results (prints, calls an object), at "
                f"{node.meta.get('stack_trace') or UNKNOWN_LINE}: a pipeline runs microbatches and stages in an order "
                f"of its own. Take it out of the model"
            )
        with graph.inserting_before(node):
            check = graph.call_function(target, tuple(args), node.kwargs)
        check.meta = {**node.meta, "val": None}
        for entry in list(node.users):
            assert (entry.target, entry.args[1]) == (operator.getitem, 0), "a check has no result"
            entry.replace_all_uses_with(token)
            graph.erase_node(entry)
        graph.erase_node(node)
    pairs = list(zip(output.args[0], output.meta["desc"], strict=True))  # type: ignore[arg-type]
    kept = [pair for pair in pairs if not isinstance(pair[1], _torch.TOKENS)]
    output.args, output.meta["desc"] = (tuple(value for value, _ in kept),), [found for _, found in kept]
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], _torch.TOKENS):
            graph.erase_node(node)
    module.recompile()
    return module
