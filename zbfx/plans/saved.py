"""A pipeline <-> the file of its plan.

Takes   a `Compiled` and its model; or a file, and the model that is to run it.
Gives   the file; or a `Compiled` equal to the one that was saved, and the modes that it was traced in.
Raises  `ZbfxError` for what no file can hold, and for a file that is damaged, or of another zbfx, torch or model.

Programs follow from stages and schedule: they are generated anew, and compared by hash with those of before. What was
read is verified (`zbfx.verify`) as what passes give is.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbfx.compiled import Compiled
from zbfx.errors import ZbfxError, first_line, listed
from zbfx.modes import SWITCHES, Modes
from zbfx.plans.conforming import kinds_within
from zbfx.plans.files import DAMAGES, NOT_A_PLAN, read_plan, write_plan
from zbfx.plans.identity import identity
from zbfx.plans.values import RecordReader, RecordWriter
from zbfx.runtime.digest import digest
from zbfx.schedule.orders.registry import Improve
from zbfx.schedule.schedule import Schedule
from zbfx.trace.guard import Source
from zbfx.user_pass import Pass
from zbfx.verify import verify

PARTS = ("format", "zbfx", "torch", "device", "model", "passes", "modes", "compiled", "digest")
PLAN_FORMAT = 1
MOST_EXAMPLE_BYTES = 1 << 24  # of the example microbatch; of a larger one, layouts alone are kept


@cache
def kinds() -> Mapping[str, type]:
    """The records and enumerations of plans, by name: those of `Compiled`, and those that an option of any type is."""
    return kinds_within(Compiled, Modes, Schedule, Improve)


@cache
def own_version() -> str:
    """The version of zbfx, with a hash of its sources: they change between versions."""
    package, folder = sys.modules[__name__.partition(".")[0]], Path(__file__).parents[1]
    found = sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return f"{vars(package)['__version__']} ({found.hexdigest()[:12]})"


def torch_version() -> str:
    """That of the release; builds for other devices trace alike."""
    return torch.__version__.partition("+")[0]


def save_plan(pipe: Compiled, source: Source, path: Path, namespaces: Collection[str] = ()) -> None:
    """Write the plan of a pipeline."""
    refuse_unkept(pipe, source)
    writer = RecordWriter(pipe.device, namespaces, kinds())
    size = sum(example.numel() * example.element_size() for example in pipe.examples)
    examples = pipe.examples if size <= MOST_EXAMPLE_BYTES else [example.to("meta") for example in pipe.examples]
    kept = replace(pipe, options=replace(pipe.options, passes=()), examples=tuple(e.detach() for e in examples))
    document = {
        "format": PLAN_FORMAT,
        "zbfx": own_version(),
        "torch": torch_version(),
        "device": pipe.device.type,
        "model": refused_strange(source),
        "passes": [given.told for given in pipe.options.passes],
        "modes": writer.inside("modes", source.modes),
        "compiled": writer.data(kept),
        "digest": digest(pipe),
    }
    try:
        write_plan(path, document, writer.tensors)
    except OSError as error:
        raise ZbfxError(f"cannot write the plan {path}: {error.strerror or first_line(error)}") from error


def refuse_unkept(pipe: Compiled, source: Source) -> None:
    """Raise for a pipeline with something that a file cannot hold, or that a model found again does not bring."""
    if source.local:
        raise ZbfxError(
            "a plan on disk is one of plain parameters; found DTensor parameters, whose graphs name groups of "
            "processes. Compile in each process"
        )
    if source.modes.function_modes:
        raise ZbfxError(
            f"a plan on disk was compiled without function modes, such as torch.set_default_device; found "
            f"{listed(type(mode).__name__ for mode in source.modes.function_modes)}. Call compile outside of them"
        )
    requests = pipe.options.schedule, getattr(pipe.options.schedule, "start", None)
    if any(callable(request) for request in requests):
        raise ZbfxError(
            "a plan on disk has its schedule as data; found one that is a function, which further shapes would call. "
            "Compile with schedule=pipe.schedule, the orders that it gave, and save that pipeline"
        )


def refused_strange(source: Source) -> dict[str, str]:
    """What the model and its loss are. Raises where they read objects that nothing tells apart."""
    parts, strange = identity(source.model, source.loss_fn)
    if strange:
        raise ZbfxError(
            f"a plan on disk is of a model whose values can be compared; found objects of {listed(strange)}, which "
            f"have neither attributes nor a text of their own. Compile each time, or keep them out of the model's "
            f"attributes and of what its code and the loss read"
        )
    return parts


@dataclass(frozen=True)
class LoadedPlan:
    """What a file held: the pipeline, hashes of its parts, and the state of torch that it was traced in."""

    compiled: Compiled
    digest: Mapping[str, str]
    modes: Modes


def load_saved(
    path: Path,
    source: Source,
    device: torch.device,
    passes: Sequence[Pass],
    namespaces: Collection[str] = (),
    examples: tuple[Tensor, ...] = (),
) -> LoadedPlan:
    """The plan in a file, for this model on this device. `passes` are those that it was compiled with. `examples`, if
    there are any, take the place of the example microbatch."""
    contents = read_plan(path)
    document = contents.document
    if document.keys() != {*PARTS}:
        raise ZbfxError(f"{path} {NOT_A_PLAN}: it has {', '.join(PARTS)}; found {listed(document)}")
    refuse_other_model(path, document, source, device, passes)
    reader = RecordReader(device, namespaces, kinds(), contents.tensor)
    try:
        compiled, modes = reader.value(document["compiled"]), reader.value(document["modes"])
        if not isinstance(compiled, Compiled) or not isinstance(modes, Modes):
            raise ZbfxError("it holds no pipeline")
        if modes.function_modes or len(modes.switches) != len(SWITCHES):
            raise ZbfxError("it holds other switches of torch than there are")
        options = replace(compiled.options, passes=tuple(passes))
        compiled = replace(compiled, options=options, examples=examples or compiled.examples)
        check_loaded(compiled)
        found, expected = digest(compiled), document["digest"]
        if found != expected:
            wrong = [part for part, text in found.items() if expected.get(part) != text]
            raise ZbfxError(f"{listed(wrong)} of what was read are not those that were saved")
    except DAMAGES as error:
        raise ZbfxError(f"{path} {NOT_A_PLAN}: {first_line(error) or type(error).__name__}") from error
    return LoadedPlan(compiled, found, modes)


def refuse_other_model(
    path: Path,
    document: Mapping[str, Any],
    source: Source,
    device: torch.device,
    passes: Sequence[Pass],
) -> None:
    """Raise for a file of another version or model, and name what differs."""
    versions = {"format": PLAN_FORMAT, "zbfx": own_version(), "torch": torch_version(), "device": device.type}
    for part, own in versions.items():
        if document[part] != own:
            found = f"{document[part]}"[:60]
            raise ZbfxError(f"the plan {path} is of {part} {found}; this is {part} {own}. Compile again, and save that")
    told = [given.told for given in passes]
    if document["passes"] != told:
        raise ZbfxError(
            f"the plan {path} was compiled with the passes {shown_list(document['passes'])}; found {shown_list(told)}. "
            f"Give the same ones in passes=, or compile again"
        )
    before, own = document["model"], identity(source.model, source.loss_fn).parts
    if not isinstance(before, dict):
        raise ZbfxError(f"{path} {NOT_A_PLAN}: it names no model")
    parts = dict.fromkeys((*before, *own))
    wrong = [part for part in parts if before.get(part) != own.get(part)]
    if wrong:
        part = wrong[0]
        more = f", and so do {listed(wrong[1:], 3)}" if len(wrong) > 1 else ""
        raise ZbfxError(
            f"the plan {path} is of another model. {part} differs{more}: expected {before.get(part, 'none')}, found "
            f"{own.get(part, 'none')}. Load it with the model that it was compiled of, or compile again"
        )


def shown_list(texts: Any) -> str:
    return f"[{listed(texts)}]" if isinstance(texts, list) else "none"


def check_loaded(pipe: Compiled) -> None:
    """Raise unless what was read holds together as what the compiler makes does."""
    verify(pipe.joint, after="load_plan")
    verify(pipe.stages, after="load_plan")
    stages, ranks = len(pipe.placement), len(pipe.schedule.ranks)
    counts = {
        "stages": (len(pipe.stages), stages),
        "ranks": (pipe.options.stages, ranks),
        "microbatches": (pipe.reduction.microbatches, pipe.schedule.microbatches),
        "examples": (len(pipe.examples), len(pipe.signature.tensors)),
        "reductions": (len(pipe.reductions) or ranks, ranks),
    }
    for what, (found, expected) in counts.items():
        if found != expected:
            raise ZbfxError(f"it has {expected} {what} by one part, {found} by another")
    verify(pipe.programs, after="load_plan", given=pipe.schedule)
