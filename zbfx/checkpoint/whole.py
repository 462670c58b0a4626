"""The whole model back, from the ranks that have its parts, and as files that other programs read.
In: a model whose tensors are on several ranks. Out: one `state_dict`, a folder of safetensors."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zbfx._transformers import without_progress
from zbfx.arguments import kind_of
from zbfx.checkpoint.hugging_face import as_pretrained
from zbfx.checkpoint.names import Names, state_names
from zbfx.comm.channels import Channels
from zbfx.errors import ZbfxError, listed
from zbfx.trace.guard import Source


def refuse_empty(source: Source, own: set[str]) -> None:
    """Raise where a tensor of the model has no data on this rank, which owns it."""
    names = Names.in_model(source)
    empty = [name for name, tensor in source.tensors.items() if name in own & names.kept and tensor.is_meta]
    if empty:
        raise ZbfxError(
            f"the whole model is asked for; found {listed(empty)} without data, which no stage reads: fill the model "
            f"with bind(weights=...), or before compile"
        )


def whole_state(
    source: Source, owner: Mapping[str, int], channels: Channels | None, *, everywhere: bool
) -> dict[str, Tensor]:
    """The model's `state_dict`, on the CPU: on all ranks, or the first one of the first replica; on others it is empty.
    Ranks send one tensor after the other. All names of one tensor have one tensor. Collective over the pipeline."""
    keeps = everywhere or channels is None or is_first(channels)
    names, values = Names.in_model(source), dict[str, Tensor]()
    live = {name: named for name, named in source.named.items() if name in names.kept}
    for name, tensor in live.items():
        value = tensor.detach()
        if channels is not None:
            value = channels.from_rank(whole(value) if owner[name] == channels.rank else value, owner[name])
        if keeps:
            values[name] = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    canonical = {name: first for first, others in names.of.items() for name in others}
    return {name: values[canonical[name]] for name in state_names(source.model)} if keeps else {}


def whole(value: Tensor) -> Tensor:
    """A sharded tensor from its shards, on each of their processes."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def is_first(channels: Channels) -> bool:
    """Whether this process is the first one of all that hold the model."""
    place = channels.place
    return (place.replica, place.rank) == (0, 0) and place.family % place.shard_count == 0


def checked_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ZbfxError(f"dtype is a floating dtype that tensors are written in, or None; found {kind_of(dtype)}")
    return dtype


def export_state(
    source: Source, state: Mapping[str, Tensor], folder: Path, dtype: torch.dtype | None, max_shard_size: int | str
) -> None:
    """Write safetensors: as `save_pretrained` does for a model of the transformers library, with its config. Files
    appear once all are written, the index last."""
    cast = {id(t): t.to(dtype) if dtype is not None and t.is_floating_point() else t for t in state.values()}
    state = {name: cast[id(tensor)] for name, tensor in state.items()}
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model = as_pretrained(source.model)
    if model is not None:
        with without_progress():
            model.save_pretrained(partial, state_dict=state, max_shard_size=max_shard_size)
        if dtype is not None:
            config = copy.deepcopy(model.config)
            config.dtype = dtype
            config.save_pretrained(partial)
    else:
        try:
            from huggingface_hub import save_torch_state_dict
        except ImportError as error:
            raise ZbfxError("export writes files with the package huggingface_hub: pip install 'zbfx[disk]'") from error
        save_torch_state_dict(dict(state), partial, max_shard_size=max_shard_size)
    folder.mkdir(exist_ok=True)
    new = {file.name for file in partial.iterdir()}
    old = {file.name for pattern in ("model*.safetensors", "model*.index.json") for file in folder.glob(pattern)}
    for name in old - new:
        (folder / name).unlink()
    indices = {file.name for file in partial.glob("*.index.json")}
    for name in (*sorted(new - indices), *indices):
        os.replace(partial / name, folder / name)
    partial.rmdir()
