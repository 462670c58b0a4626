"""What a node of a graph is (a view, random, counted by torch), how many bytes its value takes, and who owns them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from zbfx._torch.operators import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CAST,
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    CUDNN_ATTENTION,
    CUDNN_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    NORMS,
    UNDECLARED_VIEWS,
    aten,
    is_function_of_arguments,
    schema_of,
)
from zbfx.passes.operators import ADD_PRODUCT


@dataclass(frozen=True)
class CountedAs:
    """The operator whose formula counts the operations of another one, and how many arguments that formula reads."""

    operator: Any
    argument_count: int | None = None  # all of them, and those given by name


COUNTED_AS: Mapping[Any, CountedAs] = {
    CPU_ATTENTION: CountedAs(FLASH_ATTENTION, 3),
    CPU_ATTENTION_BACKWARD: CountedAs(FLASH_ATTENTION_BACKWARD, 4),
    aten.addmm_.default: CountedAs(aten.addmm),
    ADD_PRODUCT: CountedAs(aten.addmm),
}

# Attention, with the position of its queries; keys and values follow. Each of their heads may serve several of queries.
QUERIES_AT: Mapping[Any, int] = {
    **dict.fromkeys((*ATTENTION, CUDNN_ATTENTION), 0),
    **dict.fromkeys((*ATTENTION_BACKWARD, CUDNN_ATTENTION_BACKWARD), 1),
}


def is_statistic(node: fx.Node) -> bool:
    """Whether the node's value is a statistic of a norm."""
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    return isinstance(source, fx.Node) and source.target in NORMS and index in (1, 2)


def is_view(node: fx.Node) -> bool:
    """Whether the node's value shares the storage of its first input."""
    if node.op != "call_function" or not (node.args and isinstance(node.args[0], fx.Node)):
        return False  # an op on a plain number, like the conjugate of 1j, makes a tensor of its own
    if node.target in UNDECLARED_VIEWS:
        return True
    if node.target is operator.getitem:
        return is_view(node.args[0])
    schema = schema_of(node.target)
    alias = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return alias is not None and not alias.is_write


def is_widening(node: fx.Node) -> bool:
    """Whether a node casts floating-point numbers to a dtype that holds all of them, and does nothing else."""
    if node.target is not CAST:
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    floats = before.is_floating_point() and after.is_floating_point() and before.device == after.device
    return floats and torch.promote_types(before.dtype, after.dtype) is after.dtype


def is_random(node: fx.Node) -> bool:
    return draws(node.target, node.args, node.kwargs)


def is_repeatable(node: fx.Node) -> bool:
    """Whether the node computes the same from the same inputs whenever it runs. Operators of other libraries may draw
    random numbers, or read a state of theirs, without saying so."""
    return is_function_of_arguments(node.target) and not is_random(node)


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Take out of a graph what nothing reads, random ops too: no draw depends on another one."""
    graph.eliminate_dead_code(lambda node: node.is_impure() and not is_random(node))


def draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers when it is called with these arguments."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    schema = schema_of(operator)
    assert schema is not None, "operators have tags"
    dropout = [position for position, argument in enumerate(schema.arguments) if argument.name == "dropout_p"]
    if not dropout:
        return True
    # Attention is tagged for its dropout, which is mostly off.
    return bool(args[dropout[0]] if dropout[0] < len(args) else kwargs.get("dropout_p", 0.0))


def flop_formula(node: fx.Node) -> Any:
    """The formula by which torch counts the operations of a node's op; None for an op that it does not count."""
    return flop_registry.get(counted_as(node).operator)


def counted_as(node: fx.Node) -> CountedAs:
    """The operator whose formula counts a node's operations: itself, if no other is listed."""
    return COUNTED_AS.get(node.target, CountedAs(getattr(node.target, "overloadpacket", None)))


def hint(size: Any) -> int:
    """A size as a number: for a symbol, its size in the traced example. That is exact enough to choose by."""
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def expression(size: Any) -> Any:
    """A size as a number, or as a sympy expression where it is a symbol."""
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def flops(node: fx.Node, size: Callable[[Any], Any] = hint) -> Any:
    """Floating-point operations of matrix products, convolutions and attention; 0 for everything else."""
    formula = flop_formula(node)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    argument_count = counted_as(node).argument_count
    if argument_count is not None:
        args, kwargs = args[:argument_count], {}
    if node.target in QUERIES_AT:
        args = tuple(with_all_heads(args, QUERIES_AT[node.target]))
    return size(formula(*args, **kwargs, out_val=node.meta["val"]))


def with_all_heads(args: Sequence[Any], queries_at: int) -> Sequence[Any]:
    """The arguments of attention with shapes of keys and values that have a head for each head of queries: formulas of
    torch 2.11 know no others."""
    before, query, key_and_value = args[:queries_at], args[queries_at], args[queries_at + 1 : queries_at + 3]
    whole = [(*value.shape[:1], query.shape[1], *value.shape[2:]) for value in key_and_value]
    return [*before, query, *map(torch.Size, whole), *args[queries_at + 3 :]]


def tensors(value: Any) -> Iterable[Tensor]:
    """The tensors of a node's value, which is a tensor, or a tuple or list with tensors in it."""
    entries = value if isinstance(value, tuple | list) else (value,)
    return [entry for entry in entries if isinstance(entry, Tensor)]


def value_bytes(node: fx.Node, size: Callable[[Any], Any] = hint) -> Any:
    """Bytes of the node's value, also where it is a view and another node owns them."""
    return sum(size(tensor.numel()) * tensor.element_size() for tensor in tensors(node.meta["val"]))


def storage_owner(node: fx.Node) -> fx.Node:
    """The node that allocated the storage behind this node's value. All views of one storage have one owner."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def stored_bytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the storages behind these values, each storage once."""
    return sum(value_bytes(owner) for owner in {storage_owner(node) for node in nodes})


def storage_bytes(tensor: Tensor) -> int:
    """Bytes from the tensor's first entry to its last, gaps included, as an operator allocates them."""
    if not tensor.numel():
        return 0
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(extent) * tensor.element_size()
