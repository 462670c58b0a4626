"""The file of a plan: a zip of one JSON text, the bytes of tensors, and a hash of both.

Takes   a document and tensors; or a path.
Gives   the file, whole or not at all; or the document, and a function that makes its tensors.
Raises  `ZbfxError` for a file that is no plan, or a damaged one. What is read is bounded before it is read: so many
        values in the text, and no more bytes of tensors than the file has.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import ZbfxError, first_line

TEXT, HASH = "plan.json", "sha256"
MOST_CHARACTERS = 1 << 26
MOST_VALUES = 1 << 22  # lists, objects and entries of the text: some 100 bytes of memory each
MOST_TENSORS = 10_000
PACKED = {TEXT: zipfile.ZIP_DEFLATED}  # tensors lie in the file as they are
NOT_A_PLAN = "is no plan of pipe.save, or a damaged one"
DAMAGES = (  # what is raised where data is not what was written
    ArithmeticError,
    AssertionError,
    AttributeError,
    KeyError,
    IndexError,
    NotImplementedError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)


def write_plan(path: Path, document: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Write a file in the place of any other of this name, at once: a reader finds the one or the other."""
    parts = {TEXT: json.dumps(document, separators=(",", ":"), allow_nan=False).encode()}
    parts |= {f"tensors/{number}": octets_of(tensor) for number, tensor in enumerate(tensors)}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo(HASH), hash_of(parts))
            for part, content in parts.items():
                archive.writestr(zipfile.ZipInfo(part), content, PACKED.get(part, zipfile.ZIP_STORED))
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def hash_of(parts: dict[str, bytes]) -> str:
    found = sha256()
    for name, content in parts.items():
        found.update(f"{name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


def octets_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor from its first entry to its last, in the order of its memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu()
    flat = flat.as_strided((extent_of(flat.shape, flat.stride()),), (1,), flat.storage_offset())
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


def extent_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0


@dataclass(frozen=True)
class Contents:
    """What a file holds: its document, and the bytes of each tensor."""

    document: dict[str, Any]
    octets: tuple[bytes, ...]

    def tensor(self, number: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        octets = self.octets[number]
        if len(octets) != extent_of(shape, stride) * dtype.itemsize:
            raise ZbfxError(f"tensor {number} has {len(octets)} bytes; its layout is {dtype} {shape} {stride}"[:300])
        flat = torch.frombuffer(bytearray(octets), dtype=dtype) if octets else torch.empty(0, dtype=dtype)
        return flat.as_strided(shape, stride)


def read_plan(path: Path) -> Contents:
    """What a file holds."""
    try:
        with zipfile.ZipFile(path) as archive:
            return contents(archive, path.stat().st_size)
    except OSError as error:
        raise ZbfxError(f"cannot read the plan {path}: {error.strerror or first_line(error)}") from error
    except DAMAGES as error:
        raise ZbfxError(f"{path} {NOT_A_PLAN}: {first_line(error) or type(error).__name__}") from error


def contents(archive: zipfile.ZipFile, file_bytes: int) -> Contents:
    names = [info.filename for info in archive.infolist()]
    count = len(names) - 2
    expected = [HASH, TEXT, *(f"tensors/{number}" for number in range(count))]
    if names != expected or count > MOST_TENSORS:
        raise ZbfxError(f"a plan has {TEXT}, its tensors and {HASH}; found {names[:5]}")
    parts = {name: read_part(archive, name, file_bytes) for name in names}
    if parts.pop(HASH).decode() != hash_of(parts):
        raise ZbfxError("its contents are not those that were written (a hash of them differs)")
    document = document_of(parts.pop(TEXT))
    return Contents(document, tuple(parts.values()))


def read_part(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    info, packing = archive.getinfo(name), PACKED.get(name, zipfile.ZIP_STORED)
    most = MOST_CHARACTERS if name in PACKED else most
    if info.file_size > most or info.compress_type != packing:
        raise ZbfxError(f"{name} has {info.file_size:,} bytes, packed as {info.compress_type}; {most:,} at most")
    with archive.open(info) as file:
        return file.read(most + 1)


def document_of(text: bytes) -> dict[str, Any]:
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > MOST_VALUES:
        raise ZbfxError(f"its text has {values:,} values; {MOST_VALUES:,} at most")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ZbfxError(f"its text is an object; found {type(found).__name__}")
    return found
