"""Whatever has a `state_dict`, as schedulers do: one state for all processes, or one for each. In: such an object, and
which tensors of the model this rank gives. Out: tensors and plain data; and the object with what was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from zbfx.checkpoint.parts import Boxes
from zbfx.checkpoint.state import Checkpoint, State, equal_values, refuse_unreadable
from zbfx.errors import ZbfxError


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> object: ...


def object_state(label: str, value: Stateful, names: frozenset[str], owned: frozenset[str]) -> State:
    """Tensors at the top of a `state_dict` are written as tensors: those called like a tensor of the model, as averages
    of it are, by the rank that owns that one. All else is plain data, and must be readable as such."""
    state = State()
    for key, entry in value.state_dict().items():
        name = model_name(key, names)
        if isinstance(key, str) and isinstance(entry, Tensor) and name is not None:
            if name in owned and not entry.is_meta:
                state.tensors[object_key(label, key)] = entry.detach()
        else:
            state.plain[key] = entry
    refuse_unreadable(label, state.plain)
    return state


def object_key(label: str, key: str) -> str:
    return f"{label}.{key}"


def model_name(key: Any, names: frozenset[str]) -> str | None:
    """The tensor of the model that an entry is called like, as it is or within a module called `module`."""
    return next((name for name in (key, str(key).removeprefix("module.")) if name in names), None)


def merged_objects(plains: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state if all processes have the same, else that of each, in order."""
    is_one = all(equal_values(plains[0], other) for other in plains[1:])
    return {"all": plains[0]} if is_one else {"each": list(plains)}


class ObjectLoad:
    """The state of another object on its way back. Raises `ZbfxError` where each of so many processes had its own."""

    def __init__(
        self, label: str, value: Stateful, stored: Checkpoint, names: frozenset[str], index: int, processes: int
    ) -> None:
        self.value, plain = value, stored.plain["objects"][label]
        if "each" in plain and len(plain["each"]) != processes:
            raise ZbfxError(
                f"{label} was saved with a state of its own on each of {len(plain['each'])} processes, and cannot be "
                f"given to {processes}: leave it out, or load with as many"
            )
        self.state: dict[str, Any] = dict(plain["each"][index] if "each" in plain else plain["all"])
        self.targets: dict[str, Tensor | Boxes] = {}
        for key, own in value.state_dict().items():
            if isinstance(own, Tensor) and model_name(key, names) is not None:
                self.state[key] = own
                if object_key(label, key) in stored.entries and not own.is_meta:
                    self.state[key] = self.targets[object_key(label, key)] = stored.empty(
                        object_key(label, key), own.device
                    )

    def finish(self) -> None:
        self.value.load_state_dict(self.state)
