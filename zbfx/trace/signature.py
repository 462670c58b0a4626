"""How a call `step(*inputs, *targets, **kwargs)` becomes the flat tensors of each microbatch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from zbfx._torch.tensors import pytree
from zbfx.errors import InputError, ZbfxError, listed

SHORTER = "Leave out a last batch that is shorter (DataLoader(..., drop_last=True))"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a microbatch."""

    name: str  # its path in the call
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # what the graph reads; a batch with other strides is copied
    dtype: torch.dtype
    batch_dim: int | None  # the dimension at which a batch is cut; None where every microbatch gets the whole tensor

    def batch_shape(self, microbatches: int) -> tuple[int, ...]:
        """The shape in a batch of microbatches of the example's shapes."""
        return tuple(size * microbatches if dim == self.batch_dim else size for dim, size in enumerate(self.shape))

    def fits_beside_batch(self, tensor: Tensor) -> bool:
        """Whether a tensor has the example's sizes in all dimensions but that of the batch."""
        sizes = enumerate(zip(self.shape, tensor.shape, strict=False))
        return tensor.ndim == len(self.shape) and all(a == b for dim, (a, b) in sizes if dim != self.batch_dim)


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
    is_guess: bool = True  # which tensors are cut

    @classmethod
    def of(
        cls, inputs: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any], batch_dims: Any = None
    ) -> Signature:
        """The signature of the call with these arguments. `batch_dims` has, in the structure of (inputs, kwargs,
        targets), the dimension of the batch of each tensor. None in it: every microbatch gets the whole tensor.

        Without `batch_dims` tensors as long as the first one are cut along dimension 0.
        """
        named, structure = pytree.tree_flatten_with_path(((*inputs, *targets), dict(kwargs)))
        names = [path_name(path, len(inputs)) for path, _ in named]
        leaves = [leaf for _, leaf in named]
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, Tensor):
                refuse_sparse(name, leaf)
        dims = guessed_dims(leaves) if batch_dims is None else given_dims(batch_dims, structure, len(inputs))
        specs = tuple(
            TensorSpec(name, tuple(leaf.shape), dense_stride(leaf), leaf.dtype, checked_dim(name, leaf, dim))
            if isinstance(leaf, Tensor)
            else Constant(name, independent_copy(leaf))
            for name, leaf, dim in zip(names, leaves, dims, strict=True)
        )
        return cls(structure, specs, len(inputs), batch_dims is None)

    def of_call(self, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int) -> Signature:
        """The signature of calls that may leave arguments out, or bring others. Tensors that the example has keep their
        sizes in it; others, of a batch of so many microbatches if sizes do not say how many, are cut along dimension 0
        where they are as long as the batch."""
        named, structure = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        known = {spec.name: spec for spec in self.tensors}
        leaves = [(path_name(path, self.input_count), leaf) for path, leaf in named]
        given = [(known[name], leaf) for name, leaf in leaves if name in known and isinstance(leaf, Tensor)]
        whole = [(leaf.shape[s.batch_dim], s.shape[s.batch_dim]) for s, leaf in given if s.batch_dim is not None]
        length, part = whole[0] if whole else (None, 1)
        count = length // part if length and part and not length % part else microbatches

        def spec(name: str, leaf: Any) -> TensorSpec | Constant:
            if not isinstance(leaf, Tensor):
                return Constant(name, independent_copy(leaf))
            if name in known:
                return known[name]
            refuse_sparse(name, leaf)
            is_cut = leaf.ndim > 0 and leaf.shape[0] == length and not leaf.shape[0] % count
            first = leaf.detach()[: leaf.shape[0] // count] if is_cut else leaf
            return TensorSpec(name, tuple(first.shape), dense_stride(first), leaf.dtype, 0 if is_cut else None)

        specs = tuple(spec(name, leaf) for name, leaf in leaves)
        return Signature(structure, specs, self.input_count, self.is_guess)

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the keyword arguments."""
        _, kwargs = pytree.tree_unflatten([None] * len(self.leaves), self.structure)
        return tuple(kwargs)

    @property
    def batch_dims(self) -> Any:
        """As `of` takes them, for calls whose tensors have other shapes."""
        dims = [leaf.batch_dim if isinstance(leaf, TensorSpec) else None for leaf in self.leaves]
        return by_part(dims, self.structure, self.input_count)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    def batch_shapes(self, microbatches: int) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of the tensors of a batch of microbatches of the example's shapes."""
        return {spec.name: spec.batch_shape(microbatches) for spec in self.tensors}

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

    def refuse_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `InputError` for a tensor that waits for a gradient: steps give those of parameters alone."""
        for spec, tensor in zip(self.tensors, self.flatten(args, kwargs), strict=True):
            if tensor.requires_grad and tensor.is_leaf:
                raise InputError(
                    f"{spec.name} requires a gradient, and a step gives those of parameters alone: {spec.name}.grad "
                    f"would stay as it is. Pass {spec.name}.detach(); a tensor that is trained becomes a parameter of "
                    f"the model (nn.Parameter)"
                )

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
            dim = spec.batch_dim
            if dim is None:
                counts |= set() if tuple(tensor.shape) == spec.shape else {None}
            else:
                fits = spec.fits_beside_batch(tensor) and tensor.shape[dim] and spec.shape[dim]
                counts.add(
                    tensor.shape[dim] // spec.shape[dim] if fits and not tensor.shape[dim] % spec.shape[dim] else None
                )
        return counts.pop() if len(counts) == 1 else (None if counts else 1)

    def first_microbatch(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a batch's first microbatch. Raises `InputError` if the batch does not divide."""
        first = []
        pairs = list(zip(self.tensors, self.flatten(args, kwargs), strict=True))
        if self.is_guess:
            refuse_uncut(pairs, microbatches)
            refuse_grown(pairs)
        for spec, tensor in pairs:
            dim = spec.batch_dim
            if dim is None:
                first.append(tensor)
                continue
            if tensor.ndim != len(spec.shape) or tensor.shape[dim] % microbatches or not tensor.shape[dim]:
                way_out = f". {SHORTER}, or pad it" if tensor.ndim == len(spec.shape) else ""
                raise InputError(
                    f"{spec.name}: expected {len(spec.shape)} dimensions, dimension {dim} divisible into "
                    f"{microbatches} microbatches; found shape {tuple(tensor.shape)}{way_out}"
                )
            first.append(tensor.narrow(dim, 0, tensor.shape[dim] // microbatches))
        return self.unflatten(first)

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int) -> list[list[Tensor]]:
        """The tensors of every microbatch, cut from a full batch. Raises `InputError` if the batch is not one like the
        example times `microbatches`."""
        columns = []
        pairs = list(zip(self.tensors, self.flatten(args, kwargs), strict=True))
        if self.is_guess:
            refuse_uncut(pairs, microbatches)
        for spec, tensor in pairs:
            if tensor.grad_fn is not None:
                raise InputError(
                    f"{spec.name} is the result of other modules or operators, to which no gradient would flow "
                    f"({tensor.grad_fn.name()}): make them part of the model, or pass {spec.name}.detach()"
                )
            dim, expected = spec.batch_dim, spec.batch_shape(microbatches)
            if tuple(tensor.shape) != expected:
                reason = (
                    "it is given to every microbatch whole; batch_dims= of compile names the dimension of its batch"
                    if dim is None
                    else f"{microbatches} microbatches of {spec.shape[dim]} each, as in the example"
                )
                shorter = dim is not None and spec.fits_beside_batch(tensor) and tensor.shape[dim] < expected[dim]
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
            columns.append([tensor] * microbatches if dim is None else list(tensor.split(spec.shape[dim], dim)))
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in range(microbatches)]


def refuse_sparse(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        found = "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
        instead = ".to_padded_tensor(0.0)" if tensor.is_nested else ".to_dense()"
        raise InputError(f"{name}: expected a dense tensor, found {found}. Pass {instead}")


def guessed_dims(leaves: Sequence[Any]) -> list[int | None]:
    """0 for the first tensor that has dimensions, and for those as long as it."""
    sizes = [leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in leaves]
    batch = next((size for size in sizes if size is not None), None)
    return [0 if size is not None and size == batch else None for size in sizes]


def given_dims(batch_dims: Any, structure: Any, input_count: int) -> list[Any]:
    """What `batch_dims` says of each leaf of a call. A dimension in the place of a tuple, list or dict is that of all
    tensors in it."""
    places = by_part(range(structure.num_leaves), structure, input_count)
    found: dict[int, Any] = {}
    try:
        pytree.tree_map_(
            lambda dim, part: found.update(dict.fromkeys(pytree.tree_leaves(part), dim)), batch_dims, places
        )
    except ValueError as error:
        raise ZbfxError(
            f"batch_dims is a tuple (inputs, kwargs, targets) with a dimension or None for each tensor of "
            f"example_inputs, example_kwargs and example_targets, like ((0, 1), {{'mask': None}}, 0); found "
            f"{batch_dims!r} ({error})"
        ) from error
    return [found.get(place) for place in range(structure.num_leaves)]


def by_part(leaves: Sequence[Any], structure: Any, input_count: int) -> tuple[Any, Any, Any]:
    """The leaves of a call as (inputs, kwargs, targets)."""
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args[:input_count], kwargs, args[input_count:]


def checked_dim(name: str, tensor: Tensor, dim: Any) -> int | None:
    """The dimension of a tensor's batch, counted from the first one. Raises `ZbfxError` where it has none such."""
    if dim is None:
        return None
    if not isinstance(dim, int) or isinstance(dim, bool) or not -tensor.ndim <= dim < tensor.ndim:
        raise ZbfxError(
            f"batch_dims has for each tensor the dimension at which a batch is cut, or None (given whole); found "
            f"{dim!r} for {name}, whose shape is {tuple(tensor.shape)}"
        )
    return dim % tensor.ndim


def refuse_uncut(pairs: Sequence[tuple[TensorSpec, Tensor]], microbatches: int) -> None:
    """Raise where one tensor has the length of the example and others are longer. The example had it as long as a
    microbatch by coincidence, and so it is cut like the batch."""
    cut = [(spec, tensor) for spec, tensor in pairs if spec.batch_dim is not None]
    if microbatches == 1 or len({tuple(tensor.shape[:1]) for _, tensor in cut}) < 2:
        return
    for spec, tensor in cut:
        if tuple(tensor.shape) == spec.shape:
            raise InputError(
                f"{spec.name}: expected {microbatches} microbatches of {spec.shape[0]} each, as in the example, found "
                f"{tuple(tensor.shape)}, the shape of one. In the example it is as long as a microbatch, and so it is "
                f"cut like the batch. If it has no batch dimension (class weights), compile with batch_dims= and None "
                f"for {spec.name}"
            )


def refuse_grown(pairs: Sequence[tuple[TensorSpec, Tensor]]) -> None:
    """Raise where other sizes than the example's show that the example has misled the guess: tensors that are cut are
    not of one length, or one that microbatches get whole has grown with the batch, or become as long."""
    cut = [(spec, tensor) for spec, tensor in pairs if spec.batch_dim is not None and tensor.ndim]
    if not cut:
        return
    first, before, after = cut[0][0].name, cut[0][0].shape[0], len(cut[0][1])
    for spec, tensor in cut:
        if len(tensor) != after:
            raise InputError(
                f"{spec.name}: found shape {tuple(tensor.shape)} beside {first}, {after} long. In the example both are "
                f"{before} long, and so both are cut along dimension 0. Compile with batch_dims=, with another "
                f"dimension for {spec.name}, or None to give it to every microbatch whole"
            )
    for spec, tensor in pairs:
        if spec.batch_dim is None and tensor.ndim == len(spec.shape):
            for dim, (size, found) in enumerate(zip(spec.shape, tensor.shape, strict=True)):
                if size != found and (size * after == found * before or found == after):
                    raise InputError(
                        f"{spec.name}: found shape {tuple(tensor.shape)} where the example has {spec.shape}. Its "
                        f"dimension {dim} seems to be that of the batch, which went from {before} to {after}; only "
                        f"tensors as long as the first one are cut, along dimension 0. Compile with batch_dims=, with "
                        f"{dim} for {spec.name} to cut it there, or None to give it to every microbatch whole"
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
