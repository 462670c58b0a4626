"""How a call `step(*inputs, *targets, **kwargs)` becomes the flat tensors of each microbatch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from zbfx._torch import pytree
from zbfx.errors import InputError, listed

SHORTER = "Leave out a last batch that is shorter (DataLoader(..., drop_last=True))"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a microbatch."""

    name: str  # its path in the call
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # what the graph reads; a batch with other strides is copied
    dtype: torch.dtype
    batch_dim: int | None  # the dimension at which a batch is cut; None where every microbatch gets the whole tensor


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the call that is no tensor. Its value is part of the traced graph."""

    name: str
    value: Any


@dataclass(frozen=True)
class Signature:
    """The structure of a call, seen on one example microbatch."""

    structure: Any  # pytree spec of (positional arguments, keyword arguments)
    leaves: tuple[TensorSpec | Constant, ...]
    input_count: int  # the first positional arguments are the model's, the others the loss function's

    @classmethod
    def of(cls, inputs: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> Signature:
        """The signature of the call with these arguments. Tensors as long as the first one are cut along dimension 0;
        every microbatch gets the others whole."""
        named, structure = pytree.tree_flatten_with_path(((*inputs, *targets), dict(kwargs)))
        for path, leaf in named:
            if isinstance(leaf, Tensor):
                refuse_sparse(path_name(path, len(inputs)), leaf)
        sizes = [leaf.shape[0] for _, leaf in named if isinstance(leaf, Tensor) and leaf.ndim]
        leaves = tuple(
            TensorSpec(
                path_name(path, len(inputs)),
                tuple(leaf.shape),
                dense_stride(leaf),
                leaf.dtype,
                0 if leaf.ndim and leaf.shape[0] == sizes[0] else None,
            )
            if isinstance(leaf, Tensor)
            else Constant(path_name(path, len(inputs)), independent_copy(leaf))
            for path, leaf in named
        )
        return cls(structure, leaves, len(inputs))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    def batch_shapes(self, microbatches: int) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of the tensors of a batch of microbatches of the example's shapes."""
        return {
            spec.name: spec.shape if spec.batch_dim is None else (spec.shape[0] * microbatches, *spec.shape[1:])
            for spec in self.tensors
        }

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call. Raises `InputError` if its structure or its constants are not those of the example."""
        try:
            values = self.structure.flatten_up_to((tuple(args), dict(kwargs)))  # dicts by key, in any order
        except ValueError:
            named, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
            expected = listed(leaf.name for leaf in self.leaves)
            found = listed(path_name(path, self.input_count) for path, _ in named)
            raise InputError(
                f"step takes the arguments of the example microbatch: expected ({expected}), found ({found})"
            ) from None
        tensors = []
        for leaf, value in zip(self.leaves, values, strict=True):
            if isinstance(leaf, TensorSpec):
                if not isinstance(value, Tensor):
                    raise InputError(
                        f"{leaf.name} was a tensor in the example microbatch; found {type(value).__name__}. "
                        f"Pass a tensor, or compile again with this value"
                    )
                refuse_sparse(leaf.name, value)
                tensors.append(value)
            elif type(leaf.value) is not type(value) or not same_value(leaf.value, value):
                raise InputError(
                    f"{leaf.name} was {leaf.value!r} when the model was traced and is part of the graph; found "
                    f"{value!r}. Pass it as a tensor, or compile again with this value"
                )
        return tensors

    def unflatten(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of a call with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorSpec) else leaf.value for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def microbatches_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """How many microbatches of the example's shapes a batch has. None if its shapes do not divide so."""
        counts: set[int | None] = set()
        for spec, tensor in zip(self.tensors, self.flatten(args, kwargs), strict=True):
            shape, size = tuple(tensor.shape), spec.shape[0] if spec.batch_dim == 0 else 0
            if spec.batch_dim is None:
                counts |= set() if shape == spec.shape else {None}
            else:
                fits = shape[1:] == spec.shape[1:] and shape and shape[0] and size and shape[0] % size == 0
                counts.add(shape[0] // size if fits else None)
        return counts.pop() if len(counts) == 1 else (None if counts else 1)

    def first_microbatch(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a batch's first microbatch. Raises `InputError` if the batch does not divide."""
        first = []
        pairs = list(zip(self.tensors, self.flatten(args, kwargs), strict=True))
        refuse_uncut(pairs, microbatches)
        for spec, tensor in pairs:
            if spec.batch_dim is None:
                first.append(tensor)
                continue
            if tensor.ndim != len(spec.shape) or tensor.shape[0] % microbatches or not tensor.shape[0]:
                way_out = f". {SHORTER}, or pad it" if tensor.ndim == len(spec.shape) else ""
                raise InputError(
                    f"{spec.name}: expected {len(spec.shape)} dimensions, the first divisible into {microbatches} "
                    f"microbatches; found shape {tuple(tensor.shape)}{way_out}"
                )
            first.append(tensor[: tensor.shape[0] // microbatches])
        return self.unflatten(first)

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int) -> list[list[Tensor]]:
        """The tensors of every microbatch, cut from a full batch. Raises `InputError` if the batch is not one like the
        example times `microbatches`."""
        columns = []
        pairs = list(zip(self.tensors, self.flatten(args, kwargs), strict=True))
        refuse_uncut(pairs, microbatches)
        for spec, tensor in pairs:
            if tensor.grad_fn is not None:
                raise InputError(
                    f"{spec.name} is the result of other modules or operators, to which no gradient would flow "
                    f"({tensor.grad_fn.name()}): make them part of the model, or pass {spec.name}.detach()"
                )
            whole = spec.batch_dim is None
            expected = spec.shape if whole else (spec.shape[0] * microbatches, *spec.shape[1:])
            if tuple(tensor.shape) != expected:
                reason = (
                    "it is given to every microbatch whole"
                    if whole
                    else f"{microbatches} microbatches of {spec.shape[0]} each, as in the example"
                )
                same_rows = not whole and tensor.ndim and tuple(tensor.shape[1:]) == expected[1:]
                shorter = same_rows and tensor.shape[0] < expected[0]
                raise InputError(
                    f"{spec.name}: expected shape {expected} ({reason}), found {tuple(tensor.shape)}. "
                    f"{SHORTER if shorter else 'Give a batch of that size'}, compile again with another example "
                    f"microbatch or microbatches=, or run sizes that divide into {microbatches} microbatches with "
                    f"on_new_shape='recompile'"
                )
            if tensor.dtype != spec.dtype:
                raise InputError(
                    f"{spec.name}: expected dtype {spec.dtype} as in the example microbatch, found {tensor.dtype}"
                )
            columns.append([tensor] * microbatches if whole else list(tensor.split(spec.shape[0])))
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in range(microbatches)]


def refuse_sparse(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise InputError(f"{name}: expected a dense tensor, found one of layout {tensor.layout}. Pass .to_dense()")


def refuse_uncut(pairs: Sequence[tuple[TensorSpec, Tensor]], microbatches: int) -> None:
    """Raise where one tensor has the length of the example and others are longer. The example had it as long as a
    microbatch by coincidence, and so it is cut like the batch."""
    cut = [(spec, tensor) for spec, tensor in pairs if spec.batch_dim == 0]
    if microbatches == 1 or len({tuple(tensor.shape[:1]) for _, tensor in cut}) < 2:
        return
    for spec, tensor in cut:
        if tuple(tensor.shape) == spec.shape:
            size = spec.shape[0]
            raise InputError(
                f"{spec.name}: expected {microbatches} microbatches of {size} each, as in the example, found "
                f"{tuple(tensor.shape)}, the shape of one. In the example it is as long as a microbatch, and so it is "
                f"cut like the batch. If it has no batch dimension (class weights), give it as a buffer of the model "
                f"or of a loss module, or with a first dimension of another length than {size} (unsqueeze(0))"
            )


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without the host waiting for the copy. That goes through new pinned memory, as the caller
    may change the tensor right after."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides where they fill its memory; otherwise (expanded, sliced) contiguous ones."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if tensor.numel() else 0
    return stride if extent == tensor.numel() else tuple(torch.empty(shape, device="meta").stride())


def independent_copy(value: Any) -> Any:
    """A copy of a value, which does not change with it; the value itself where a copy cannot be made or compared."""
    try:
        copied = copy.deepcopy(value)
    except Exception:
        return value
    return copied if same_value(copied, value) else value


def same_value(left: Any, right: Any) -> bool:
    """Whether two arguments are equal, or have one type and equal attributes where that type does not compare."""
    if left is right:
        return True
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.shape == right.shape and torch.equal(left, right)
    if type(left) is not type(right) or isinstance(left, FunctionType | MethodType | type | torch.nn.Module):
        return bool(left == right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_value(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_value, left, right))
    compares = any("__eq__" in vars(owner) for owner in type(left).__mro__[:-1])  # all classes but `object`
    if not compares and hasattr(left, "__dict__"):
        return same_value(vars(left), vars(right))
    equal = left == right
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def path_name(path: Sequence[Any], input_count: int) -> str:
    """The name of the leaf at a path into (positional, keyword) arguments, like `inputs[0]` or `targets[1]['mask']`."""
    first, index, *rest = path
    if first.idx == 1:
        return str(index.key) + pytree.keystr(tuple(rest))
    position = index.idx
    owner = f"inputs[{position}]" if position < input_count else f"targets[{position - input_count}]"
    return owner + pytree.keystr(tuple(rest))


def is_pair(value: Any) -> bool:
    """Whether a value is (positional, keyword) arguments of a call."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return isinstance(value[0], tuple | list) and isinstance(value[1], Mapping)
