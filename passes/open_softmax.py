"""Joint -> Joint in which the logarithm of a softmax is made of its parts, for phases that are compiled.

Takes   a joint graph.
Gives   a copy in which `_log_softmax` is two differences: from the row's maximum, and from the logarithm of the row's
        sum of exponentials. Compiled phases take it apart in the same way, but each for itself: the forward would save
        the whole result, float32 for each entry of the vocabulary. In parts, recomputation saves two numbers a row, and
        the backward makes the rest from the logits while it reads them. The gradient of a cross entropy is the softmax
        less one at the target, times one number a row: its decomposition sums a row of zeros and that number.
Raises  nothing. Source: the decompositions of torch's inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from zbfx._torch.operators import CAST, LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, aten
from zbfx.graphs import Joint, copy_graph

CallBefore = Callable[..., fx.Node]  # of an operator, in front of a node


class RowReduction(IntEnum):
    """Of a loss over its rows, as operators have it."""

    NONE = 0
    MEAN = 1
    SUM = 2


def open_softmax(joint: Joint) -> Joint:
    """A copy of the joint graph without `_log_softmax`."""
    graph = copy_graph(joint.graph)
    for node in graph.find_nodes(op="call_function", target=LOG_SOFTMAX_BACKWARD):
        if is_of_cross_entropy(node):
            replace_with(node, gradient_of_logits(node, partial(made, node)))
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default):
        if not node.users:
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=LOG_SOFTMAX):
        replace_with(node, logarithm(node, partial(made, node)))
    graph.lint()
    return replace(joint, graph=graph)


def logarithm(node: fx.Node, call: CallBefore) -> fx.Node:
    """The logarithm of a softmax in parts."""
    logits, dim, _ = cast(tuple[Any, ...], node.args)
    dtype = node.meta["val"].dtype
    computed = torch.promote_types(dtype, torch.float32)  # half precision cannot hold the sum
    if logits.meta["val"].dtype is not computed:
        logits = call(CAST, logits, dtype=computed)
    shifted = call(aten.sub.Tensor, logits, call(aten.amax.default, logits, [dim], True))
    total = call(aten.sum.dim_IntList, call(aten.exp.default, shifted), [dim], True)
    found = call(aten.sub.Tensor, shifted, call(aten.log.default, total))
    return found if dtype is computed else call(CAST, found, dtype=dtype)


def is_of_cross_entropy(node: fx.Node) -> bool:
    """Whether the gradient of a logarithm of a softmax comes from its entries at integer targets alone, in rows whose
    length is known."""
    gradient, logarithms, dim, dtype = cast(tuple[Any, ...], node.args)
    if not isinstance(gradient, fx.Node) or gradient.target is not aten.nll_loss_backward.default:
        return False
    value = logarithms.meta["val"]
    is_wide = value.dtype is dtype and torch.promote_types(dtype, torch.float32) is dtype
    return value.dim() == 2 and dim in (1, -1) and isinstance(value.shape[1], int) and is_wide


def gradient_of_logits(node: fx.Node, call: CallBefore) -> fx.Node:
    """softmax * row less `row` at the target, where `row` is the gradient of the row's loss, 0 if that is ignored."""
    gradient, logarithms, *_ = cast(tuple[Any, ...], node.args)
    row, _, targets, weight, reduction, ignored, total = gradient.args
    if reduction == RowReduction.MEAN:
        row = call(aten.div.Tensor, row, total)
    elif reduction == RowReduction.NONE:
        row = call(aten.unsqueeze.default, row, 1)
    target = call(aten.unsqueeze.default, targets, 1)
    is_counted = call(aten.ne.Scalar, target, ignored)
    if weight is not None:
        index = call(aten.where.ScalarOther, is_counted, target, 0)
        row = call(aten.mul.Tensor, row, call(aten.index.Tensor, weight, [index]))
    row = call(aten.where.ScalarOther, is_counted, row, 0.0)
    value = logarithms.meta["val"]
    entries = call(aten.arange.default, value.shape[1], dtype=torch.int64, device=value.device)
    at_target = call(aten.where.ScalarOther, call(aten.eq.Tensor, entries, target), row, 0.0)
    return call(aten.sub.Tensor, call(aten.mul.Tensor, call(aten.exp.default, logarithms), row), at_target)


def made(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call in front of a node, with that node's place in the model."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    values = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
    node.meta = {**before.meta, "val": target(*values[0], **values[1])}
    return node


def replace_with(node: fx.Node, found: fx.Node) -> None:
    node.replace_all_uses_with(found)
    node.graph.erase_node(node)
