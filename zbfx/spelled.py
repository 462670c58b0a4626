"""A value -> a text that is the same in every process: what ranks compare, and what digests are made of.

No text has an address, the order of a dict or set, or the index of a device in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx

ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def spelled(value: Any) -> str:
    """Collections and records by what they hold, functions and classes by name, tensors by shape and dtype, nodes of
    graphs by name. Other values as `repr` has them, without addresses."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)} {value.dtype}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, list | tuple):
        return f"({', '.join(map(spelled, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{spelled(key)}: {spelled(entry)}' for key, entry in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(spelled, value)))}}}"
    if isinstance(value, slice):
        return f"slice{spelled((value.start, value.stop, value.step))}"
    if is_dataclass(value):
        return f"{type(value).__name__}{spelled([getattr(value, field.name) for field in fields(value)])}"
    return ADDRESS.sub("", repr(value))
