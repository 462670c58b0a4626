"""The outputs of a forward, from those of its microbatches to what the user gets.
In: `BatchResults` and the structure that was traced. Out: a pytree like what was asked for, on the rank that computes a
tensor or on all; where a rank has none of it, None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbfx._torch.tensors import pytree
from zbfx.arguments import true_or_false
from zbfx.compiled import Compiled
from zbfx.errors import InputError, ZbfxError
from zbfx.graphs import Port, Returned, Role
from zbfx.runtime.engine import BatchResults, Engine


@dataclass(frozen=True)
class Delivery:
    """How outputs come. `join`: the dimension along which those of microbatches are joined, None for a list of them.
    `everywhere`: on all ranks of the pipeline. Raises `ZbfxError` for other values."""

    join: int | None = 0
    everywhere: bool = False

    def __post_init__(self) -> None:
        true_or_false("everywhere", self.everywhere)
        if self.join is not None and (not isinstance(self.join, int) or isinstance(self.join, bool)):
            raise ZbfxError(
                f"join is the dimension along which the outputs of microbatches are joined, or None for a list of "
                f"them; found {self.join!r}"
            )

    def check(self, pipe: Compiled) -> None:
        """Raises `InputError` for an output that has no such dimension. Scalars are joined in a row."""
        for value in outputs_in(pipe).values():
            if self.join is not None and value.ndim and not -value.ndim <= self.join < value.ndim:
                raise InputError(
                    f"join={self.join} joins outputs along that dimension; found one of shape {tuple(value.shape)} in "
                    f"a microbatch. Name another dimension, or join=None for a list of the microbatches' outputs"
                )

    def of(self, engine: Engine, results: BatchResults) -> Any:
        """What the user gets on this rank. Collective over the ranks if it comes everywhere."""
        returned, made = engine.pipe.joint.returned, outputs_in(engine.pipe)
        assert returned is not None, "asked for"
        owners = {
            str(port): engine.pipe.placement[stage.index]
            for stage in engine.pipe.stages
            for phase in stage.phases.values()
            for port in phase.last
        }
        count = engine.pipe.reduction.microbatches
        found = {
            name: self.delivered(engine, results.outputs.get(name), value, count, owners[name])
            for name, value in made.items()
        }
        if self.join is not None:
            return unflattened(returned, found)
        nothing = [None] * count
        of_each = [{name: (values or nothing)[k] for name, values in found.items()} for k in range(count)]
        return [unflattened(returned, of_one) for of_one in of_each]

    def delivered(
        self, engine: Engine, own: Sequence[Tensor] | None, example: Tensor, count: int, owner: int
    ) -> Tensor | Sequence[Tensor] | None:
        """An output: joined, or of each microbatch. `example` is like that of a microbatch."""
        if not self.everywhere or engine.channels is None:
            return None if own is None else own if self.join is None else self.joined(own)
        if own is None:
            own = [torch.empty(example.shape, dtype=example.dtype, device="meta")] * count
        dense = torch.stack(list(own)) if self.join is None else self.joined(own)
        whole = engine.channels.from_rank(dense, owner)
        return whole.unbind() if self.join is None else whole

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        assert self.join is not None, "outputs are joined"
        if not values[0].ndim:
            return torch.stack(list(values))
        return values[0] if len(values) == 1 else torch.cat(list(values), self.join)


def outputs_in(pipe: Compiled) -> dict[str, Tensor]:
    """The fake values of a microbatch's outputs, by port."""
    ends = zip(pipe.joint.output_values, pipe.joint.outputs, strict=True)
    return {str(port): node.meta["val"] for node, port in ends if port.role is Role.OUTPUT}


def unflattened(returned: Returned, found: dict[str, Any]) -> Any:
    leaves = [found[str(leaf)] if isinstance(leaf, Port) else leaf for leaf in returned.leaves]
    return pytree.tree_unflatten(leaves, returned.structure)
