"""Values that a model makes of sizes and Python numbers alone, such as positions: known while it is traced.

A tracer has no values of tensors, and so answers no question about them. Those of positions or causal masks follow from
shapes. With them a model decides as it does in eager: without padding it takes attention's own causal kernel, say, and
makes no mask. Followed are integers and truth values; whatever depends on the batch, on a parameter, on a buffer or on
random numbers is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zbfx._torch.operators import aten, schema_of, writes_arguments
from zbfx._torch.switches import TorchDispatchMode, without_modes
from zbfx._torch.tensors import pytree, storage_of

FOLLOWED_ELEMENTS = 2**20  # of a value, at most
ORIGINS = (aten.arange, aten.zeros, aten.ones, aten.full, aten.eye, aten.scalar_tensor)
UNSET = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
OF_TORCH = ("aten", "prims")
HOST = torch.device("cpu")


class KnownValues(TorchDispatchMode):
    """Computes beside the tracer what follows from sizes alone, on the CPU, and answers for it where a model reads a
    number or a truth value."""

    def __init__(self) -> None:
        super().__init__()
        self.values = WeakTensorKeyDictionary()  # of the tensors that the model holds

    def knows(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor in self.values

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_known = self.follows(func, args, kwargs, read)
        if is_known and gives_numbers(func):
            return self.value_of(func, args, kwargs)
        result = func(*args, **kwargs)
        # What is too large, or no whole number, is not computed at all.
        if is_known and all(is_followed(leaf) for leaf in pytree.tree_leaves(result)):
            self.note(result, self.value_of(func, args, kwargs))
        elif writes_arguments(func):
            self.forget(read)
        return result

    def follows(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: Sequence[Tensor]) -> bool:
        """Whether the operator's result has a known value. Operators of others may draw numbers, or have no kernel
        for CPUs."""
        if func.namespace not in OF_TORCH or any(
            isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves((args, kwargs))
        ):
            return False
        if func.overloadpacket in UNSET or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        return all(tensor in self.values for tensor in read) if read else func.overloadpacket in ORIGINS

    def value_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def known(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.values[leaf]
            return HOST if isinstance(leaf, torch.device) else leaf

        with without_modes():
            return func(*pytree.tree_map(known, args), **pytree.tree_map(known, kwargs))

    def note(self, result: Any, value: Any) -> None:
        for tensor, found in zip(pytree.tree_leaves(result), pytree.tree_leaves(value), strict=True):
            if isinstance(tensor, Tensor):
                self.values[tensor] = found

    def forget(self, written: Iterable[Tensor]) -> None:
        """Something unknown may be written into these, and so into all that share memory with them."""
        lost = {storage_of(self.values[tensor]) for tensor in written if tensor in self.values}
        if lost:
            for tensor in [t for t, value in self.values.items() if storage_of(value) in lost]:
                del self.values[tensor]


def gives_numbers(operator: Any) -> bool:
    """Whether an operator gives numbers or truth values of Python, and no tensors."""
    schema = schema_of(operator)
    kinds = [str(value.type) for value in schema.returns] if schema is not None else []
    return bool(kinds) and not any("Tensor" in kind for kind in kinds)


def is_followed(value: Any) -> bool:
    """Whether a value is followed, if it is known."""
    if not isinstance(value, Tensor):
        return True
    return not (value.dtype.is_floating_point or value.dtype.is_complex) and value.numel() <= FOLLOWED_ELEMENTS
