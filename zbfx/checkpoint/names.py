"""The tensors of a model by name: which names are of one tensor, which files have, and which rank has its value.
In: a model and its loss, a compiled pipeline. Out: names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from zbfx._torch.modules import own_parameters, persistent_buffers
from zbfx.compiled import Compiled
from zbfx.program.messages import buffer_holders, parameter_holders
from zbfx.trace.guard import Source
from zbfx.trace.tensor_names import canonical_names


@dataclass(frozen=True)
class Names:
    """Every name of each tensor of a model and its loss, by the first one, and which of them files have."""

    of: Mapping[str, Sequence[str]]
    kept: frozenset[str]  # canonical names that a `state_dict` of the model has

    @classmethod
    def in_model(cls, source: Source) -> Names:
        names: dict[str, list[str]] = defaultdict(list)
        for name, first in canonical_names(source.model, source.loss_fn).items():
            names[first].append(name)
        stated = set(state_names(source.model))
        return cls(names, frozenset(first for first, others in names.items() if not stated.isdisjoint(others)))


def state_names(model: nn.Module) -> list[str]:
    """The names of the tensors that `model.state_dict()` has, in its order."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        parameters = [name for name, parameter in own_parameters(module).items() if parameter is not None]
        kept = persistent_buffers(module)
        buffers = [name for name, _ in module.named_buffers(recurse=False, remove_duplicate=False) if name in kept]
        found += [f"{prefix}.{name}" if prefix else name for name in (*parameters, *buffers)]
    return found


def owning_ranks(pipe: Compiled, names: Iterable[str]) -> dict[str, int]:
    """The rank whose value of each of these tensors counts: the one that writes it, the first that reads it, or the
    first of all."""
    holders = parameter_holders(pipe.stages, pipe.placement) | buffer_holders(pipe.stages, pipe.placement)
    writers = {
        name: pipe.placement[stage.index]
        for stage in pipe.stages
        for phase in stage.phases.values()
        for name in phase.updates
    }
    return {name: writers.get(name, holders.get(name, (0,))[0]) for name in names}
