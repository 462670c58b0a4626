"""Optimizers: the state of each parameter, under the parameter's name. In: an optimizer, and what of the model its
parameters are. Out: tensors under names that depend on neither ranks, cuts nor replicas; hyperparameters; and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zbfx.checkpoint.parts import Boxes, Piece
from zbfx.checkpoint.state import Checkpoint, State, equal_values, refuse_unreadable
from zbfx.errors import ZbfxError, listed


@runtime_checkable
class WithExtraState(Protocol):
    """An optimizer with a state beside that of its parameters."""

    def get_extra_state(self) -> Mapping[str, Any]: ...
    def set_extra_state(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Optimized:
    """A parameter as optimizers of this process have it: one of the model's, or, with ZeRO-1, a flat shard of `names`,
    with the `pieces` of them that it is made of."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    pieces: tuple[Piece, ...] | None = None


def named_parameters(
    label: str, optimizer: torch.optim.Optimizer, optimized: Sequence[Optimized]
) -> list[list[Optimized]]:
    """The parameters of each group; the empty one of a rank without parameters is none. Raises `ZbfxError` for one that
    is not the step's."""
    known = {id(entry.parameter): entry for entry in optimized}
    strange = sum(id(p) not in known and p.numel() > 0 for group in optimizer.param_groups for p in group["params"])
    if strange:
        raise ZbfxError(
            f"{label} has {strange} parameters that are not of this step, and have no name: make it from "
            f"step.parameters() of the step that saves and loads it"
        )
    return [[known[id(p)] for p in group["params"] if id(p) in known] for group in optimizer.param_groups]


def optimizer_state(
    label: str, optimizer: torch.optim.Optimizer, optimized: Sequence[Optimized], owned: frozenset[str]
) -> State:
    """`owned` are the names whose values this rank gives."""
    groups, found = named_parameters(label, optimizer, optimized), optimizer.state_dict()
    state, keys = State(), dict[str, dict[str, Any]]()
    for index, entry in enumerate(entry for group in groups for entry in group):
        for key, value in found["state"].get(index, {}).items():
            if not isinstance(value, Tensor):
                keys |= {name: keys.get(name, {}) | {key: value} for name in entry.names}
                continue
            keys |= {name: keys.get(name, {}) | {key: None} for name in entry.names}
            is_flat = entry.pieces is not None and value.shape == entry.parameter.shape
            parts = (
                [(p.name, p.part(value)) for p in entry.pieces or ()] if is_flat else [(n, value) for n in entry.names]
            )
            state.tensors |= {state_key(label, name, key): part for name, part in parts if name in owned}
    state.plain = {
        "keys": keys,
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in found["param_groups"]],
        "members": {name: index for index, group in enumerate(groups) for entry in group for name in entry.names},
        "extra": dict(optimizer.get_extra_state()) if isinstance(optimizer, WithExtraState) else None,
    }
    refuse_unreadable(label, state.plain)
    return state


def state_key(label: str, name: str, key: str) -> str:
    return f"{label}.state.{name}.{key}"


def merged_optimizers(label: str, plains: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all processes say of one optimizer. Raises `ZbfxError` where their groups have other hyperparameters."""
    first = plains[0]
    for other in plains[1:]:
        if not equal_values(first["groups"], other["groups"]):
            raise ZbfxError(
                f"{label} has other groups or hyperparameters on other ranks, {first['groups']} and {other['groups']}: "
                f"make the same groups on every rank, empty ones too"
            )
    keys, members = dict[str, Any](), dict[str, int]()
    for plain in plains:
        keys |= plain["keys"]
        members |= plain["members"]
    return {"keys": keys, "groups": first["groups"], "members": members, "extra": first["extra"]}


class OptimizerLoad:
    """An optimizer's state on its way back: `targets` are to be read, then `finish` gives them to the optimizer. Raises
    `ZbfxError` where the checkpoint has no such state."""

    def __init__(
        self, label: str, optimizer: torch.optim.Optimizer, optimized: Sequence[Optimized], stored: Checkpoint
    ) -> None:
        self.optimizer, self.plain = optimizer, stored.plain["optimizers"][label]
        self.targets: dict[str, Tensor | Boxes] = {}
        self.states: dict[int, dict[str, Any]] = {}
        self.alike: list[tuple[str, list[Tensor]]] = []  # of the parameters of a shard
        groups = named_parameters(label, optimizer, optimized)
        self.groups = [self.group(label, index, group) for index, group in enumerate(groups)]
        for index, entry in enumerate(entry for group in groups for entry in group):
            self.states[index] = self.state(label, entry, stored)

    def group(self, label: str, index: int, entries: Sequence[Optimized]) -> dict[str, Any]:
        """The hyperparameters of the groups that these parameters were saved in."""
        members, groups = self.plain["members"], self.plain["groups"]
        names = [name for entry in entries for name in entry.names]
        if missing := [name for name in names if name not in members]:
            raise ZbfxError(f"the checkpoint has no state of {listed(missing, 4)} in {label}, which was saved without")
        found = sorted({members[name] for name in names}) or ([index] if index < len(groups) else [])
        if not found or any(not equal_values(groups[found[0]], groups[k]) for k in found):
            raise ZbfxError(
                f"group {index} of {label} has parameters of the groups {found} that were saved, which have other "
                f"hyperparameters: make the groups that it was saved with"
            )
        return groups[found[0]]

    def state(self, label: str, entry: Optimized, stored: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in self.plain["keys"].get(entry.names[0], {}).items():
            keys = {name: state_key(label, name, key) for name in entry.names}
            if not all(stored_as in stored.entries for stored_as in keys.values()):
                found[key] = value
            elif entry.pieces is None:
                own = entry.parameter
                stored_shape = tuple(stored.entries[keys[entry.names[0]]].size)
                device = own.device if stored_shape == tuple(own.shape) and own.ndim else torch.device("cpu")
                self.targets[keys[entry.names[0]]] = found[key] = stored.empty(keys[entry.names[0]], device)
            elif self.is_elementwise(key, label, stored):
                dtype = stored.entries[keys[entry.names[0]]].properties.dtype
                found[key] = torch.zeros_like(entry.parameter, dtype=dtype, requires_grad=False)
                self.targets |= {keys[piece.name]: piece.part(found[key]) for piece in entry.pieces}
            else:
                values = {stored_as: stored.empty(stored_as, torch.device("cpu")) for stored_as in keys.values()}
                self.targets |= values
                self.alike.append((f"{key} of {label}", list(values.values())))
                found[key] = next(iter(values.values()))
        return found

    def is_elementwise(self, key: str, label: str, stored: Checkpoint) -> bool:
        """Whether a value of the state has an element for each of its parameter: then it has its shape."""
        return any(
            tuple(stored.entries[state_key(label, name, key)].size) == tuple(stored.entries[f"model.{name}"].size) != ()
            for name, keys in self.plain["keys"].items()
            if key in keys and state_key(label, name, key) in stored.entries
        )

    def finish(self) -> None:
        for what, values in self.alike:
            if not all(equal_values(values[0], other) for other in values[1:]):
                raise ZbfxError(f"{what} differs between parameters that zero=1 steps as one: load it without zero=1")
        now = self.optimizer.state_dict()["param_groups"]
        groups = [own | {"params": group["params"]} for own, group in zip(self.groups, now, strict=True)]
        self.optimizer.load_state_dict({"state": {k: s for k, s in self.states.items() if s}, "param_groups": groups})
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, state in self.states.items():
            for key, value in state.items():
                held = self.optimizer.state[parameters[index]].get(key)
                if isinstance(value, Tensor) and isinstance(held, Tensor) and held.dtype is not value.dtype:
                    self.optimizer.state[parameters[index]][key] = value.to(
                        held.device
                    )  # torch casts to the parameter's
        if self.plain["extra"] is not None and isinstance(self.optimizer, WithExtraState):
            self.optimizer.set_extra_state(self.plain["extra"])
