"""What the code that calls of a module reach reads by name. In: a class, or functions. Out: a `Reads`."""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import nn

from zbfx.trace.bytecode import Reads, reads_of
from zbfx.trace.values_read import held_in, is_installed

NOT_OF_FORWARDS = {"__init__", "__repr__", "__str__", "__del__"}
MOST_OF_TABLE = 1 << 10  # entries of a collection of functions that are looked at


@cache
def attributes_read(owner: Any) -> Reads:
    """What is read by the code of a module's classes that calls of it reach: its forward, what that calls by name in
    its classes and files, and so on. An attribute that only other code reads, as that of a training loop or a log, may
    change freely. Of installed libraries' modules, all code of their methods and files counts."""
    classes = own_classes(owner)
    if not is_installed(owner.__module__):
        return reads_reached([], classes)
    files = [vars(sys.modules[part.__module__]) for part in classes if part.__module__ in sys.modules]
    reads = Reads()
    for space in (*map(vars, classes), *files):
        for value in space.values():
            for code in codes_of(value):
                reads |= reads_of(code)
    return reads


def reads_reached(roots: Iterable[object], classes: Iterable[type]) -> Reads:
    """What is read by these functions, by the forwards of these classes, and by all users' functions that they name."""
    reads, seen, waiting = Reads(), dict[int, object](), list(roots)
    spaces: list[Mapping[str, Any]] = [vars(part) for part in classes]
    for space in spaces:
        waiting += [space[name] for name in space if is_called_by_syntax(name)]
    while waiting:
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if id(value) in seen:
                continue
            seen[id(value)] = value  # held, so that no other one gets its address
            for function in functions_of(value):
                found = reads_of(function.__code__)
                reads |= found
                named = [function.__globals__.get(name) for name in found.globals]
                waiting += [one for one in (*named, *map(held_in, function.__closure__ or ())) if is_users(one)]
            if kind in (dict, list, tuple) and len(cast("Collection[Any]", value)) <= MOST_OF_TABLE:
                table: Any = value
                waiting += filter(is_users, table.values() if kind is dict else table)
            elif kind is ModuleType:
                spaces.append(vars(value))
            elif not issubclass(kind, FunctionType | nn.Module):
                parts = (value if issubclass(kind, type) else kind).__mro__  # type: ignore[attr-defined]
                spaces += [vars(part) for part in parts if not is_installed(part.__module__)]
        names = reads.names()
        entries = (space[name] for space in spaces for name in names & space.keys())
        waiting = [value for value in entries if id(value) not in seen and functions_of(value)]
    return reads


def is_called_by_syntax(name: str) -> bool:
    return name == "forward" or (name.startswith("__") and name not in NOT_OF_FORWARDS)


def is_users(value: object) -> bool:
    """Whether code of a user's may lie in a value. Its type says so: a proxy may raise where it is asked."""
    kind = type(value)
    if issubclass(kind, FunctionType | type | ModuleType):
        of: Any = value
        return not is_installed(of.__name__ if kind is ModuleType else of.__module__)
    return kind in (dict, list, tuple, partial, MethodType) or not is_installed(kind.__module__)


def codes_of(value: object) -> list[CodeType]:
    """The code of a function, of a static, class or decorated method, or of a property. `__init__` is left out."""
    return [function.__code__ for function in functions_of(value) if function.__name__ != "__init__"]


def functions_of(value: Any) -> list[FunctionType]:
    """The function of a value, and what it decorates."""
    kind, found = type(value), list[FunctionType]()
    while True:
        if issubclass(kind, FunctionType):
            found.append(value)
            value = vars(value).get("__wrapped__")
        elif issubclass(kind, property):
            value = value.fget
        elif issubclass(kind, staticmethod | classmethod | MethodType):
            value = value.__func__
        elif issubclass(kind, partial):
            value = value.func
        else:
            break
        kind = type(value)
    return found


def own_classes(owner: type) -> tuple[type, ...]:
    """A module's classes before `nn.Module`, its own first."""
    return owner.__mro__[: owner.__mro__.index(nn.Module)]


@cache
def attributes_set(owner: Any) -> frozenset[str]:
    """The names of attributes, of any object, that methods of a module's classes set, `__init__` left out."""
    codes = (code for part in own_classes(owner) for value in vars(part).values() for code in codes_of(value))
    return frozenset(
        str(step.argval) for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"
    )
