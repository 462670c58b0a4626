"""What code reads by name: attributes, globals and closures, and of a collection that it reads by constant keys alone,
which ones. In: code. Out: a `Reads`. What instructions do with the stack is followed in straight lines, of Python 3.11
and later; where one is not known, all that lies there counts as read."""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

Keys = frozenset[Any] | None  # those of a collection that are read; None: all that is in it
NO_KEYS: Keys = frozenset()
ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}  # instructions of Python that read an attribute
GLOBALS, CELLS = {"LOAD_GLOBAL", "LOAD_NAME"}, {"LOAD_DEREF", "LOAD_CLASSDEREF"}
OF_NO_EFFECT = {"CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "PRECALL", "RESUME"}
TAKEN = {"BINARY_OP": 2, "BINARY_SUBSCR": 2, "COMPARE_OP": 2, "STORE_SUBSCR": 3, "DELETE_SUBSCR": 2}  # by instruction
BY_TEXTS = {"getattr", "hasattr", "vars", "__dict__", "attrgetter", "methodcaller"}  # what reads names in texts
# methods whose calls read nothing, where what they return is not used
WRITES = {"append", "clear", "extend", "insert", "pop", "remove"}
WRITES |= {"add", "appendleft", "discard", "setdefault", "update"}
AT_KEY = {"get", "setdefault"}


@dataclass(frozen=True)
class Reads:
    """By name, which keys are read where a collection is found there. `called` are attributes that are called at once:
    functions, no values."""

    attributes: Mapping[str, Keys] = field(default_factory=dict)
    globals: Mapping[str, Keys] = field(default_factory=dict)
    cells: Mapping[str, Keys] = field(default_factory=dict)
    called: frozenset[str] = frozenset()

    def __or__(self, other: Reads) -> Reads:
        return Reads(
            both(self.attributes, other.attributes),
            both(self.globals, other.globals),
            both(self.cells, other.cells),
            self.called | other.called,
        )

    def names(self) -> frozenset[str]:
        """Of attributes, called or not."""
        return self.called.union(self.attributes)


def both(one: Mapping[str, Keys], other: Mapping[str, Keys]) -> Mapping[str, Keys]:
    if not one or not other:
        return one or other
    return {**one, **{name: united(one.get(name, NO_KEYS), keys) for name, keys in other.items()}}


def united(one: Keys, other: Keys) -> Keys:
    return None if one is None or other is None else one | other


@cache
def reads_of(code: CodeType) -> Reads:
    """What this code reads, and the code inside it. Texts in it that could be names count as attributes if it has
    `getattr` or the like."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in OF_NO_EFFECT]
    found: dict[str, dict[str, Keys]] = {"attributes": {}, "globals": {}, "cells": {}}
    called = set[str]()
    for place, step in enumerate(steps):
        name = str(step.argval)
        if step.opname in ATTRIBUTES and is_method(step):
            called.add(name)
        for kind, instructions in (("attributes", ATTRIBUTES), ("globals", GLOBALS), ("cells", CELLS)):
            if step.opname in instructions and not (step.opname in ATTRIBUTES and is_method(step)):
                found[kind][name] = united(found[kind].get(name, NO_KEYS), keys_used(steps, place))
    if BY_TEXTS & {*found["globals"], *found["attributes"], *called}:
        found["attributes"] |= {text: None for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    reads = Reads(found["attributes"], found["globals"], found["cells"], frozenset(called))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            reads |= reads_of(inner)
    return reads


def keys_used(steps: list[dis.Instruction], place: int) -> Keys:
    """Which keys of a collection are read by what takes it from the stack, where the instruction at `place` put it.
    None of them, by a write."""
    taker, above = taker_of(steps, place)
    if taker is None:
        return None
    step, following = steps[taker], steps[taker + 1]
    if step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") and above == 1:
        return NO_KEYS
    if step.opname == "BINARY_SUBSCR" and above == 1 and puts_constant(steps[taker - 1]) and taker == place + 2:
        inner = keys_used(steps, taker)
        return inner if inner == NO_KEYS else frozenset({steps[taker - 1].argval})
    if step.opname in ATTRIBUTES and is_method(step):
        call, _ = taker_of(steps, taker)
        if step.argval in WRITES and call is not None and steps[call + 1].opname == "POP_TOP":
            return NO_KEYS
        if step.argval in AT_KEY and puts_constant(following):
            return frozenset({following.argval})
    return None


def taker_of(steps: list[dis.Instruction], place: int) -> tuple[int | None, int]:
    """The instruction that takes what that at `place` puts on the stack, and how many values lie above it then. None if
    one in between is not known."""
    above = 0
    for later in range(place + 1, len(steps) - 1):
        step = steps[later]
        taken, left = stack_use(step)
        if taken is None:
            return None, above
        if taken > above:
            return later, above
        above += left - taken
    return None, above


def stack_use(step: dis.Instruction) -> tuple[int | None, int]:
    """How many values an instruction takes from the stack, or None, and how many it leaves there."""
    name, amount = step.opname, step.arg or 0
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        return 1, 2 if is_method(step) else 1
    if name.startswith("LOAD_") and name != "LOAD_SUPER_ATTR":
        return 0, dis.stack_effect(step.opcode, step.arg)
    if name == "CALL":
        return amount + 2, 1
    if name.startswith("BUILD_") and name != "BUILD_CONST_KEY_MAP":
        taken = 1 - dis.stack_effect(step.opcode, step.arg)
        return taken, 1
    if name.startswith(("UNARY_", "FORMAT_")):
        return 1 - dis.stack_effect(step.opcode, step.arg), 1
    return TAKEN.get(name), 0 if name.endswith("E_SUBSCR") else 1


def is_method(step: dis.Instruction) -> bool:
    """Whether the attribute is called at once."""
    flagged = sys.version_info >= (3, 12) and bool((step.arg or 0) & 1)
    return step.opname == "LOAD_METHOD" or flagged


def puts_constant(step: dis.Instruction) -> bool:
    return step.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and isinstance(step.argval, str | int | float | bytes | bool)
