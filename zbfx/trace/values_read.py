"""What a function reads besides its arguments, as a value that is equal as long as all of it is unchanged.

Takes   a path, or a function, method, partial or callable object of a user's.
Gives   nested tuples: code, and what it reads of globals, closures and defaults, and of the attributes of modules,
        classes and objects whose names stand in code that is reached. Plain values count by type and value, Python's
        collections by content, tensors by identity and layout, as graphs read their values when they run, and what
        installed libraries define by identity. What nobody can look into, as an iterator, is equal to nothing.
Source  ours.
"""

from __future__ import annotations

import sys
from collections import UserDict, UserList
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn

from zbfx._torch.modules import hook_tables, own_buffers, own_modules, own_parameters
from zbfx.trace.refusals import OWN_FOLDER

PLAIN_TYPES = {bool, int, float, complex, str, bytes, slice, range, torch.dtype, torch.device, type(None), type(...)}
INSTALLED = (str(Path(torch.__file__).parents[1]), OWN_FOLDER)  # where libraries lie
OF_PYTHON = 1 << 9  # the flag of types that class statements make


@dataclass(frozen=True, eq=False)
class Same:
    """An object that is equal to itself alone. It is held, so that no other one gets its address."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def values_read(one: Any) -> Any:
    """What a function is and reads now: equal to that of another one, or of a later time, if both give the same for the
    same arguments."""
    names = frozenset[str]()
    while True:
        reader = ReadValues(names)
        found = reader.of(one)
        if reader.found <= names:
            return found
        names |= reader.found  # code that is reached may read more of what was seen before it


class ReadValues:
    """One walk over all that is reached, with the attributes of these names; `found` has the names in its code."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names, self.found = names, set[str]()
        self.seen: dict[int, tuple[int, Any]] = {}  # by address, the place in the order of all, and the object

    def of(self, value: Any) -> Any:
        if type(value) in PLAIN_TYPES:
            return type(value), repr(value)
        if isinstance(value, MethodType):
            return self.of(value.__func__), self.of(value.__self__)
        if id(value) in self.seen:
            return (self.seen[id(value)][0],)
        self.seen[id(value)] = len(self.seen), value
        return type(value), *self.parts(value)

    def parts(self, value: Any) -> Iterator[Any]:
        match value:
            case FunctionType():
                yield from self.of_function(value)
            case partial():
                yield from map(self.of, (value.func, value.args, value.keywords))
            case itemgetter() | attrgetter() | methodcaller():
                yield self.of(value.__reduce__())
            case staticmethod() | classmethod():
                yield self.of(value.__func__)
            case property():
                yield self.of(value.fget)
            case cached_property():
                yield self.of(value.func)
            case CellType():
                yield self.of(held_in(value))
            case Tensor():
                yield from (Same(value), tuple(value.shape), value.dtype, value.device, value.requires_grad)
            case ModuleType() | type():
                yield from (Same(value), *self.of_space(value))
            case BuiltinFunctionType():
                yield from (value.__name__, self.of(value.__self__))
            case Enum() | MethodDescriptorType() | WrapperDescriptorType() | MemberDescriptorType():
                yield Same(value)
            case dict() | MappingProxyType():
                yield from ((self.of(key), self.of(entry)) for key, entry in value.items())
                yield from self.attributes(value)
            case list() | tuple():
                yield from (*map(self.of, value), *self.attributes(value))
            case set() | frozenset():
                yield from (frozenset(map(self.of, value)), *self.attributes(value))
            case UserDict() | UserList():
                yield from (self.of(value.data), *self.attributes(value))
            case _ if all(part.__flags__ & OF_PYTHON for part in type(value).__mro__[:-1]):
                yield from (Same(value), *self.attributes(value))
                if isinstance(value, nn.Module):
                    yield from self.of_layer(value)
            case _:
                yield Same(object())

    def of_function(self, function: FunctionType) -> Iterator[Any]:
        if is_installed(function.__module__):
            yield Same(function)
            return
        names = names_in_code(function.__code__)
        self.found |= names
        yield function.__code__
        yield from map(self.of, (function.__closure__, function.__defaults__, function.__kwdefaults__))
        space = function.__globals__
        yield from ((name, self.of(space[name])) for name in sorted(names) if name in space)

    def of_space(self, owner: ModuleType | type) -> Iterator[Any]:
        """What is read of a module or class of a user's, and the methods that syntax calls."""
        for part in owner.__mro__ if isinstance(owner, type) else (owner,):
            if not is_installed(part.__module__ if isinstance(part, type) else part.__name__):
                own = vars(part)
                functions = {name for name, value in own.items() if isinstance(value, FunctionType)}
                called = {name for name in functions if name.startswith("__") and own[name] is not own.get("__init__")}
                yield from ((name, self.of(own[name])) for name in sorted((self.names | called) & own.keys()))

    def attributes(self, value: Any) -> Iterator[Any]:
        """What is read of an object and its class."""
        yield self.of(type(value))
        own = getattr(value, "__dict__", {})
        yield from ((name, self.of(own[name])) for name in sorted((self.names | {"__wrapped__"}) & own.keys()))
        for part in type(value).__mro__:
            slots = {name: slot for name, slot in vars(part).items() if isinstance(slot, MemberDescriptorType)}
            yield from ((name, self.of(getattr(value, name, None))) for name in sorted(self.names & slots.keys()))

    def of_layer(self, module: nn.Module) -> Iterator[Any]:
        """What calls of a layer read: its mode, tensors and layers, its forward, and the settings of torch's own."""
        yield from (module.training, self.of(module.forward))
        own = (own_parameters(module), own_buffers(module), own_modules(module))
        yield from map(self.of, (*own, *hook_tables(module)))
        if is_installed(type(module).__module__):
            yield from ((name, self.of(value)) for name, value in vars(module).items() if type(value) in PLAIN_TYPES)


def names_in_code(code: CodeType) -> frozenset[str]:
    """The names and texts in code, and in the code inside it: `getattr` reads names in texts."""
    texts = {value for value in code.co_consts if isinstance(value, str)}
    inner = (names_in_code(value) for value in code.co_consts if isinstance(value, CodeType))
    return frozenset({*code.co_names, *texts}).union(*inner)


def held_in(cell: CellType) -> Any:
    """What a closure holds; None before it holds anything."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def is_installed(module_name: str | None) -> bool:
    """Whether a module is Python's, or one of an installed library."""
    if module_name is None or module_name.partition(".")[0] in sys.stdlib_module_names:
        return module_name is not None
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file is not None and file.startswith(INSTALLED)
