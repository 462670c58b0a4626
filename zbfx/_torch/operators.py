"""Operators of graphs: names for those that zbfx treats apart, the arguments that they take, and those that they write.

with_effects, _linalg_check_errors  2.11.0, 2.13.0   operators in that graph that act beside their results
aten._assert_async, _to_copy, ...   2.11.0, 2.13.0   other operators in that graph
OpOverload, ._schema, .namespace    2.11.0, 2.13.0   an operator; what it takes and gives; whose operator it is
_c10d_functional.wait_tensor        2.11.0, 2.13.0   the end of a collective in a graph
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import with_effects as with_effects

from zbfx._torch.tensors import pytree

Operator = torch._ops.OpOverload
aten = torch.ops.aten  # the operators that traced graphs are made of
CHECKING_OPERATORS = {aten._linalg_check_errors.default}  # operators with effects that only check values
ASSERT, ASSERT_WITH_MESSAGE = aten._assert_async.default, aten._assert_async.msg
CAST = aten._to_copy.default
CTC_LOSS, CTC_LOSS_BACKWARD = aten._ctc_loss, aten._ctc_loss_backward
NORMS = {  # their second and third results are the statistics that they normalised by
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
}
UNDECLARED_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default}  # views whose schemas do not say so
CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH_ATTENTION = aten._scaled_dot_product_flash_attention
FLASH_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_backward
ATTENTION = (CPU_ATTENTION, FLASH_ATTENTION.default, aten._scaled_dot_product_efficient_attention.default)
ATTENTION_BACKWARD = (
    CPU_ATTENTION_BACKWARD,
    FLASH_ATTENTION_BACKWARD.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
UNCHECKED = {  # operators that reach memory which their arguments do not bound
    aten.from_file,
    aten.set_,
    aten._unsafe_index,
    aten._unsafe_index_put,
    aten._unsafe_masked_index,
    aten._unsafe_masked_index_put_accumulate,
}
LOG_SOFTMAX = aten._log_softmax.default
LOG_SOFTMAX_BACKWARD = aten._log_softmax_backward_data.default
CUDNN_ATTENTION = aten._scaled_dot_product_cudnn_attention.default
CUDNN_ATTENTION_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
NAMESPACES = ("aten", "prims", "zbfx")  # of the operators that compute from their arguments alone, torch's and ours
COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")


def schema_of(operator: Any) -> torch.FunctionSchema | None:
    """The arguments and results of an operator of a graph; None for a plain function."""
    schema: torch.FunctionSchema | None = getattr(operator, "_schema", None)
    return schema


def writes_arguments(operator: Any) -> bool:
    """Whether an operator writes into some of its arguments."""
    return bool(operator._schema.is_mutable)


def written_tensors(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operator writes into."""
    found = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def is_collective(operator: Any) -> bool:
    """Whether a function of a graph is an operator that several processes call together."""
    return getattr(operator, "namespace", None) in COLLECTIVE_NAMESPACES


def is_function_of_arguments(operator: Any) -> bool:
    """Whether a function of a graph gives what its arguments say, and, where it is tagged as random, chance."""
    known = getattr(operator, "namespace", None) in (None, *NAMESPACES)
    return known or is_collective(operator)


def group_arguments(operator: Any) -> set[int | str]:
    """The positions and names of the arguments of a collective operator that name a group of processes."""
    if not is_collective(operator):
        return set()
    named = enumerate(operator._schema.arguments)
    return {place for index, argument in named if argument.name == "group_name" for place in (index, argument.name)}


wait_tensor = torch.ops._c10d_functional.wait_tensor.default


def waited(collective: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The result of a functional collective once it is there."""
    result: Tensor = wait_tensor(collective(*args, **kwargs))
    return result
