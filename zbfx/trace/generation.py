"""`generate` of a model that is bound over several ranks. In: a model, or parts of it, that have a method of that name.
Out: an error where it is called, which names `step.export`: this rank has the trained values of its own stages alone.

The method is the class's again once its step is closed and the module has all values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from zbfx.errors import ZbfxError, listed
from zbfx.trace.left_behind import has_values, modules_of

METHOD = "generate"


class Generation:
    """Stands in a module for its method `generate`. `is_bound`: whether a step still trains the module."""

    def __init__(self, module: nn.Module, is_bound: Callable[[], bool]) -> None:
        self.module = weakref.ref(module)
        self.is_bound = weakref.WeakMethod(is_bound)  # the model outlives its steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, is_bound = self.module(), self.is_bound()
        assert module is not None, "it holds this"
        named = (*module.named_parameters(), *module.named_buffers())
        without = [name for name, tensor in named if not has_values(tensor)]
        if (is_bound is not None and is_bound()) or without:
            kind = type(module).__name__
            where = f"other ranks have values of {listed(without, 3)}" if without else "its stages are on several ranks"
            raise ZbfxError(
                f"{kind}.{METHOD} would run on this rank alone: the model is bound to a pipeline, and {where}. A "
                f"pipeline trains, and scores what was generated (step.forward). To generate, hand the weights over: "
                f"step.export(folder), on all ranks, writes what from_pretrained and serving engines load; "
                f"step.full_state_dict(everywhere=True) is what load_state_dict of another model takes"
            )
        return own_method(module)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """In a copy of the module, the method of the copy."""
        copied = memo.get(id(self.module()))
        return self if copied is None else own_method(copied)

    def __reduce__(self) -> tuple[Callable[[nn.Module], Any], tuple[nn.Module | None]]:
        return own_method, (self.module(),)


def own_method(module: nn.Module) -> Any:
    """The method as the module's class has it."""
    return getattr(type(module), METHOD).__get__(module)


def refuse_generation(is_bound: Callable[[], bool], *parts: Any) -> None:
    """Let every module of these parts that can generate refuse to while it is bound."""
    for module in modules_of(*parts):
        found = vars(module).get(METHOD)
        if callable(getattr(type(module), METHOD, None)) and (found is None or isinstance(found, Generation)):
            vars(module)[METHOD] = Generation(module, is_bound)
