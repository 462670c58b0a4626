"""What a node of a joint graph is: view, random, heavy; what it depends on; how many bytes its value takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from zbfx import _torch
from zbfx._torch import aten


@dataclass(frozen=True)
class CountedAs:
    """The operator whose formula counts the operations of another one, and how many arguments that formula reads."""

    operator: Any
    argument_count: int | None = None  # all of them, and those given by name


COUNTED_AS: Mapping[Any, CountedAs] = {
    _torch.CPU_ATTENTION: CountedAs(_torch.FLASH_ATTENTION, 3),
    _torch.CPU_ATTENTION_BACKWARD: CountedAs(_torch.FLASH_ATTENTION_BACKWARD, 4),
    aten.addmm_.default: CountedAs(aten.addmm),
}


def is_view(node: fx.Node) -> bool:
    """Whether the node's value shares the storage of its first input."""
    if node.op != "call_function" or not (node.args and isinstance(node.args[0], fx.Node)):
        return False  # a view of a number, like the conjugate of 1j, is a tensor of its own
    if node.target in _torch.UNDECLARED_VIEWS:
        return True
    if node.target is operator.getitem:
        return is_view(node.args[0])
    schema = _torch.schema_of(node.target)
    if schema is None or not schema.arguments or schema.arguments[0].alias_info is None:
        return False
    return not schema.arguments[0].alias_info.is_write


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = _torch.schema_of(node.target)
    assert schema is not None, "operators have tags"
    dropout = [position for position, argument in enumerate(schema.arguments) if argument.name == "dropout_p"]
    if not dropout:
        return True
    # Attention is tagged for its dropout, which is mostly off.
    return bool(node.args[dropout[0]] if dropout[0] < len(node.args) else node.kwargs.get("dropout_p", 0.0))


def flop_formula(node: fx.Node) -> Any:
    """The formula by which torch counts the operations of a node's op; None for an op that it does not count."""
    return flop_registry.get(counted_as(node).operator)


def counted_as(node: fx.Node) -> CountedAs:
    return COUNTED_AS.get(node.target, CountedAs(getattr(node.target, "overloadpacket", None)))


def hint(size: Any) -> int:
    """A size as a number: where it is a symbol, that of the shapes that were traced. Enough to choose by."""
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
    return size(formula(*args, **kwargs, out_val=node.meta["val"]))


def tensors(value: Any) -> Iterable[Tensor]:
    """The tensors of a node's value: itself, or the entries of a tuple or list."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list):
        return [entry for entry in value if isinstance(entry, Tensor)]
    return ()


def value_bytes(node: fx.Node, size: Callable[[Any], Any] = hint) -> Any:
    """Bytes of the node's value, as if it owned them."""
    return sum(size(tensor.numel()) * tensor.element_size() for tensor in tensors(node.meta["val"]))


def storage_owner(node: fx.Node) -> fx.Node:
    """The node that allocated the storage of this node's value: two views of one storage have one owner."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def stored_bytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the storages behind these values, each storage once."""
    return sum(value_bytes(owner) for owner in {storage_owner(node) for node in nodes})


def storage_bytes(tensor: Tensor) -> int:
    """Bytes from the tensor's first entry to its last: what an operator allocates for it."""
    if not tensor.numel():
        return 0
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(extent) * tensor.element_size()
