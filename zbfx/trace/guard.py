"""What may not change between steps: what the trace took from the model, of which a graph holds one version.

That is the modes, layers, hooks and Python values of the model, and the dtypes and shapes of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from zbfx._torch.modules import own_buffers
from zbfx.errors import InputError, listed
from zbfx.modes import Modes
from zbfx.trace.code_reads import attributes_read, own_classes, reads_reached
from zbfx.trace.first_forward import OF_MODULES
from zbfx.trace.left_behind import users_hooks
from zbfx.trace.reached import Reached
from zbfx.trace.tensor_names import LOSS_PREFIX, canonical_names, named_tensors

NUMBERS = (bool, int, float, complex, str, torch.dtype, numpy.generic)
PLAIN = (*NUMBERS, FunctionType, BuiltinFunctionType)
MISSING = "nothing"


@dataclass(frozen=True)
class Guard:
    """What a model and its loss were when they were traced, by qualified name."""

    training: Mapping[str, bool]  # modes of modules
    trainable: Mapping[str, bool]  # `requires_grad` of parameters
    modules: Mapping[str, nn.Module]
    hooks: Mapping[str, tuple[object, ...]]  # of modules
    forwards: Mapping[str, object]  # what modules have in place of the forward of their class, or None
    values: Mapping[str, object]  # numbers, texts and functions that modules hold, or their classes
    layouts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # of parameters and buffers
    empty: frozenset[str]  # attributes and buffers that were None
    reached: Reached  # what lies elsewhere than in plain attributes of modules

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Any) -> Guard:
        modules = named_modules(model, loss_fn)
        return cls(
            {name: module.training for name, module in modules.items()},
            {
                name + inner: p.requires_grad
                for name, part in named_parts(model, loss_fn)
                for inner, p in part.named_parameters(remove_duplicate=False)
            },
            modules,
            {name: users_hooks(module) for name, module in modules.items()},
            {name: vars(module).get("forward") for name, module in modules.items()},
            {
                f"{name}.{attribute}".removeprefix("."): getattr(module, attribute)
                for name, module in modules.items()
                for attribute in plain_attributes(module)
            },
            {name: dtype_and_shape(tensor) for name, tensor in named_tensors(model, loss_fn).items()},
            frozenset(
                f"{name}.{attribute}".removeprefix(".")
                for name, module in modules.items()
                for table in (vars(module), own_buffers(module))
                for attribute, value in table.items()
                if value is None and attribute not in OF_MODULES
            ),
            Reached.of(model, loss_fn, named_tensors(model, loss_fn)),
        )

    def renewed(self, model: nn.Module, loss_fn: Any) -> Guard:
        """With what code reads elsewhere than on the model as it is now: a trace may have moved a counter on."""
        return replace(self, reached=Reached.of(model, loss_fn, named_tensors(model, loss_fn)))

    def check(
        self, model: nn.Module, loss_fn: Any, *, evaluation: bool = False, constants: Collection[int] = ()
    ) -> Guard:
        """Raises `InputError` if the model has changed since. In evaluation, modes and `requires_grad` may differ.
        `constants` are the ids of the tensors that graphs read, beside parameters and buffers. Returns what the model
        is now."""
        now = Guard.of(model, loss_fn)
        if not evaluation:
            self.check_flags(now)
        for name, module in self.modules.items():
            found = now.modules.get(name, module)
            if found is not module:
                raise InputError(
                    f"{name or 'the model'} was replaced since the model was traced: found another "
                    f"{type(found).__name__} than the {type(module).__name__} that is part of the graph. Compile again"
                )
        changed = sorted(set(self.modules) ^ set(now.modules) or set(self.trainable) ^ set(now.trainable))
        if changed:
            raise InputError(
                f"modules or parameters came or went since the model was traced: {changed[:5]}. Compile again"
            )
        for name, hooks in self.hooks.items():
            if not same_objects(hooks, now.hooks[name]):
                raise InputError(
                    f"the hooks of {name or 'the model'} changed since it was traced: those of then, {len(hooks)}, "
                    f"are part of the graph, and none else runs; found {len(now.hooks[name])}. Register hooks before "
                    f"compile, or compile again"
                )
        for name, forward in self.forwards.items():
            if now.forwards[name] is not forward:
                raise InputError(
                    f"{f'{name}.forward'.removeprefix('.')} was replaced since the model was traced; the graph holds "
                    f"the one of then. Put it back, or compile again"
                )
        is_whole = not evaluation or self.training == now.training  # a module may hold other values in another mode
        if is_whole:
            self.check_values(now)
        if (change := self.reached.change(now.reached, constants, outside=not is_whole)) is not None:
            refuse_other_value(*change)
        return now

    def undo(self, model: nn.Module, loss_fn: Any) -> None:
        """Take out of a copy of the model what forwards outside of steps have made since. New buffers go, and what was
        None is None again, so that another trace begins as the first one did."""
        for name, module in named_modules(model, loss_fn).items():
            prefix = f"{name}." if name else ""
            made = [key for key, value in own_buffers(module).items() if value is not None]
            new = [key for key in made if prefix + key not in self.layouts]
            for key in new:
                delattr(module, key)
            for key in [*new, *(vars(module).keys() - OF_MODULES)]:
                if prefix + key in self.empty:
                    setattr(module, key, None)

    def check_flags(self, now: Guard) -> None:
        """Raises `InputError` if a mode or a `requires_grad` has changed."""
        for name, before in self.training.items():
            if now.training.get(name, before) is not before:
                raise InputError(
                    f"{name or 'the model'} was in {mode(before)} mode when the model was traced, which is part of the "
                    f"graph; found {mode(not before)} mode. Switch back with .train({before}), use step.evaluate for "
                    f"eval mode, or compile again"
                )
        for name, before in self.trainable.items():
            if now.trainable.get(name, before) is not before:
                raise InputError(
                    f"{name} had requires_grad={before} when the model was traced, which is part of the graph; found "
                    f"{not before}. Switch back, or compile again"
                )

    def check_layouts(self, named: Mapping[str, Tensor], used: Collection[str]) -> None:
        """Raises `InputError` if a tensor of these names has another dtype or shape than when the model was traced."""
        layouts = {name: dtype_and_shape(named[name]) for name in sorted(used) if name in named}
        changed = [name for name, layout in layouts.items() if self.layouts.get(name, layout) != layout]
        if changed:
            before, after = self.layouts[changed[0]], layouts[changed[0]]
            (was, found), *_ = [(w, f) for w, f in zip(before, after, strict=True) if w != f]
            kind = "had shape" if isinstance(was, tuple) else "was"
            also = f" (so did {listed(changed[1:], 3)})" if changed[1:] else ""
            raise InputError(
                f"{changed[0]} {kind} {was} when the model was traced, which is part of the graph; found {found}"
                f"{also}. Convert the model before compile (model.bfloat16(), model.to(dtype)), change it back, or "
                f"compile again"
            )

    def check_values(self, now: Guard) -> None:
        """Raises `InputError` if a number, a text or a function that the graph holds has changed."""
        for name, before in self.values.items():
            after = now.values.get(name, MISSING)
            if after is not before and (type(after) is not type(before) or after != before):
                refuse_other_value(name, before, after)


def refuse_other_value(name: str, before: object, after: object) -> None:
    """Raise for a value that the graph holds, and that the model's code would read another one of."""
    was, found = in_message(before), in_message(after)
    found = found if found != was else f"another one ({found})"
    raise InputError(
        f"{name} was {was} when the model was traced, and is a constant of the graph; found {found}. Make a value that "
        f"changes a buffer (register_buffer) and fill it in place, or pass it as an input tensor; keep one that the "
        f"forward does not read elsewhere than on the model; or compile again"
    )


def in_message(value: object) -> str:
    """A value in a message: of a large one its beginning, of a tensor or a module its kind."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


@dataclass(frozen=True, eq=False)
class Source:
    """A model and its loss. `guard` holds what the trace took from them besides tensors, `modes` the state of torch
    that it followed, and `local`, by name, this process's parts of sharded parameters."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    guard: Guard
    modes: Modes
    local: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, Tensor]:
        """Parameters and buffers under each of their names."""
        return named_tensors(self.model, self.loss_fn)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The live tensors by canonical name. A tied tensor comes once, a sharded one as this process's part."""
        named = {**self.named, **self.local}
        return {name: named[name] for name in dict.fromkeys(canonical_names(self.model, self.loss_fn).values())}


def dtype_and_shape(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def named_parts(model: nn.Module, loss_fn: Any) -> list[tuple[str, nn.Module]]:
    """The model, and the loss if it is a module, each with the prefix of its names."""
    return [("", model), *([(LOSS_PREFIX, loss_fn)] if isinstance(loss_fn, nn.Module) else [])]


def named_modules(model: nn.Module, loss_fn: Any) -> dict[str, nn.Module]:
    """Every module of model and loss, under each of its names."""
    return {
        (prefix + inner).removesuffix("." if prefix else ""): module
        for prefix, part in named_parts(model, loss_fn)
        for inner, module in part.named_modules(remove_duplicate=False)
    }


def plain_attributes(module: nn.Module) -> Iterator[str]:
    """The names of the module's attributes that are numbers, texts or functions, and of the numbers and texts of its
    classes, as far as its code reads them."""
    own, read = vars(module), attributes_read(type(module))  # type: ignore[arg-type]
    read |= reads_reached([own.get("forward"), *users_hooks(module)], ())
    names = [name for name, value in own.items() if isinstance(value, PLAIN) and name != "training"]
    inherited = {name: value for owner in reversed(own_classes(type(module))) for name, value in vars(owner).items()}
    names += [
        name
        for name, value in inherited.items()
        if name not in own and isinstance(value, NUMBERS) and not name.startswith("__")
    ]
    return (
        name for name in names if name in read.attributes or (name in read.called and callable(getattr(module, name)))
    )


def same_objects(before: Collection[object], after: Collection[object]) -> bool:
    """Whether two collections hold one and the same objects, in one order."""
    return len(before) == len(after) and all(map(is_, before, after))


def mode(training: bool) -> str:
    return "train" if training else "eval"
