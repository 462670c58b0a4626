"""What a trace takes from the model's flags, checked before each step: a graph holds one mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from zbfx.errors import InputError


@dataclass(frozen=True)
class Guard:
    """Each module's training flag and each parameter's `requires_grad` when the model was traced."""

    training: Mapping[str, bool]
    trainable: Mapping[str, bool]

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Any) -> Guard:
        parts = named_parts(model, loss_fn)
        return cls(
            {name + inner: module.training for name, part in parts for inner, module in part.named_modules()},
            {name + inner: p.requires_grad for name, part in parts for inner, p in part.named_parameters()},
        )

    def check(self, model: nn.Module, loss_fn: Any) -> None:
        """Raises `InputError` if a flag has changed since."""
        now = Guard.of(model, loss_fn)
        if now == self:
            return
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
        changed = sorted(set(self.training) ^ set(now.training) or set(self.trainable) ^ set(now.trainable))
        raise InputError(f"modules or parameters came or went since the model was traced: {changed[:5]}. Compile again")


def named_parts(model: nn.Module, loss_fn: Any) -> list[tuple[str, nn.Module]]:
    return [("", model), *([("loss_fn.", loss_fn)] if isinstance(loss_fn, nn.Module) else [])]


def mode(training: bool) -> str:
    return "train" if training else "eval"
