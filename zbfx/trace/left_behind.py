"""Tensors of a model whose values are on other ranks. In: the model of a pipeline that is bound over several ranks.
Out: an error where it is called, or asked for a `state_dict`, a copy or a pickle: some of the values would be old ones.

A tensor is left behind from a step of a pipeline that trains it on other ranks until something writes into it here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from zbfx._torch.modules import (
    forward_pre_hooks,
    hook_tables,
    own_buffers,
    own_parameters,
    persistent_buffers,
    state_dict_pre_hooks,
)
from zbfx._torch.tensors import version_of
from zbfx.errors import ZbfxError, listed

OF_STATE_DICT = 2  # arguments of hooks before a `state_dict`, after the module; hooks before a forward get one
WITH_STATE = (
    "this state_dict",
    "Call step.full_state_dict(), on all ranks, for the whole model; step.named_parameters() and step.named_buffers() "
    "are what this rank has. To copy or pickle the model, make another one and load the whole into it",
)
WITH_FORWARD = (
    "this forward",
    "Call step.forward(...) for outputs and step.evaluate(...) for losses, on all ranks; or load the whole here first: "
    "model.load_state_dict(step.full_state_dict(everywhere=True))",
)


def leave_behind(tensor: Tensor) -> None:
    """Note that other ranks train this tensor from now on."""
    if not tensor.is_inference():
        tensor.zbfx_left_behind = version_of(tensor)  # type: ignore[attr-defined]


def is_left_behind(tensor: Tensor) -> bool:
    """Whether nothing has written into a tensor since other ranks have trained it."""
    return not tensor.is_inference() and getattr(tensor, "zbfx_left_behind", None) == version_of(tensor)


def take_over(tensors: Iterable[Tensor]) -> None:
    """Note that these tensors, which others trained, have the values of the others here: this rank trains them now."""
    for tensor in tensors:
        del tensor.zbfx_left_behind  # type: ignore[attr-defined]


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has data, and not those of before other ranks trained it."""
    return not (tensor.is_meta or is_left_behind(tensor))


def refuse_left_behind(names: Iterable[str]) -> None:
    """Raise if there are tensors that a rank is going to start from, and that others have trained meanwhile."""
    if behind := list(names):
        raise ZbfxError(
            f"a pipeline that was bound before has trained {listed(behind, 3)} on other ranks, and this one, which is "
            f"cut elsewhere, would start from their old values here. Load them first, on every rank: "
            f"model.load_state_dict(step.full_state_dict(everywhere=True)), with the step of that pipeline"
        )


def nothing(*_: Any) -> None:
    """What becomes of the look-out in copies of a model that has all values."""


def make_nothing() -> Callable[..., None]:
    return nothing


class LookOut:
    """A hook of every module of a model, which raises before the module's forward runs, or its `state_dict` is made, if
    a tensor of it has other values elsewhere. Modules are copied and pickled with their hooks, so it raises there too.
    `elsewhere` are the tensors that other ranks train; `unsettled()` says what this rank's own tensors wait for."""

    def __init__(self, elsewhere: Mapping[str, Tensor], unsettled: Callable[[], str | None]) -> None:
        self.elsewhere = elsewhere
        self.unsettled = weakref.WeakMethod(unsettled)  # the model outlives its steps

    def watch(self, *parts: Any) -> None:
        """Look out for a model and its loss, in the place of an earlier look-out."""
        for module in modules_of(*parts):
            for hooks in (state_dict_pre_hooks(module), forward_pre_hooks(module)):
                for number in [number for number, hook in hooks.items() if isinstance(hook, LookOut)]:
                    del hooks[number]
            module.register_state_dict_pre_hook(self)
            if own_parameters(module) or own_buffers(module):
                module.register_forward_pre_hook(self)

    def trains(self) -> None:
        """A step trains, on all ranks."""
        for tensor in self.elsewhere.values():
            if not is_left_behind(tensor):
                leave_behind(tensor)

    def __call__(self, module: nn.Module, *given: Any) -> None:
        """Before a forward, with its arguments, or before a `state_dict`, with the prefix and what it keeps."""
        own: dict[str, Tensor | None] = {**own_parameters(module), **own_buffers(module)}
        is_state = len(given) == OF_STATE_DICT
        if is_state:
            persistent = persistent_buffers(module)
            own = {given[0] + name: own[name] for name in own if name in own_parameters(module) or name in persistent}
        held = {name: tensor for name, tensor in own.items() if tensor is not None}
        if held:
            what, instead = WITH_STATE if is_state else WITH_FORWARD
            self.refuse(f"{what} of {type(module).__name__}", held, instead)

    def refuse(self, what: str, named: Mapping[str, Tensor], instead: str = WITH_STATE[1]) -> None:
        """Raise if some of these tensors have no values here, or old ones, or if those of this rank are not final."""
        if others := [name for name, tensor in named.items() if not has_values(tensor)]:
            raise ZbfxError(
                f"{what} would mix trained values and old ones: other ranks have those of {listed(others, 3)}. "
                f"{instead}"
            )
        unsettled = self.unsettled()
        if unsettled is not None and (reason := unsettled()) is not None:
            raise ZbfxError(f"{what} would not have its final values: {reason}")

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        self.refuse("a copy of the model", self.elsewhere)
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        self.refuse("a pickle of the model", self.elsewhere)
        return make_nothing, ()


def modules_of(*parts: Any) -> list[nn.Module]:
    """All modules of those parts that are modules."""
    return [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]


def without_look_outs(*parts: Any) -> dict[int, Any]:
    """Entries of a memo of `copy.deepcopy` for copies of modules that hold no values."""
    hooks = [hook for module in modules_of(*parts) for hook in state_dict_pre_hooks(module).values()]
    return {id(hook): nothing for hook in hooks if isinstance(hook, LookOut)}


def users_hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks on a module's forward and backward, without look-outs."""
    return tuple(
        hook
        for table in hook_tables(module)
        for hook in table.values()
        if hook is not nothing and not isinstance(hook, LookOut)
    )


def forget_nothing(*copies: Any) -> None:
    """Take out of copies what look-outs have become in them: a trace would meet it in every layer."""
    for module in modules_of(*copies):
        hooks = forward_pre_hooks(module)
        for number in [number for number, hook in hooks.items() if hook is nothing]:
            del hooks[number]
