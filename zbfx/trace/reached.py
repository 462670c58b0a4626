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

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy
from torch import Tensor, nn

from zbfx._torch.modules import hook_tables, hooks_of_all_modules, original_of, part_tables
from zbfx._transformers import UNREAD, WRITTEN_BY_SAVING
from zbfx.trace.bytecode import NO_KEYS, Keys, Reads, both, reads_of, united
from zbfx.trace.code_reads import (
    attributes_read,
    attributes_set,
    is_called_by_syntax,
    own_classes,
    reads_reached,
)
from zbfx.trace.first_forward import OF_MODULES
from zbfx.trace.left_behind import users_hooks
from zbfx.trace.python_state import LEFT_OUT, is_of_torch, slot_names
from zbfx.trace.reached_values import (
    LEAVES,
    MOST_OF_ARRAY,
    NOTHING,
    ArrayRead,
    PartOf,
    TensorLayoutRead,
    entry_at,
    entry_of,
    is_equal,
    layout_read,
)
from zbfx.trace.values_read import held_in, is_installed

BY_KEYS = (dict, OrderedDict, defaultdict, Counter, list, tuple, deque)  # whose entries lie at keys, and there alone
EVERYTHING: Mapping[str, Keys] = {}
END = object()  # after the objects of a place: none of them may pass for one of the next


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
        names = Reads()
        while not isinstance(loss_fn, nn.Module):
            further = Reaching(known, dict(walk.seen))
            further.value("loss_fn", loss_fn, names)
            if further.found | names == names:
                walk.add(further)
                break
            names |= further.found  # code that is reached may read more of what was seen before it
        layouts = {path: layout_read(tensor) for path, tensor in walk.tensors.items()}
        return cls(walk.values, walk.tensors, layouts, walk.owners, in_model, tuple(walk.places))

    def state(self) -> list[object]:
        """The objects that lie in the places of those that were found."""
        return list(chain.from_iterable((*place(), END) for place in self.places))

    def change(self, now: Reached, constants: Collection[int], *, outside: bool) -> tuple[str, object, object] | None:
        """The first path at which something else lies now, with what was and is there. Of tensors, those of these ids
        count, which graphs read. `outside`: in other places than the model's modules."""
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
    found: Reads = field(default_factory=Reads)
    globals_met: dict[int, Mapping[str, Keys]] = field(default_factory=dict)  # what was looked at, by the namespace

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
        read |= reads_reached([space.get("forward"), *users_hooks(module)], ())
        kept = [key for key in space if is_read(key, space[key], read) and key not in OF_MODULES | UNREAD]
        kept = [
            key for key in kept if not isinstance(space[key], Tensor) and (space[key] is not None or key not in is_set)
        ]
        self.entries(f"{name}.".removeprefix("."), space, kept, read, read.attributes)
        self.hooks(f"the hooks of {name or 'the model'}", users_hooks(module), *hook_tables(module))
        self.methods(type(module), read)

    def methods(self, owner: type, names: Reads) -> None:
        """The functions of a module's classes that calls of it reach."""
        reached = names.names()
        for part in own_classes(owner):
            if id(part) not in self.seen:
                self.seen[id(part)] = part
                functions = [
                    key
                    for key, entry in vars(part).items()
                    if isinstance(entry, FunctionType | property) and (key in reached or is_called_by_syntax(key))
                ]
                self.entries(f"{part.__qualname__}.", vars(part), functions, names)

    def hooks(self, path: str, hooks: Sequence[Any], *tables: Mapping[Any, Any]) -> None:
        """The hooks in tables, but those of torch itself, such as counters and profilers have."""
        own = [hook for hook in hooks if not is_torchs(hook)]
        self.rows(path, enumerate(own), lambda: chain.from_iterable(table.values() for table in tables), Reads())

    def entries(
        self,
        prefix: str,
        space: Mapping[str, Any],
        keys: Collection[str],
        names: Reads,
        inner: Mapping[str, Keys] = EVERYTHING,
    ) -> None:
        """What a namespace holds under these keys; `inner` says what is read of collections there."""
        if keys:
            self.places.append(lambda: map(space.get, keys, repeat(NOTHING)))
            for key in keys:
                if key in space:
                    self.value(prefix + key, space[key], names, inner.get(key))

    def value(self, path: str, value: Any, names: Reads, keys: Keys = None) -> None:
        """`keys` are those that are read if it is a collection."""
        value = original_of(value)
        if keys is not None and type(value) in BY_KEYS:
            self.at_keys(path, value, keys, names)
            return
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
            case dict() | MappingProxyType() | list() | tuple() | deque() | set() | frozenset() if (
                len(value) > MOST_OF_ARRAY
            ):
                pass  # it would cost more than steps
            case dict() | MappingProxyType():
                self.rows(path, value.items(), lambda: chain(value, value.values()), names)
            case list() | tuple() | deque():
                self.rows(path, enumerate(value), lambda: value, names)
            case set() | frozenset():
                self.places.append(lambda: value)
                self.values[path] = frozenset(entry for entry in value if isinstance(entry, LEAVES))
            case _ if not isinstance(value, LEFT_OUT) and not is_of_torch(kind):
                self.space(f"{path}.", value, names)

    def at_keys(self, path: str, table: Any, keys: frozenset[Any], names: Reads) -> None:
        """The entries of a collection at these keys alone."""
        if not keys:
            return
        if isinstance(table, list | tuple | deque):
            places = [key for key in keys if isinstance(key, int)]
            get = partial(entry_at, table)
        else:
            places, get = list(keys), partial(entry_of, table)
        pairs = [(key, get(key)) for key in sorted(places, key=repr)]
        held = [(key, entry) for key, entry in pairs if entry is not NOTHING]
        self.rows(path, held, lambda: map(get, places), names)

    def rows(
        self,
        path: str,
        pairs: Iterable[tuple[Any, Any]],
        place: Callable[[], Iterable[Any]],
        names: Reads,
        spelling: str = "{}[{!r}]",
    ) -> None:
        """The entries of a collection."""
        self.places.append(place)
        self.owners[path] = path  # known, even if it is empty
        for key, entry in list(pairs):
            inner = spelling.format(path, key)
            self.owners[inner] = path
            self.value(inner, entry, names)

    def function(self, function: FunctionType, names: Reads) -> None:
        """What a user's function holds, and what it names in its file and in other files of the user's."""
        if is_installed(function.__module__):
            return
        title, code, cells = f"{function.__qualname__}.", function.__code__, function.__closure__ or ()
        named = reads_of(code)
        self.found |= named
        names |= named
        read = [pair for pair in zip(code.co_freevars, cells, strict=True) if pair[0] in named.cells]
        self.places.append(lambda: [held_in(cell) for _, cell in read])
        for key, cell in read:
            self.value(title + key, held_in(cell), names, named.cells[key])
        self.places.append(lambda: (function.__defaults__, function.__kwdefaults__, function.__code__))
        self.value(f"{title}__defaults__", function.__defaults__ or (), names)
        self.value(f"{title}__kwdefaults__", function.__kwdefaults__ or {}, names)
        self.globals(function.__module__, function.__globals__, names, named.globals, named)

    def globals(
        self, title: str, space: Mapping[str, Any], names: Reads, wanted: Mapping[str, Keys], named: Reads
    ) -> None:
        """What a file holds under these names, and what a function that reads `named` reads of files there."""
        met = self.globals_met.setdefault(id(space), {})
        keys = [
            key
            for key in sorted(wanted.keys() & space.keys())
            if key not in met or united(met[key], wanted[key]) != met[key]
        ]
        self.globals_met[id(space)] = both(met, wanted)
        modules = [space[key] for key in sorted(wanted.keys() & space.keys()) if isinstance(space[key], ModuleType)]
        self.entries(f"{title}.", space, [key for key in keys if not isinstance(space[key], ModuleType)], names, wanted)
        for module in modules:
            inner = {key: named.attributes.get(key) for key in named.names() & vars(module).keys()}
            inner = {key: keys for key, keys in inner.items() if is_read(key, vars(module)[key], named)}
            met = self.globals_met.get(id(vars(module)), {})
            if not is_installed(module.__name__) and both(met, inner) != met:
                self.globals(module.__name__, vars(module), names, inner, named)

    def space(self, prefix: str, value: Any, names: Reads) -> None:
        """The attributes of an object, or of a class, that are named, and the methods that calls of it run."""
        kind: Any = type(value)
        own = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        left_out = UNREAD | WRITTEN_BY_SAVING if is_installed(kind.__module__) else UNREAD
        keys = [key for key in own if key not in left_out and is_read(key, own[key], names)]
        self.owners |= {prefix + key: prefix for key in keys} | {prefix: prefix}
        self.places.append(lambda: [key for key in own if is_read(key, own[key], names)])
        self.entries(prefix, own, keys, names, names.attributes)
        if slots := [key for key in slot_names(kind) if key in names.attributes and hasattr(value, key)]:
            self.places.append(lambda: map(getattr, repeat(value), slots))
            for key in slots:
                self.value(prefix + key, getattr(value, key), names, names.attributes[key])
        for part in (value if isinstance(value, type) else kind).__mro__:
            if not is_installed(part.__module__):
                called = names.names() | {"__call__", "__getattr__"}
                keys = [
                    key
                    for key, entry in vars(part).items()
                    if key in called and not is_slot(entry) and (key not in names.names() or is_read(key, entry, names))
                ]
                self.entries(f"{part.__qualname__}.", vars(part), keys, names, names.attributes)

    def module(self, path: str, module: nn.Module, names: Reads) -> None:
        """A module outside of the model."""
        kind: Any = type(module)
        read, space = attributes_read(kind) if is_installed(kind.__module__) else names, vars(module)
        left_out = OF_MODULES | UNREAD
        wanted = [key for key in space if is_called_by_syntax(key) or is_read(key, space[key], read)]
        kept = [key for key in wanted if key not in left_out]
        self.entries(f"{path}.", space, ["training", *kept], read, read.attributes)
        for table in part_tables(module):
            self.rows(path, table.items(), table.values, names, "{}.{}")
        self.hooks(f"the hooks of {path}", users_hooks(module), *hook_tables(module))
        self.methods(type(module), names)


def is_read(name: str, value: object, reads: Reads) -> bool:
    """Whether code reads an attribute: of one that is only called, numbers, collections and tensors are others of the
    same name, as `log` may be."""
    if name in reads.attributes:
        return reads.attributes[name] != NO_KEYS or type(value) not in BY_KEYS
    return name in reads.called and not isinstance(value, (*LEAVES, *BY_KEYS, Tensor, numpy.ndarray))


def is_slot(entry: object) -> bool:
    return isinstance(entry, MemberDescriptorType)


def is_torchs(hook: Any) -> bool:
    """Whether a hook is a function or method of torch's own."""
    return isinstance(hook, FunctionType | MethodType) and is_of_torch(getattr(hook, "__func__", hook))
