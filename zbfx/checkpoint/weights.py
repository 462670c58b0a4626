"""Weights reach their rank: `weights=` of `bind` and `run_local`. In: a model, what was asked for, and the names that
this process uses. Out: the live tensors with their values; nothing of other ranks is read or made."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from zbfx import _transformers
from zbfx.checkpoint.adapters import as_adapted, refuse_adapters_alone, tensors_of, without_adapters
from zbfx.checkpoint.hugging_face import as_pretrained, load_pretrained, refuse_quantized
from zbfx.checkpoint.initial import initial_values
from zbfx.checkpoint.names import Names, state_names
from zbfx.checkpoint.stand_in import put, without_memory
from zbfx.checkpoint.stored import Stored, is_initial, refuse_other_kinds, refuse_other_shapes, stored
from zbfx.errors import ZbfxError, listed
from zbfx.trace.guard import Source

PREFIX = "model."  # of the model's names in checkpoints of training states


def fill(
    source: Source, weights: Any, used: Collection[str], spare: Collection[str], device: torch.device, seed: int
) -> None:
    """Give the tensors of these canonical names the values that `weights` says, on `device`. `used` must have values
    then; `spare`, which no stage reads, may. Raises `ZbfxError` where names or shapes do not fit, or one stays without
    values; warns of what transformers warns of."""
    if source.local:
        raise ZbfxError(
            "weights= fills whole parameters; found DTensors, of which each process has a part. Load the model before "
            "parallelize_module"
        )
    wanted, names, live = {*used, *spare}, Names.in_model(source), source.tensors
    if is_initial(weights):
        values, without = {}, wanted
    else:
        values = loaded(source, names, stored(weights), wanted)
        without = {name for name in wanted - values.keys() if live[name].is_meta}
    if without:
        values |= initial_values(source, without, seed)
    empty = [name for name in names.of if name in used and live[name].is_meta and name not in values]
    if empty:
        raise ZbfxError(
            f"no weights were found for {listed(empty, 6)}, and no initialiser of the model writes "
            f"there: give each module a reset_parameters() that fills its own parameters and buffers, or make these "
            f"outside of the meta device"
        )
    put(source, {name: value.to(device) for name, value in values.items()})


def loaded(source: Source, names: Names, contents: Stored, wanted: Collection[str]) -> dict[str, Tensor]:
    """The values of wanted tensors that are stored, by canonical name."""
    known = {name for others in names.of.values() for name in others}
    inner = {name.removeprefix(PREFIX): entry for name, entry in contents.items() if name.startswith(PREFIX)}
    if known.isdisjoint(contents) and not known.isdisjoint(inner):
        contents = inner
    is_of_base = as_adapted(source.model) is not None and known.isdisjoint(contents)
    if is_of_base:
        refuse_adapters_alone(contents)
    if as_pretrained(source.model) is not None or is_of_base:
        return through_transformers(source, names, contents, wanted)
    return by_name(source, names, contents, wanted)


def by_name(source: Source, names: Names, contents: Stored, wanted: Collection[str]) -> dict[str, Tensor]:
    """Strict, as `load_state_dict` is: stored are all names of the model's `state_dict`, or one of each tied tensor."""
    live, of_model = source.tensors, set(state_names(source.model))
    canonical = {name: first for first, others in names.of.items() for name in others}
    surplus = [name for name in contents if name not in canonical]
    missing = [n for n in names.of if n in names.kept and n in of_model and contents.keys().isdisjoint(names.of[n])]
    if missing or surplus:
        raise ZbfxError(
            f"weights have the names of the model's state_dict; missing are {listed(missing, 6) or 'none'}, and no "
            f"part of the model are {listed(surplus, 6) or 'none'}. Rename them, or take them out"
        )
    shapes = [(name, entry.shape, tuple(live[canonical[name]].shape)) for name, entry in contents.items()]
    refuse_other_shapes([found for found in shapes if found[1] != found[2]])
    values = {}
    for first in wanted:
        stored_as = [name for name in names.of[first] if name in contents]
        if stored_as:
            refuse_other_kinds([(name, contents[name], live[first]) for name in stored_as])
            read = {name: contents[name].read() for name in stored_as}
            refuse_untied(read)
            values[first] = read[stored_as[0]].to(live[first].dtype)
    return values


def through_transformers(source: Source, names: Names, contents: Stored, wanted: Collection[str]) -> dict[str, Tensor]:
    """As `from_pretrained` does: what is missing is initialised, and what is no part of the model is left out, with
    warnings. Of a model with adapters, stored is the model inside."""
    copied, _ = without_memory(source)
    adapted = as_adapted(copied)
    base, outer = (
        (copied, {name: name for name in tensors_of(copied)}) if adapted is None else without_adapters(adapted)
    )
    if as_pretrained(base) is None:
        raise ZbfxError(
            f"weights= reads the base model of adapters if it is one of transformers; found {type(base).__name__}. "
            f"Load it, and then make its adapters, before compile"
        )
    refuse_quantized(base)
    asked = {name for first in wanted for name in names.of[first]}
    found = load_pretrained(base, contents, {name for name, own in outer.items() if own in asked})
    if adapted is None:
        _transformers.set_weight_conversions(source.model, found.weight_conversions)  # export writes them back
    tensors = {outer[name]: tensor for name, tensor in found.tensors.items()}
    values = {}
    for first, others in names.of.items():
        stored_as = {name: tensors[name] for name in others if name in tensors}
        if stored_as and first in wanted:
            refuse_untied(stored_as)
            values[first] = next(iter(stored_as.values()))
    reported = {outer.get(name, name) for name in found.missing}
    missing = [n for n, others in names.of.items() if reported & {*others} and tensors.keys().isdisjoint(others)]
    if missing:
        warn(f"no weights were found for {listed(missing, 6)}, which start from initial values: train them before use")
    if found.surplus:
        warn(f"weights that are no part of {type(source.model).__name__} were left out: {listed(found.surplus, 6)}")
    return values


def refuse_untied(read: Mapping[str, Tensor]) -> None:
    """Raise where tensors that the model ties, and so are one to the pipeline, are stored with other values."""
    first, *others = read
    for other in others:
        if read[first] is not read[other] and not torch.equal(read[first], read[other]):
            raise ZbfxError(
                f"{first} and {other} are one tensor in the model, and two with other values in its weights. Untie "
                f"them before compile (tie_word_embeddings=False in a config), or store one of them"
            )


def warn(text: str) -> None:
    warnings.warn(text, stacklevel=7)
