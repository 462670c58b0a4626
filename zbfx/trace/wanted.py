"""What a graph of the model is asked for: whether it trains, in which mode the modules run, and what it returns.

A user names outputs by path ("logits", "hidden_states.-1"), by a function `(outputs, *targets) -> tensors`, which runs
where its arguments are, or by a list, tuple or dict of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from zbfx._torch.tensors import pytree
from zbfx.arguments import kind_of
from zbfx.errors import InputError, TraceError, ZbfxError
from zbfx.graphs import Port, Returned, Role
from zbfx.spelled import spelled
from zbfx.trace.refusals import refuse_subclass
from zbfx.trace.signature import Signature, same_value
from zbfx.trace.values_read import values_read

SIMPLE = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))
PATHS = (
    "outputs is a path of attributes, keys and indices into what the model returns, like 'logits' or "
    "'hidden_states.-1', a function (outputs, *targets) -> tensors, or a list, tuple or dict of these"
)


@dataclass(frozen=True, eq=False)
class Selection:
    """What a user asks for of the model's output; None: all of it."""

    asked: Any = None
    read: Any = field(init=False, repr=False)  # what was asked for, and what its functions read, as this was made

    def __post_init__(self) -> None:
        for one in self.leaves:
            if not isinstance(one, str) and not callable(one):
                raise ZbfxError(f"{PATHS}; found {kind_of(one)}")
        leaves, structure = pytree.tree_flatten(self.asked)
        object.__setattr__(self, "read", (structure, *map(values_read, leaves)))

    @property
    def leaves(self) -> list[Any]:
        return [] if self.asked is None else pytree.tree_leaves(self.asked)

    @property
    def told(self) -> str:
        """What ranks compare."""
        return "all" if self.asked is None else spelled(pytree.tree_map(text_of, self.asked))

    def is_like(self, other: Selection) -> bool:
        """Whether both ask for the same: equal paths, or functions of one code that found the same values to read."""
        return bool(self.read == other.read)

    def of(self, output: Any, targets: Sequence[Any]) -> Any:
        """What is asked for, from what the model has returned."""
        if self.asked is None:
            return output
        return pytree.tree_map(
            lambda one: at(output, one) if isinstance(one, str) else one(output, *targets), self.asked
        )


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a graph is asked for. One that does not train is a forward alone; it runs the modules in eval mode, or else
    in the modes that they are in. Without `has_loss` the loss function does not run."""

    trains: bool = True
    in_eval: bool = False
    has_loss: bool = True
    selection: Selection | None = None

    @property
    def takes_targets(self) -> bool:
        """Whether a function is given what follows the model's arguments."""
        return self.has_loss or (self.selection is not None and any(map(callable, self.selection.leaves)))

    def is_like(self, other: Wanted) -> bool:
        flags = (self.trains, self.in_eval, self.has_loss) == (other.trains, other.in_eval, other.has_loss)
        if not flags or self.selection is None or other.selection is None:
            return flags and self.selection is other.selection
        return self.selection.is_like(other.selection)


TRAINING, EVALUATION = Wanted(), Wanted(trains=False, in_eval=True)


@dataclass(frozen=True, eq=False)
class Request:
    """What a kind of call asks for, and the structure of such calls, with sizes as in the example."""

    wanted: Wanted
    signature: Signature

    def is_like(self, other: Request) -> bool:
        one, two = self.signature, other.signature
        same = (one.structure, one.input_count, one.tensors) == (two.structure, two.input_count, two.tensors)
        return same and all(map(same_value, constants_of(one), constants_of(two))) and self.wanted.is_like(other.wanted)


def constants_of(signature: Signature) -> list[Any]:
    return [getattr(leaf, "value", None) for leaf in signature.leaves]


def at(output: Any, path: str) -> Any:
    """The part of an output at a path of attributes, keys and indices. Raises `InputError` where there is none."""
    found = output
    for step in path.split("."):
        try:
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, Sequence) and step.lstrip("-").isdigit():
                found = found[int(step)]
            else:
                found = getattr(found, step)
        except (AttributeError, IndexError):
            raise InputError(
                f"outputs={path!r}: the model returns {kind_of_output(output)}, which has no {path!r} (at {step!r}). "
                f"{PATHS}"
            ) from None
    return found


def kind_of_output(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with {', '.join(map(str, output))}"
    if isinstance(output, Sequence):
        return f"a {type(output).__name__} of {len(output)}"
    names = getattr(output, "__dict__", {})
    return f"a {type(output).__name__}" + (f" with {', '.join(names)}" if names else "")


def returned_of(made: Any) -> tuple[Returned, list[Tensor]]:
    """The structure of what is asked for, and its tensors, in the order of their ports. Raises `TraceError` for objects
    that are neither tensors nor plain values."""
    named, structure = pytree.tree_flatten_with_path(made)
    leaves: list[Any] = []
    tensors: list[Tensor] = []
    for path, leaf in named:
        name = f"outputs{pytree.keystr(path)}"
        refuse_subclass(name, leaf)
        if isinstance(leaf, Tensor):
            leaves.append(Port(Role.OUTPUT, str(len(tensors))))
            tensors.append(leaf)
        elif isinstance(leaf, SIMPLE):
            leaves.append(leaf)
        else:
            raise TraceError(
                f"{name} is a {type(leaf).__name__}: a pipeline returns tensors, in tuples, lists and dicts, and plain "
                f"values. Name what is wanted: {PATHS}"
            )
    if not tensors:
        raise TraceError(f"what is asked for has no tensor in it; found {kind_of_output(made)}. {PATHS}")
    return Returned(structure, tuple(leaves)), tensors


def text_of(one: Any) -> str:
    """A path, or the name of a function with a hash of its code: the same in every process."""
    codes = codes_in(one)
    digest = hashlib.sha256(repr([(code.co_code, spelled(plain_constants(code))) for code in codes]).encode())
    return one if isinstance(one, str) else f"{spelled(one)} {digest.hexdigest()[:8]}"


def codes_in(one: Any) -> list[CodeType]:
    if isinstance(one, partial):
        return codes_in(one.func)
    return [one.__code__] if isinstance(one, FunctionType) else []


def plain_constants(code: CodeType) -> list[Any]:
    return [value for value in code.co_consts if isinstance(value, SIMPLE)]
