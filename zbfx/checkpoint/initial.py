"""Initial values, from the modules' own initialisers. In: a model, names, a seed. Out: the values of these names, which
do not depend on what else has memory: every process runs all initialisers, and each draw has a seed of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from zbfx import _transformers, rng
from zbfx._torch.modules import own_initializers
from zbfx._torch.operators import schema_of
from zbfx._torch.switches import TorchDispatchMode
from zbfx._torch.tensors import storage_of
from zbfx.checkpoint.adapters import as_adapted, initialize_adapters
from zbfx.checkpoint.hugging_face import as_pretrained
from zbfx.checkpoint.stand_in import named_in, without_memory
from zbfx.trace.guard import Source, named_parts


def initial_values(source: Source, names: Collection[str], seed: int) -> dict[str, Tensor]:
    """The values, on the CPU, that the initialisers of model and loss give to those of these names that they write."""
    copies = without_memory(source, names)
    before, seeded = named_in(copies), Seeded(seed)
    with rng.preserved_generators(torch.device("cpu")), torch.no_grad(), seeded:
        for _, part in named_parts(*copies):
            initialize(part)
    after = named_in(copies)
    return {
        name: after[name].detach()
        for name in names
        if not after[name].is_meta
        and (after[name] is not before[name] or not after[name].numel() or storage_of(after[name]) in seeded.written)
    }


def initialize(module: Any) -> None:
    """Let all modules initialise themselves, the inner ones first: by `reset_parameters()`, `_init_weights(module)`, or
    as the libraries transformers and peft do."""
    if as_pretrained(module) is not None:
        _transformers.initialize_anew(module)
        return
    if as_adapted(module) is not None:
        initialize(module.get_base_model())
        initialize_adapters(module)
        return
    for child in module.children():
        initialize(child)
    for method in own_initializers(module):
        method()


class Seeded(TorchDispatchMode):
    """Meanwhile the n-th draw of random numbers depends on the seed and n alone. It does not on the draws before, which
    draw nothing for tensors without memory. `written` are the storages that operators wrote into."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.draws = seed, 0
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(rng.mix(self.seed, self.draws))
            self.draws += 1
        result = func(*args, **(kwargs or {}))
        schema = schema_of(func)
        if schema is not None and schema.is_mutable:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = given.get(argument.name)
                    tensors = written if isinstance(written, list | tuple) else [written]
                    self.written |= {storage_of(tensor) for tensor in tensors if isinstance(tensor, Tensor)}
        return result
