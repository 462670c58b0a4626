"""Plans of earlier calls of `compile`, by all that decides them: a second start neither traces, plans nor measures.

Takes   a folder, and what `compile` was called with.
Gives   the plan that it made before, or none; and keeps a new one.
Raises  `ZbfxError` for what is no folder. A file that is damaged counts as none; a pipeline that no file can hold is
        not kept, nor is one where the disk is full, with a warning that says why.

Files are written whole or not at all, by one rank of each host. The least recently used go where the folder is too
large.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.comm.together import exchange, is_alone
from zbfx.compiled import Compiled
from zbfx.errors import ZbfxError
from zbfx.memory.predict import resolved
from zbfx.options import Options
from zbfx.plans.identity import Known, identity
from zbfx.plans.saved import PLAN_FORMAT, LoadedPlan, load_saved, own_version, save_plan
from zbfx.progress import announce
from zbfx.spelled import spelled
from zbfx.trace.guard import Source
from zbfx.trace.signature import Constant, Signature

MOST_BYTES = 1 << 30  # of a folder
UNSEEN = {"device", "passes", "trace_passes", "batch_dims"}  # options that the key has in other words, or not at all


@dataclass(frozen=True)
class PlanCache:
    """A folder, and what one call of `compile` is known by in it."""

    folder: Path
    key: str
    examples: tuple[Tensor, ...]  # of this call

    @property
    def file(self) -> Path:
        return self.folder / f"{self.key}.plan"

    def found(self, source: Source, options: Options) -> Compiled | None:
        """The plan, where all ranks have one and the same. Collective over all processes."""
        announce("looking for the plan of an earlier start")
        limits = resolved(options).mem_limit if options.limits_to_free else None
        loaded = self.loaded(source, options, limits)
        everywhere = exchange("compile (the cache)", None if loaded is None else loaded.digest)
        if loaded is None or any(there != loaded.digest for there in everywhere):
            return None
        with suppress(OSError):
            os.utime(self.file)  # used now
        return loaded.compiled

    def loaded(self, source: Source, options: Options, limits: Sequence[float] | None) -> LoadedPlan | None:
        """The plan, where its ranks hold no more than these limits."""
        if not self.file.exists():
            return None
        try:
            found = load_saved(self.file, source, options.device, options.passes, examples=self.examples)
        except ZbfxError as error:
            warnings.warn(f"the cache's plan is left out: {error}", stacklevel=2)
            return None
        peaks = [memory.peak_bytes for memory in found.compiled.memory] if limits else ()
        return found if all(peak <= limit for peak, limit in zip(peaks, limits or (), strict=True)) else None

    def keep(self, pipe: Compiled, source: Source) -> None:
        """Write the plan, by the first rank of each host. Collective over all processes."""
        hosts = exchange("compile (the hosts)", gethostname())
        if not is_alone() and hosts.index(gethostname()) != dist.get_rank():
            return
        try:
            save_plan(pipe, source, self.file)
            make_room(self.folder, self.file, MOST_BYTES)
        except (ZbfxError, OSError) as error:
            warnings.warn(f"this plan is not kept in the cache: {error}", stacklevel=2)


def checked_folder(cache: Any) -> Path | None:
    """The folder of the argument `cache`, made where there is none."""
    if cache is None:
        return None
    if not isinstance(cache, str | os.PathLike):
        raise ZbfxError(f"cache is the path of a folder, or None; found {cache!r}"[:200])
    try:
        Path(cache).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ZbfxError(f"cache={str(cache)!r} is no folder, and none can be made there: {error.strerror}") from error
    return Path(cache)


def plan_cache(
    folder: Path, source: Source, arguments: tuple[Sequence[Any], Mapping[str, Any], Sequence[Any]], options: Options
) -> PlanCache:
    """The cache for one call of `compile`, with these arguments of the example microbatch: inputs, kwargs, targets."""
    inputs, kwargs, targets = arguments
    signature = Signature.of(inputs, kwargs, targets, options.batch_dims)
    text = "\n".join(f"{part}: {text}" for part, text in sorted(told_by(source, signature, options).items()))
    key = sha256(text.encode(errors="replace")).hexdigest()
    return PlanCache(folder, key, tuple(signature.flatten((*inputs, *targets), kwargs)))


def told_by(source: Source, signature: Signature, options: Options) -> dict[str, str]:
    """All that decides a plan: model and loss, the example's structure and layouts, options, passes, the state of
    torch, versions, the device, and the number of processes."""
    known, modes = Known(), source.modes
    constants = [leaf for leaf in signature.leaves if isinstance(leaf, Constant)]
    return {
        **{f"model: {part}": text for part, text in identity(source.model, source.loss_fn).parts.items()},
        **{f"argument {leaf.name}": known.text(leaf.value) for leaf in constants},
        **{name: spelled(getattr(options, name)) for name in {f.name: f for f in fields(options)}.keys() - UNSEEN},
        "tensors": spelled(signature.tensors),
        "structure": spelled([signature.structure, signature.input_count, signature.is_guess]),
        "passes": spelled([given.told for given in options.passes]),
        "modes": spelled([modes.switches, modes.autocasts, modes.keeps_casts]),
        "versions": spelled([PLAN_FORMAT, own_version(), torch.__version__, platform.python_version()]),
        "device": device_text(options.device),
        "processes": str(1 if is_alone() else dist.get_world_size()),
    }


def device_text(device: torch.device) -> str:
    """The kind of a device: costs are measured on it."""
    if device.type == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(device)
        return f"{found.name} {found.total_memory} {torch.version.cuda}"
    return f"{device.type} {platform.machine()} {platform.processor()}"


def make_room(folder: Path, newest: Path, most_bytes: int) -> None:
    """Remove the least recently used plans of a folder that holds more than it may, and what broken writes have left.
    Others may do so at the same time."""
    found: list[tuple[float, int, Path]] = []
    for file in folder.glob("*.plan*"):
        with suppress(OSError):
            state = file.stat()
            found.append((state.st_mtime, state.st_size, file))
    held = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if held <= most_bytes:
            return
        if file != newest:
            with suppress(OSError):
                file.unlink()
            held -= size
