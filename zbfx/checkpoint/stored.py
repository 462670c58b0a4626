"""What `weights=` may be, as tensors by name that are read when they are asked for: a folder or file of safetensors, a
checkpoint of torch.distributed.checkpoint, a mapping. Nothing is unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbfx.arguments import kind_of
from zbfx.checkpoint import distributed, folders
from zbfx.errors import ZbfxError, first_line, listed

TAKES = (
    "a folder of safetensors, or of a checkpoint of step.save or torch.distributed.checkpoint, a mapping of names to "
    "tensors, or 'init'"
)
INITIAL = "init"

# What safetensors calls the floating dtypes that can be cast to each other; other names are left as they are.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that has not been read yet. `dtype` is torch's, or what the file calls it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    read: Callable[[], Tensor]  # a tensor of memory that nothing else writes, on the CPU


Stored = Mapping[str, StoredTensor]


def is_initial(weights: object) -> bool:
    """Whether the modules' own initialisers are asked for."""
    return isinstance(weights, str) and weights == INITIAL


def kind_of_weights(weights: object) -> str:
    """What ranks compare of their argument: paths may differ from host to host."""
    if weights is None or is_initial(weights):
        return str(weights)
    return "a mapping" if isinstance(weights, Mapping) else "a folder"


def stored(weights: object) -> Stored:
    """Raises `ZbfxError` for what is none of `TAKES`."""
    if isinstance(weights, Mapping):
        return mapped(weights)
    if not isinstance(weights, str | os.PathLike):
        raise ZbfxError(f"weights is {TAKES}; found {kind_of(weights)}")
    path = Path(weights)
    path = folders.newest(path) if folders.checkpoints(path) else path
    if distributed.is_distributed(path):
        return of_distributed(path)
    return safetensors_of(safetensors_files(path))


def mapped(weights: Mapping[Any, Any]) -> Stored:
    strange = [f"{name!r}: {type(value).__name__}" for name, value in weights.items() if not is_entry(name, value)]
    if strange:
        raise ZbfxError(f"weights maps names to tensors with data; found {listed(strange, 3)}")
    return {
        name: StoredTensor(tuple(value.shape), value.dtype, partial(torch.clone, value.detach()))
        for name, value in sorted(weights.items())
    }


def is_entry(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and not value.is_meta


def of_distributed(folder: Path) -> Stored:
    table = distributed.table_of(folder)

    def reading(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        def read() -> Tensor:
            found = torch.empty(shape, dtype=dtype)
            distributed.read_into(folder, table, {name: found})
            return found

        return read

    found = distributed.stored_tensors(table)
    layouts = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in sorted(found.items())}
    return {name: StoredTensor(*layout, reading(name, *layout)) for name, layout in layouts.items()}


def safetensors_files(path: Path) -> list[Path]:
    """The files of a folder, from its index if it has one, or a file itself."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ZbfxError(
            f"weights is {TAKES}; found {str(path)!r}, which does not exist here. Download a repository of a model "
            f"first (huggingface_hub.snapshot_download gives a folder)"
        )
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        files = index_of(indices[0])
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ZbfxError(
                f"{indices[0]} names files that are not beside it: {listed(missing, 3)}. Download them again"
            )
        return files
    found = sorted(path.glob("*.safetensors"))
    if not found or indices:
        others = sorted(
            file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.index.json") for file in path.glob(pattern)
        )
        raise ZbfxError(
            f"{path} has no *.safetensors, or more than one index of them; found {listed(others, 5) or 'none'}. Files "
            f"that are pickles are not read, for they may run code: convert them with transformers' save_pretrained"
        )
    return found


def index_of(file: Path) -> list[Path]:
    try:
        names = dict.fromkeys(json.loads(file.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ZbfxError(f"{file} is no index of safetensors: {first_line(error)}") from error
    return [file.parent / name for name in names]


def safetensors_of(files: list[Path]) -> Stored:
    found: dict[str, StoredTensor] = {}
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118  # no mapping
                if name in found:
                    raise ZbfxError(
                        f"{name} is in more than one of {listed((f.name for f in files), 4)}. Leave the files of one "
                        f"model in the folder"
                    )
                part = handle.get_slice(name)
                dtype = part.get_dtype()
                found[name] = StoredTensor(
                    tuple(part.get_shape()), DTYPES.get(dtype, dtype), reader_in_file(file, name)
                )
    return found


def reader_in_file(file: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with opened(file) as handle:
            return handle.get_tensor(name).clone()  # its memory is the file's, which may change

    return read


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ZbfxError(
            f"{file} is read by the package safetensors, which is not installed: pip install safetensors"
        ) from error
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ZbfxError(f"{file} is damaged, or no file of safetensors: {first_line(error)}") from error


def refuse_other_shapes(found: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raise for tensors that are stored with another shape than the model's: (name, stored, of the model)."""
    if found:
        texts = listed((f"{name} has shape {stored}, the model's has {own}" for name, stored, own in found), 3)
        raise ZbfxError(
            f"weights have the shapes of the model's tensors; found: {texts}. Make the model from their config"
        )


def refuse_other_kinds(found: Iterable[tuple[str, StoredTensor, Tensor]]) -> None:
    """Raise for stored tensors that are no plain numbers of the kind that the model's tensor has, as quantised ones."""
    for name, entry, own in found:
        fits = entry.dtype in DTYPES.values() if own.is_floating_point() else entry.dtype not in DTYPES.values()
        if not fits and not own.is_complex():
            raise ZbfxError(
                f"{name} is stored as {entry.dtype}, and {own.dtype} in the model: to cast quantised numbers alone "
                f"would be wrong. Dequantise the weights first"
            )
