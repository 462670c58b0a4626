"""What the code of a model and its loss reads elsewhere than in plain attributes of the model's modules. A graph holds
one version of it, but of tensors, which it reads where they lie.

Takes   the model and the loss.
Gives   a `Reached`: plain values by path, in collections and objects that modules hold, in closures, in defaults, and
        in globals that users' functions name; the methods of modules' classes; hooks of all modules; and modules that
        lie outside of the model, with modes, tensors and hooks. Attributes of objects count if code that is reached
        names them.
Raises  nothing. What does not show its state (iterators, objects of C) is left out.
Source  ours. `values_read.py` compares two functions by all that they read; this walk names what has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain, repeat
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from zbfx._torch.modules import hook_tables, hooks_of_all_modules, original_of, part_tables
from zbfx._transformers import UNREAD, WRITTEN_BY_SAVING
from zbfx.trace.code_reads import attributes_read, attributes_set, own_classes
from zbfx.trace.first_forward import OF_MODULES
from zbfx.trace.left_behind import users_hooks
from zbfx.trace.python_state import LEFT_OUT, code_names, is_of_torch, slot_names
from zbfx.trace.values_read import held_in, is_installed

MOST_OF_ARRAY = 1 << 14  # entries that are compared before each step
MOST_OF_END = MOST_OF_ARRAY // 2
LEAVES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    type(None),
    Enum,
    numpy.generic,
    torch.dtype,
    torch.device,
)


class TensorLayoutRead(NamedTuple):
    """What a graph was made for of a tensor that it reads."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    def __repr__(self) -> str:
        return f"a tensor of {self.dtype} and shape {self.shape} with requires_grad={self.requires_grad}"


class Nothing:
    """In the place of a value that is not there."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = Nothing()


class ArrayRead(NamedTuple):
    """An array of numpy, which a graph holds a copy of: its values, or those of a large one's beginning and end."""

    dtype: str
    shape: tuple[int, ...]
    octets: bytes

    @classmethod
    def of(cls, array: Any) -> ArrayRead:
        flat = array.reshape(-1)
        read = array if array.size <= MOST_OF_ARRAY else numpy.concatenate([flat[:MOST_OF_END], flat[-MOST_OF_END:]])
        return cls(str(array.dtype), array.shape, read.tobytes())

    def __repr__(self) -> str:
        return f"an array of {self.dtype} and shape {self.shape}"


class PartOf(NamedTuple):
    """A module, or a parameter or buffer, of the model or its loss."""

    name: str

    def __repr__(self) -> str:
        return self.name or "the model"


@dataclass(frozen=True, eq=False)
class Reached:
    """What was found, by path. `owners` are the collections and objects that the values lie in, by the paths of both.
    `places` list the objects that lie where something was found: while they are the same, so is what is found."""

    values: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    layouts: Mapping[str, TensorLayoutRead]
    owners: Mapping[str, str]
    in_model: frozenset[str]  # paths
    places: tuple[Callable[[], Iterable[object]], ...]

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Any, tensors: Mapping[str, Tensor]) -> Reached:
        """`tensors` are the parameters and buffers of model and loss, by name."""
        parts = [part for part in (model, loss_fn) if isinstance(part, nn.Module)]
        modules = [pair for part in parts for pair in part.named_modules()]
        known = {id(one): (PartOf(name), one) for name, one in reversed([*modules, *tensors.items()])}
        walk = Reaching(known)
        for name, module in modules:
            walk.module_of_model(name, module)
        in_model = frozenset(walk.values)
        tables = hooks_of_all_modules()
        walk.hooks("the hooks of all modules", [hook for table in tables for hook in table.values()], *tables)
        names = frozenset[str]()
        while not isinstance(loss_fn, nn.Module):
            further = Reaching(known, dict(walk.seen))
            further.value("loss_fn", loss_fn, names)
            if further.found <= names:
                walk.add(further)
                break
            names |= further.found  # code that is reached may read more of what was seen before it
        layouts = {path: layout_read(tensor) for path, tensor in walk.tensors.items()}
        return cls(walk.values, walk.tensors, layouts, walk.owners, in_model, tuple(walk.places))

    def state(self) -> list[object]:
        """The objects that lie in the places of those that were found."""
        return list(chain.from_iterable(place() for place in self.places))

    def change(self, now: Reached, constants: Collection[int], *, outside: bool) -> tuple[str, object, object] | None:
        """The first path at which something else lies now, with what was and is there. Of tensors, those of these ids
        count, which graphs read. `outside`: in other places
        than the model's modules."""
        left_out = self.in_model | now.in_model if outside else frozenset()
        for path, before in self.values.items():
            if path in left_out:
                continue
            after = now.values.get(path, NOTHING)
            if not is_equal(before, after):
                return path, before, now.tensors.get(path, after)
        collections = set(self.owners.values())
        for path, after in now.values.items():
            is_new = path not in self.values and path not in self.tensors and path not in left_out
            if is_new and now.owners.get(path) in collections:
                return path, NOTHING, after
        for path, tensor in self.tensors.items():
            after = now.tensors.get(path, now.values.get(path, NOTHING))
            if id(tensor) in constants and after is not tensor:
                return path, tensor, after
            if id(tensor) in constants and now.layouts[path] != self.layouts[path]:
                return path, self.layouts[path], now.layouts[path]
        return None


@dataclass
class Reaching:
    """One walk. `known` are the model's own parts, by address; `found` the names in the code of users' functions that
    it has met."""

    known: Mapping[int, tuple[PartOf, object]]
    seen: dict[int, object] = field(default_factory=dict)  # by address; held, so that no other object gets it
    values: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    places: list[Callable[[], Iterable[object]]] = field(default_factory=list)
    found: set[str] = field(default_factory=set)
    globals_met: dict[int, set[str]] = field(default_factory=dict)  # names that were looked at, by the namespace

    def add(self, other: Reaching) -> None:
        self.values |= other.values
        self.tensors |= other.tensors
        self.owners |= other.owners
        self.places += other.places

    def module_of_model(self, name: str, module: nn.Module) -> None:
        """What a module of the model holds, and the code of its classes. What is None until a forward sets it stays
        out: a graph makes it anew in each step."""
        kind: Any = type(module)
        read, is_set, space = attributes_read(kind), attributes_set(kind), vars(module)
        kept = [key for key in space if key in read and key not in OF_MODULES | UNREAD]
        kept = [
            key for key in kept if not isinstance(space[key], Tensor) and (space[key] is not None or key not in is_set)
        ]
        self.entries(f"{name}.".removeprefix("."), space, kept, read)
        self.hooks(f"the hooks of {name or 'the model'}", users_hooks(module), *hook_tables(module))
        self.methods(type(module), read)

    def methods(self, owner: type, names: frozenset[str]) -> None:
        """The functions of a module's classes."""
        for part in own_classes(owner):
            if id(part) not in self.seen:
                self.seen[id(part)] = part
                functions = [key for key, entry in vars(part).items() if isinstance(entry, FunctionType | property)]
                self.entries(f"{part.__qualname__}.", vars(part), functions, names)

    def hooks(self, path: str, hooks: Sequence[Any], *tables: Mapping[Any, Any]) -> None:
        """The hooks in tables, but those of torch itself, such as counters and profilers have."""
        own = [hook for hook in hooks if not is_torchs(hook)]
        self.rows(path, enumerate(own), lambda: chain.from_iterable(table.values() for table in tables), frozenset())

    def entries(self, prefix: str, space: Mapping[str, Any], keys: Collection[str], names: frozenset[str]) -> None:
        """What a namespace holds under these keys."""
        if keys:
            self.places.append(lambda: map(space.get, keys, repeat(NOTHING)))
            for key in keys:
                if key in space:
                    self.value(prefix + key, space[key], names)

    def value(self, path: str, value: Any, names: frozenset[str]) -> None:
        value = original_of(value)
        if isinstance(value, LEAVES) or id(value) in self.known:
            self.values[path] = self.known[id(value)][0] if id(value) in self.known else value
            return
        if isinstance(value, numpy.ndarray):
            found = ArrayRead.of(value)
            self.values[path] = found
            self.places.append(lambda: (ArrayRead.of(value) == found,))
            return
        if isinstance(value, Tensor):
            self.tensors[path], shape = value, value.shape
            self.places.append(lambda: (value.requires_grad, value.dtype, value.shape == shape))
            return
        if isinstance(value, MethodType):  # made anew at each access
            self.value(path, value.__func__, names)
            self.value(f"{path}.__self__", value.__self__, names)
            return
        if isinstance(value, FunctionType | BuiltinFunctionType | type | nn.Module):
            self.values[path] = value
        if id(value) in self.seen:
            return
        self.seen[id(value)] = value
        kind: Any = type(value)
        match value:
            case FunctionType():
                self.function(value, names)
            case type():
                self.space(f"{value.__qualname__}.", value, names)
            case nn.Module():
                self.module(path, value, names)
            case partial():
                parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
                self.places.append(lambda: (value.func, value.args, value.keywords))
                self.entries(f"{path}.", parts, tuple(parts), names)
            case staticmethod() | classmethod():
                self.value(path, value.__func__, names)
            case property():
                self.value(path, value.fget, names)
            case dict() | MappingProxyType():
                self.rows(path, value.items(), value.values, names)
            case list() | tuple() | deque():
                self.rows(path, enumerate(value), lambda: value, names)
            case set() | frozenset():
                self.places.append(lambda: value)
                self.values[path] = frozenset(entry for entry in value if isinstance(entry, LEAVES))
            case _ if not isinstance(value, LEFT_OUT) and not is_of_torch(kind):
                self.space(f"{path}.", value, names)

    def rows(
        self,
        path: str,
        pairs: Iterable[tuple[Any, Any]],
        place: Callable[[], Iterable[Any]],
        names: frozenset[str],
        spelling: str = "{}[{!r}]",
    ) -> None:
        """The entries of a collection."""
        self.places.append(place)
        self.owners[path] = path  # known, even if it is empty
        for key, entry in list(pairs):
            inner = spelling.format(path, key)
            self.owners[inner] = path
            self.value(inner, entry, names)

    def function(self, function: FunctionType, names: frozenset[str]) -> None:
        """What a user's function holds, and what it names in its file and in other files of the user's."""
        if is_installed(function.__module__):
            return
        title, code, cells = f"{function.__qualname__}.", function.__code__, function.__closure__ or ()
        named = code_names(code)
        self.found |= named
        names |= named
        self.places.append(lambda: map(held_in, cells))
        for key, cell in zip(code.co_freevars, cells, strict=True):
            self.value(title + key, held_in(cell), names)
        self.places.append(lambda: (function.__defaults__, function.__kwdefaults__, function.__code__))
        self.value(f"{title}__defaults__", function.__defaults__ or (), names)
        self.value(f"{title}__kwdefaults__", function.__kwdefaults__ or {}, names)
        self.globals(function.__module__, function.__globals__, names, named)

    def globals(self, title: str, space: Mapping[str, Any], names: frozenset[str], named: frozenset[str]) -> None:
        met = self.globals_met.setdefault(id(space), set())
        keys = sorted((named - met) & space.keys())
        met |= named
        modules = [space[key] for key in keys if isinstance(space[key], ModuleType)]
        self.entries(f"{title}.", space, [key for key in keys if not isinstance(space[key], ModuleType)], names)
        for module in modules:
            if not is_installed(module.__name__) and id(module) not in self.seen:
                self.seen[id(module)] = module
                self.globals(module.__name__, vars(module), names, named)

    def space(self, prefix: str, value: Any, names: frozenset[str]) -> None:
        """The attributes of an object, or of a class, that are named, and the methods that calls of it run."""
        kind: Any = type(value)
        own = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        left_out = UNREAD | WRITTEN_BY_SAVING if is_installed(kind.__module__) else UNREAD
        keys = [key for key in own if key in names and key not in left_out]
        self.owners |= {prefix + key: prefix for key in keys} | {prefix: prefix}
        self.places.append(lambda: [key for key in own if key in names])
        self.entries(prefix, own, keys, names)
        if slots := [key for key in slot_names(kind) if key in names and hasattr(value, key)]:
            self.places.append(lambda: map(getattr, repeat(value), slots))
            for key in slots:
                self.value(prefix + key, getattr(value, key), names)
        for part in (value if isinstance(value, type) else kind).__mro__:
            if not is_installed(part.__module__):
                called = names | {"__call__", "__getattr__"}
                keys = [key for key, entry in vars(part).items() if key in called and not is_slot(entry)]
                self.entries(f"{part.__qualname__}.", vars(part), keys, names)

    def module(self, path: str, module: nn.Module, names: frozenset[str]) -> None:
        """A module outside of the model."""
        kind: Any = type(module)
        read, space = attributes_read(kind) if is_installed(kind.__module__) else names, vars(module)
        wanted = (read | {"forward"}) - OF_MODULES - UNREAD
        kept = ["training", *(key for key in space if key in wanted)]
        self.entries(f"{path}.", space, kept, frozenset(read))
        for table in part_tables(module):
            self.rows(path, table.items(), table.values, names, "{}.{}")
        self.hooks(f"the hooks of {path}", users_hooks(module), *hook_tables(module))
        self.methods(type(module), names)


def is_slot(entry: object) -> bool:
    return isinstance(entry, MemberDescriptorType)


def layout_read(tensor: Tensor) -> TensorLayoutRead:
    return TensorLayoutRead(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def is_equal(before: object, after: object) -> bool:
    """Whether two values are one, or equal and of one type."""
    return before is after or (type(before) is type(after) and bool(before == after))  # no tensor is a value


def is_torchs(hook: Any) -> bool:
    """Whether a hook is a function or method of torch's own."""
    return isinstance(hook, FunctionType | MethodType) and is_of_torch(getattr(hook, "__func__", hook))
