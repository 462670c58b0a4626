"""Checkpoints of torch.distributed.checkpoint (DCP), read by one process for itself, and without unpickling at large.
In: a folder, tensors by name. Out: their values. DCP keeps its table of contents as a pickle, in which no more than the
records of such a table are let pass."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zbfx._torch.distributed import CHECKPOINT_RECORDS
from zbfx.checkpoint.parts import PartLoader
from zbfx.errors import ZbfxError, first_line

TABLE = ".metadata"  # of contents, which DCP writes last

RECORDS: Mapping[tuple[str, str], Any] = CHECKPOINT_RECORDS | {
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, f"{kind}Path"): PurePath for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
}


class TableReader(pickle.Unpickler):
    """Reads a table of contents, and refuses whatever else a pickle may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        found = RECORDS.get((module, name))
        if found is None:
            raise ZbfxError(f"{module}.{name} is no record of a table of contents")
        return found


def is_distributed(folder: Path) -> bool:
    return (folder / TABLE).is_file()


def table_of(folder: Path) -> Metadata:
    """The table of contents of a checkpoint. Raises `ZbfxError` where there is none, or another pickle."""
    try:
        with (folder / TABLE).open("rb") as file:
            found = TableReader(file).load()
    except (ZbfxError, OSError, EOFError, pickle.UnpicklingError, AttributeError, IndexError, TypeError) as error:
        raise ZbfxError(f"{folder} has no table of contents ({TABLE}) that can be read: {first_line(error)}") from error
    if not isinstance(found, Metadata):
        raise ZbfxError(f"{folder / TABLE} is the table of contents of a checkpoint; found {type(found).__name__}")
    return found


def stored_tensors(table: Metadata) -> dict[str, TensorStorageMetadata]:
    found = table.state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def read_into(folder: Path, table: Metadata, targets: Mapping[str, Any]) -> None:
    """Fill these tensors, which are in the table, from the files of the folder. Other processes take no part. A target
    may be a part of a tensor (`zbfx.checkpoint.parts`)."""
    reader, planner = FileSystemReader(folder), PartLoader()
    reader.set_up_storage_reader(table, is_coordinator=True)
    planner.set_up_planner(dict(targets), table, is_coordinator=True)
    try:
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, AssertionError) as error:
        raise ZbfxError(
            f"{folder} is damaged, or files are missing from it: {first_line(error)}. Copy it again, or load another"
        ) from error
