"""Parts of a model that torch.compile has compiled already: their originals are traced."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from zbfx._torch.modules import is_compiled, is_optimized, optimized_again, original_of
from zbfx.errors import listed


@contextmanager
def without_compiling() -> Iterator[None]:
    """Run what torch.compile has compiled as it was before, whatever was compiled of it already."""
    with torch.compiler.set_stance("force_eager"):
        yield


def note_of_compiled(model: nn.Module, loss_fn: Any) -> tuple[str, ...]:
    """A line that names the compiled parts, if there are any."""
    roots = [("", model), ("loss_fn", loss_fn)]
    found = dict.fromkeys(name for prefix, root in roots for name in compiled_in(prefix, root))
    if not found:
        return ()
    return (f"traced as if torch.compile had not been called on them: {listed(found)}. backend= compiles the stages",)


def compiled_in(prefix: str, root: Any) -> Iterator[str]:
    """The names of compiled modules, of compiled functions that modules hold, and of those that their methods name."""
    if not isinstance(root, nn.Module):
        yield from (prefix,) if is_compiled(root) else ()
        return
    for name, module in root.named_modules(prefix=prefix):
        if is_compiled(module):
            yield name
            continue
        classes = reversed([kind for kind in type(module).__mro__ if kind not in nn.Module.__mro__])
        own = {attribute: value for kind in classes for attribute, value in vars(kind).items()} | vars(module)
        for attribute, value in own.items():
            if any(isinstance(item, FunctionType) and is_compiled(item) for item in items_of(value)):
                yield f"{name}.{attribute}".removeprefix(".")
            elif isinstance(value, FunctionType):
                named = {n: value.__globals__[n] for n in value.__code__.co_names if n in value.__globals__}
                yield from (n for n, other in named.items() if is_compiled(other))


def items_of(value: Any) -> Collection[Any]:
    """The items of a list, a tuple or a dict; of any other value the value itself."""
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict) else (value,)


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a module, made with `memo`, in which compiled parts are the copy's own."""
    for part in reversed(list(module.modules())):
        if is_optimized(part) and id(part) not in memo:  # else the copy is what its original makes of itself
            memo[id(part)] = optimized_again(part, partial(copy.deepcopy, memo=memo))
    copied = copy.deepcopy(module, memo)
    rebind_compiled(copied, memo)
    return copied


def rebind_compiled(module: nn.Module, memo: dict[int, Any]) -> None:
    """In a deep copy of a module, made with `memo`, put methods of the copy in the place of compiled methods, which
    are still those of the module that was copied. (A copy of what `torch.compile` made of a module has its own.)"""
    for part in module.modules():
        for attribute, value in vars(part).items():
            original = original_of(value)
            if isinstance(original, MethodType) and original is not value and id(original.__self__) in memo:
                vars(part)[attribute] = copy.deepcopy(original, memo)
