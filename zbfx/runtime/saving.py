"""A step's training state, to disk and back: `step.save` and `step.load`. In: a step's worker and the objects
of its training. Out: a checkpoint that steps of other ranks, cuts, replicas and `zero` can load, or a step that goes on
from one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbfx.arguments import kind_of, true_or_false, whole_number
from zbfx.checkpoint import distributed, folders, writing
from zbfx.checkpoint.objects import ObjectLoad, Stateful, merged_objects, object_state
from zbfx.checkpoint.optimizers import OptimizerLoad, merged_optimizers, optimizer_state
from zbfx.checkpoint.parts import Boxes
from zbfx.checkpoint.state import Checkpoint, State
from zbfx.errors import ZbfxError, listed
from zbfx.runtime.being_saved import Saved
from zbfx.runtime.holding import Holding
from zbfx.runtime.on_disk import path_of
from zbfx.runtime.worker import Worker

FORMAT = 1  # of what a checkpoint holds beside tensors
RESERVED = ("model", "replica")  # labels of what a step itself saves


def save_step(
    worker: Worker, folder: Any, keep: Any, is_async: Any, with_frozen: Any, objects: Mapping[str, Any]
) -> Saved:
    def prepared() -> tuple[Holding, State, dict[str, Any]]:
        path_of(folder)
        if keep is not None:
            whole_number("keep", keep, "how many checkpoints stay in the folder")
        true_or_false("async_", is_async)
        true_or_false("frozen", with_frozen)
        refuse_left_out(worker, objects)
        holding = Holding.of(worker.source, worker.engine)
        return holding, *holding_state(holding, left_out(holding, with_frozen), with_states(objects))

    end_saving(worker)
    asked = {"keep": keep, "async_": is_async, "frozen": with_frozen, "objects": kinds_of(objects)}
    holding, state, plains = worker.agreed("save", prepared, asked)

    def gather(value: Any) -> list[Any]:
        return worker.guarded(lambda: worker.ranks.everywhere(value))

    others = merged(worker, objects, gather(plains)) | {"left_out": sorted(left_out(holding, with_frozen))}
    if is_async:
        state.tensors = {key: on_host(value) for key, value in state.tensors.items()}
    plan = writing.plan_files(state.tensors, others, path_of(folder), worker.count, keep, gather, holding.index)
    aside = worker.guarded(worker.ranks.aside) if is_async else gather
    worker.saving = Saved(lambda: writing.write_files(plan, aside), aside=is_async)
    return worker.saving


def end_saving(worker: Worker) -> None:
    """Wait for the last checkpoint. Raises `ZbfxError` if it could not be written."""
    last, worker.saving = worker.saving, None
    if last is not None:
        last.wait()


def kinds_of(objects: Mapping[str, Any]) -> dict[str, str]:
    return {label: type(value).__name__ for label, value in sorted(objects.items())}


def with_states(objects: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises `ZbfxError` for what has no state that could be saved and loaded."""
    for label, value in objects.items():
        if label in RESERVED:
            raise ZbfxError(f"{label} is the name of what the step itself saves: give your object another one")
        if not isinstance(value, Stateful):
            raise ZbfxError(f"{label} is an object with state_dict() and load_state_dict(); found {kind_of(value)}")
    return objects


def refuse_left_out(worker: Worker, objects: Mapping[str, Any]) -> None:
    """Raise where the optimizer that runs with a step would be lost."""
    if worker.optimizer is not None and all(value is not worker.optimizer for value in objects.values()):
        raise ZbfxError(
            "this step has an optimizer whose steps are validated afterwards, and it is not among what is saved or "
            "loaded: pass it by a name, as in step.save(folder, optimizer=optimizer)"
        )


def left_out(holding: Holding, with_frozen: bool) -> frozenset[str]:
    """The tensors of the model that no step changes, unless a checkpoint has those too."""
    changed = {name for name, tensor in holding.live.items() if tensor.requires_grad} | holding.written
    return frozenset() if with_frozen else frozenset(holding.kept) - changed


def holding_state(
    holding: Holding, without: frozenset[str], objects: Mapping[str, Any]
) -> tuple[State, dict[str, Any]]:
    """The tensors that this process gives, and the plain data of its objects, by label."""
    kept = [name for name in holding.kept if name not in without]
    own = [name for name in kept if name in holding.owned and not holding.live[name].is_meta]
    state = State({holding.key(name): holding.live[name].detach() for name in own})
    plains = dict[str, Any]()
    for label, value in objects.items():
        if isinstance(value, torch.optim.Optimizer):
            found = optimizer_state(label, value, holding.optimized, holding.owned)
        else:
            found = object_state(label, value, frozenset(holding.source.named), holding.owned)
        state.tensors |= found.tensors
        plains[label] = found.plain
    return state, plains


def merged(worker: Worker, objects: Mapping[str, Any], everywhere: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What of a checkpoint is no tensor, from what each process has."""
    optimizers, others = dict[str, Any](), dict[str, Any]()
    for label, value in objects.items():
        plains = [plain[label] for plain in everywhere]
        if isinstance(value, torch.optim.Optimizer):
            optimizers[label] = merged_optimizers(label, plains)
        else:
            others[label] = merged_objects(plains)
    return {
        "format": FORMAT,
        "count": worker.count,
        "seed": worker.options.seed,
        "processes": len(everywhere),
        "optimizers": optimizers,
        "objects": others,
    }


def on_host(value: Tensor | Boxes) -> Tensor | Boxes:
    """A copy in the host's memory."""
    if isinstance(value, Boxes):
        return replace(value, blocks={at: block.to("cpu", copy=True) for at, block in value.blocks.items()})
    return value.to("cpu", copy=True)


def load_step(worker: Worker, folder: Any, missing_ok: Any, objects: Mapping[str, Any]) -> Path | None:
    def found() -> tuple[Holding, Path | None]:
        true_or_false("missing_ok", missing_ok)
        refuse_left_out(worker, with_states(objects))
        path = path_of(folder)
        is_missing = missing_ok and not distributed.is_distributed(path) and not folders.checkpoints(path)
        return Holding.of(worker.source, worker.engine), None if is_missing else folders.newest(path)

    end_saving(worker)
    asked = {"missing_ok": missing_ok, "objects": kinds_of(objects)}
    holding, own = worker.agreed("load", found, asked)
    first = worker.guarded(lambda: worker.ranks.everywhere(None if own is None else own.name))[0]
    if first is None:
        return None
    path = path_of(folder) if own is None or own == path_of(folder) else own.with_name(first)
    stored, targets, loads = worker.agreed("load (names)", lambda: plan_load(path, holding, objects), {})
    worker.agreed("load (values)", lambda: read_values(path, stored, targets, loads), {})
    worker.count = stored.plain["count"]
    worker.options = replace(worker.options, seed=stored.plain["seed"])
    if worker.survival is not None:
        worker.guarded(worker.survival.loaded)
    return path


Loads = list[OptimizerLoad | ObjectLoad]


def plan_load(
    path: Path, holding: Holding, objects: Mapping[str, Any]
) -> tuple[Checkpoint, dict[str, Tensor | Boxes], Loads]:
    """What is to be read into which tensors. Raises `ZbfxError` where the checkpoint does not fit; nothing has changed
    then."""
    table, plain = distributed.table_of(path), writing.others_of(path)
    if plain.get("format") != FORMAT:
        raise ZbfxError(
            f"{path} was saved in format {plain.get('format')}; this version of zbfx reads {FORMAT}. Load it with the "
            f"version that saved it, and take its weights from there (step.export)"
        )
    stored = Checkpoint(table, plain)
    targets: dict[str, Tensor | Boxes] = model_targets(path, holding, stored)
    saved = plain["optimizers"].keys() | plain["objects"].keys()
    if missing := sorted(objects.keys() - saved):
        raise ZbfxError(
            f"{path} has no state of {listed(missing)}, but of {listed(sorted(saved)) or 'the model alone'}. Load by "
            f"the names of step.save"
        )
    if left := sorted(saved - objects.keys()):
        warnings.warn(f"{path} also has the state of {listed(left)}, which is not loaded", stacklevel=10)
    loads: Loads = []
    for label, value in objects.items():
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        if label not in plain["optimizers" if is_optimizer else "objects"]:
            raise ZbfxError(
                f"{label} was saved {'from no' if is_optimizer else 'from an'} optimizer; found {kind_of(value)}. Load "
                f"by the names of step.save"
            )
        if is_optimizer:
            loads.append(OptimizerLoad(label, value, holding.optimized, stored))
        else:
            names = frozenset(holding.source.named)
            loads.append(ObjectLoad(label, value, stored, names, holding.index, holding.processes))
        targets |= loads[-1].targets
    return stored, targets, loads


def model_targets(path: Path, holding: Holding, stored: Checkpoint) -> dict[str, Tensor | Boxes]:
    """The live tensors of this process by the keys of their values."""
    found: dict[str, Tensor | Boxes] = {}
    for name in holding.kept:
        live = holding.live[name].detach()
        is_used = name in holding.used
        if live.is_meta or (not is_used and name not in holding.owned):
            continue
        own, shared = holding.key(name), f"model.{name}"
        key = own if own in stored.entries and stored.plain["processes"] == holding.processes else shared
        if key not in stored.entries:
            if is_used and name not in stored.plain.get("left_out", ()):
                raise ZbfxError(f"{path} has no {name}: it was saved from another model. Load into that one")
            continue
        entry = stored.entries[key]
        layout = (tuple(entry.size), entry.properties.dtype)
        if layout != (tuple(live.shape), live.dtype):
            raise ZbfxError(
                f"{name} was saved with shape {layout[0]} and {layout[1]}; found {tuple(live.shape)} and {live.dtype}. "
                f"Load into the model that was saved"
            )
        found[key] = live
    return found


@torch.no_grad()
def read_values(path: Path, stored: Checkpoint, targets: Mapping[str, Tensor | Boxes], loads: Loads) -> None:
    try:
        distributed.read_into(path, stored.table, targets)
        for loading in loads:
            loading.finish()
    except ZbfxError as error:
        raise ZbfxError(f"{error}. Some tensors of this step have the values of it now: load another one") from error
