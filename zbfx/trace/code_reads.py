"""Which attributes the code of a module's classes reads, and which it sets. In: a class. Out: names."""

from __future__ import annotations

import dis
import sys
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

READS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}  # instructions of Python that read an attribute


@cache
def attributes_read(owner: Any) -> frozenset[str]:
    """The names of attributes, of any object, that the code of a module's classes reads. That is the code of their
    methods and of all functions in their files. Texts in it that could be names count as read, as `getattr` may read
    them. An attribute that no code reads may change freely, as a counter does."""
    classes = own_classes(owner)
    files = [vars(sys.modules[part.__module__]) for part in classes if part.__module__ in sys.modules]
    codes = (code for space in (*map(vars, classes), *files) for value in space.values() for code in codes_of(value))
    return frozenset[str]().union(*map(names_read, codes))


@cache
def names_read(code: CodeType) -> frozenset[str]:
    """Those that this code reads, and the code inside it."""
    found = {str(step.argval) for step in dis.get_instructions(code) if step.opname in READS}
    found |= {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    return frozenset(found).union(*(names_read(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def codes_of(value: object) -> list[CodeType]:
    """The code of a function, of a static, class or decorated method, or of a property. `__init__` is left out."""
    inner = [getattr(value, name, None) for name in ("fget", "__func__", "__wrapped__")]
    functions = [f for f in (value, *inner) if isinstance(f, FunctionType)]
    return [function.__code__ for function in functions if function.__name__ != "__init__"]


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
