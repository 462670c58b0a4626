"""Values beside the annotations of the fields that they are to fill: what was read from a file is what code expects.

Takes   a value, and an annotation: classes, unions, `Any`, and tuples, sequences, sets and mappings of them.
Gives   whether the value is such a one; and the records that the annotations of a record lead to.
Raises  nothing.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints


def is_named_tuple(owner: Any) -> bool:
    return isinstance(owner, type) and issubclass(owner, tuple) and hasattr(owner, "__match_args__")


def is_record(owner: Any) -> bool:
    """Whether a class is a frozen record: a dataclass or a named tuple."""
    return isinstance(owner, type) and (is_dataclass(owner) or is_named_tuple(owner))


@cache
def fields_of(owner: type) -> dict[str, Any]:
    """The fields of a record that make one, each with its annotation."""
    hints = get_type_hints(owner)
    if is_named_tuple(owner):
        return hints
    return {field.name: hints[field.name] for field in fields(owner) if field.init}


def kinds_within(*owners: type) -> dict[str, type]:
    """The records and enumerations that fields of these ones may hold, at any depth, by name; these ones included."""
    found: dict[str, type] = {}
    pending: list[Any] = list(owners)
    while pending:
        hint = pending.pop()
        if isinstance(hint, type) and (is_record(hint) or issubclass(hint, Enum)) and hint.__name__ not in found:
            found[hint.__name__] = hint
            pending += fields_of(hint).values() if is_record(hint) else ()
        pending += get_args(hint)
    return found


def conforms(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says. Records inside it count by their class alone."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None:
        return value is None
    if origin in (Union, types.UnionType):
        return any(conforms(value, one) for one in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(conforms(one, kind) for one, kind in paired(value, inner))
    if origin is not None and issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else ()
        return isinstance(value, Mapping) and all(conforms(k, inner[0]) and conforms(v, inner[1]) for k, v in pairs)
    if origin is not None and issubclass(origin, Sequence | Set):
        is_one = isinstance(value, tuple if issubclass(origin, Sequence) else frozenset)
        return is_one and all(conforms(entry, inner[0]) for entry in value)
    return isinstance(value, (int, float) if hint is float else origin or hint)


def paired(values: tuple[Any, ...], hints: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """The entries of a tuple, each with its annotation; one that fits nothing where there are too many or too few."""
    if len(hints) == 2 and hints[1] is Ellipsis:
        yield from ((value, hints[0]) for value in values)
    elif len(values) == len(hints):
        yield from zip(values, hints, strict=True)
    else:
        yield values, types.NoneType
