"""What Python code has kept, beside the values of tensors: equal to that of a later time if none of it has changed.

Takes   objects, and how many others may be reached from them.
Gives   a `PythonState`: which values and objects are in collections, in attributes of objects and of users' classes, in
        closures, and in the globals that users' functions name. Tensors count by identity.
        What libraries keep in globals of their own is left out: it is taken to decide nothing.
Raises  `Unseen` where an object does not show its state, or where more is reached.
Source  ours. `values_read.py` asks what one function reads, and compares with other functions; this walk sees changes
        alone, of all that is reached, and is some ten times as fast.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import weakref
from abc import ABC
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zbfx.trace.refusals import LIBRARY_FOLDERS
from zbfx.trace.values_read import held_in, is_installed, names_in_code

BY_VALUE = {int, str, bytes, slice, range, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None)}
BY_VALUE |= {type(...), type(NotImplemented)}
BY_TYPE = {bool, float, complex}  # each may be equal to one of another type
# Objects that keep nothing, or nothing that decides what a model computes. What functions name in modules, they reach.
LEFT_OUT = (
    Tensor,
    torch.Generator,
    ModuleType,
    CodeType,
    Enum,
    PurePath,
    re.Pattern,
    logging.Logger,
    type(threading.Lock()),
    type(threading.RLock()),
    TypeVar,
    UnionType,
    GenericAlias,
    *({*map(type, vars(ABC).values())} - {str, tuple, frozenset, type(None)}),  # what registers subclasses
    ClassMethodDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
MEMO = type(lru_cache(len))  # copied by its name alone
OF_CLASS_STATEMENTS, OF_C = 1 << 9, 1 << 8  # flags of types: on the heap, immutable
POINTER = 8


class Unseen(Exception):
    """There is state that a walk cannot see."""


@dataclass(frozen=True, eq=False)
class PythonState:
    """What a walk has found, in its order. `held` are the objects, so that no other one gets the address of one."""

    found: list[Any]
    held: dict[int, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonState) and self.found == other.found

    @classmethod
    def of(cls, *roots: Any, most: int) -> PythonState:
        """The state that these objects and at most so many others keep."""
        try:
            return cls.walked(roots, most)
        except Unseen:
            raise
        except Exception as error:  # of an object that cannot be copied, say
            raise Unseen(f"an object does not show its state ({type(error).__name__})") from error

    @classmethod
    def walked(cls, roots: Sequence[Any], most: int) -> PythonState:
        found, held, waiting = list[Any](), dict[int, Any](), list(roots)
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind in BY_VALUE:
                found.append(value)
            elif kind in BY_TYPE:
                found.append((kind, value))
            elif kind is MethodType:  # made anew at each access
                waiting += (value.__func__, value.__self__)
            else:
                found.append(id(value))
                if id(value) not in held:
                    held[id(value)] = value
                    if len(held) > most:
                        raise Unseen(f"it reaches more than {most} objects")
                    if kind is dict:
                        waiting += value
                        waiting += value.values()
                    elif kind is list or kind is tuple:
                        waiting += value
                    elif not issubclass(kind, LEFT_OUT):
                        waiting += kept_in(value, kind)
        return cls(found, held)


def kept_in(value: Any, kind: type) -> Iterator[Any]:
    """What an object keeps by itself, and what its class does."""
    match value:
        case nn.Module():
            yield from attributes(value, kind)
        case FunctionType():
            yield from kept_in_function(value)
        case type():
            yield from kept_in_class(value)
        case BuiltinFunctionType():
            yield value.__self__
        case partial():
            yield from (value.func, value.args, value.keywords, *vars(value).values())
        case staticmethod() | classmethod():
            yield value.__func__
        case property():
            yield from (value.fget, value.fset, value.fdel)
        case cached_property():
            yield value.func
        case weakref.ReferenceType():
            yield value()
        case MappingProxyType():
            yield from (*value.keys(), *value.values())
        case int() | float() | complex() | str() | bytes():
            yield from (repr(value), *attributes(value, kind))
        case dict():
            yield from (*value.keys(), *value.values(), *attributes(value, kind))
        case list() | tuple() | set() | frozenset() | deque():
            yield from (*value, *attributes(value, kind))
        case _ if is_of_python(kind):
            if not is_of_torch(kind):
                yield from attributes(value, kind)
        case _ if kind is not MEMO and is_copied(kind):  # itertools.count, arrays of numpy
            yield from entries_of_tuples(value.__reduce__())
        case _:
            raise Unseen(f"an object of {kind.__module__}.{kind.__qualname__} does not show its state")


def entries_of_tuples(value: Any) -> Iterator[Any]:
    """The entries of tuples in tuples, which are made anew each time."""
    if type(value) is tuple:
        for entry in value:
            yield from entries_of_tuples(entry)
    else:
        yield value


def attributes(value: Any, kind: type) -> Iterator[Any]:
    """The attributes of an object, and its class if it is a user's."""
    own = getattr(value, "__dict__", None)
    if own is not None:
        yield from own  # names
        yield from own.values()
    yield from (getattr(value, name, None) for name in slot_names(kind))
    if not is_installed(kind.__module__):
        yield kind


def kept_in_function(function: FunctionType) -> Iterator[Any]:
    if is_installed(function.__module__):
        return
    yield from (function.__code__, function.__defaults__, function.__kwdefaults__, *vars(function).values())
    yield from map(held_in, function.__closure__ or ())
    names = code_names(function.__code__)
    seen, spaces = (
        set[int](),
        [function.__globals__, {name: sys.modules[name] for name in names if name in sys.modules}],
    )
    while spaces:
        space = spaces.pop()
        seen.add(id(space))
        for name in names & space.keys():
            if not isinstance(value := space[name], ModuleType):
                yield value
            elif not is_installed(value.__name__) and id(vars(value)) not in seen:
                spaces.append(vars(value))


def kept_in_class(owner: type) -> Iterator[Any]:
    for part in owner.__mro__:
        if not is_installed(part.__module__):
            yield from vars(part).values()


@lru_cache(maxsize=4096)
def code_names(code: CodeType) -> frozenset[str]:
    return names_in_code(code)


@lru_cache(maxsize=4096)
def slot_names(kind: type) -> tuple[str, ...]:
    """The names of the attributes that objects of a class have in slots."""
    own = (item for part in kind.__mro__ for item in vars(part).items())
    return tuple(dict.fromkeys(name for name, value in own if isinstance(value, MemberDescriptorType)))


@lru_cache(maxsize=4096)
def is_of_python(kind: type) -> bool:
    """Whether class statements alone make a class: all that its objects keep is in attributes."""
    flags = [part.__flags__ for part in kind.__mro__[:-1]]
    most = object.__basicsize__ + POINTER * (len(slot_names(kind)) + 2)  # the dict of attributes, and weak references
    return all(one & OF_CLASS_STATEMENTS and not one & OF_C for one in flags) and kind.__basicsize__ <= most


def is_copied(kind: type) -> bool:
    """Whether a class says how its objects are copied, state and all."""
    return any("__reduce__" in vars(part) for part in kind.__mro__[:-1])


@lru_cache(maxsize=4096)
def is_of_torch(kind: type) -> bool:
    """Whether a class is one of torch's or of this library's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and file.startswith(LIBRARY_FOLDERS)
