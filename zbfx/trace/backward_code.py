"""Hooks and custom Functions that act beside the gradients, like a hook that keeps gradients in a list.

They run once, as the model is traced, and not in steps. What they write into buffers is part of the graph
(`backward_writes.py`); all else would be lost.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn

from zbfx._torch import under_tracer
from zbfx._torch.modules import backward_hook_tables
from zbfx._torch.tensors import pytree
from zbfx.errors import TraceError, listed

Hook = Callable[..., Any]


class BackwardCode:
    """Watches what Python code in a backward does. `tensors` gives the parameters and buffers of the model."""

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self.tensors = tensors
        self.are_there = False  # any hooks or custom Functions
        self.recompute = False  # whether the backward runs parts of the forward again
        self.idle: dict[str, None] = {}  # the lines of hooks that did nothing to gradients and buffers
        self.before: list[Tensor] = []  # what lived as the backward began

    def watch_modules(self, model: nn.Module) -> None:
        """Watch the hooks on the backwards of a model's modules."""
        for module in model.modules():
            for table in backward_hook_tables(module):
                for key, hook in table.items():
                    table[key] = self.watched(hook)

    def watched(self, hook: Hook) -> Hook:
        """A hook that does what `hook` does, and is noted if that is nothing to gradients and buffers."""

        def watch(*args: Any) -> Any:
            before = self.state(args)
            result = hook(*args)
            if is_unchanged(result, args) and self.state(args) == before:
                self.idle[hook_line(hook)] = None
            return result

        self.are_there = True
        return watch

    def state(self, args: tuple[Any, ...]) -> list[tuple[int, int]]:
        """Which tensors there are, and how often each was written."""
        given = [value for value in pytree.tree_leaves(args) if isinstance(value, Tensor)]
        return [(id(tensor), under_tracer.writes_into(tensor)) for tensor in (*given, *self.tensors().values())]

    def begin(self) -> None:
        """The backward begins."""
        if self.are_there:
            self.before = under_tracer.stand_ins()

    def refuse(self) -> None:
        """Raise `TraceError` if a hook did nothing that the graph holds, or if a tensor of the backward lives on."""
        if self.idle:
            raise TraceError(
                f"a hook on gradients, at {listed(self.idle)}, changes no gradient and writes no buffer: it would run "
                f"once, as the model is traced, and not in steps. Remove it, let it write into a buffer "
                f"(register_buffer), or look at .grad after the step"
            )
        kept = self.kept() if self.are_there and not self.recompute else []
        if kept:  # by garbage, perhaps: collecting takes longer than to trace a small model
            kept.clear()
            gc.collect()
            kept = self.kept()
        self.before = []
        if kept:
            raise TraceError(
                f"the backward keeps a tensor of shape {tuple(kept[0].shape)} outside of the graph, in a hook or in "
                f"the backward of a torch.autograd.Function: that would run once, as the model is traced, and not in "
                f"steps. Write what is to be kept into a buffer (register_buffer)"
            )

    def kept(self) -> list[Tensor]:
        """Stand-ins for tensors that came in the backward and are there still."""
        before = {id(tensor) for tensor in self.before}
        return [tensor for tensor in under_tracer.stand_ins() if id(tensor) not in before]


def is_unchanged(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether a hook returned nothing, or the very gradients that it was given (after the module, if it is one's)."""
    if result is None:
        return True
    given = next(value for value in args if not isinstance(value, nn.Module))
    pairs = [pytree.tree_leaves(value) for value in (result, given)]
    return len(pairs[0]) == len(pairs[1]) and all(map(is_, *pairs))


def hook_line(hook: Hook) -> str:
    code = getattr(hook, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(hook)
