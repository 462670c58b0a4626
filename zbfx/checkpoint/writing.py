"""Writes a checkpoint from several processes. In: the tensors that each process has, and what else is to be kept. Out:
a folder that DCP reads, with one more file for what is no tensor. Planning comes first; what is planned can be written
in another thread, which meets those of the other processes through a `gather` of its own."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from zbfx.checkpoint import folders
from zbfx.checkpoint.parts import Boxes, PartSaver
from zbfx.errors import ZbfxError, first_line, listed

OTHERS = "training.pt"  # what is no tensor: counts, seeds, hyperparameters

Gather = Callable[[Any], list[Any]]  # the value of each process, in order, on every one


@dataclass(frozen=True)
class Plan:
    """What this process writes, and where. The first process also writes `others`, and ends the checkpoint."""

    path: Path  # until it is whole
    count: int
    keep: int | None
    own: SavePlan
    planner: PartSaver
    metadata: Metadata
    others: Mapping[str, Any]
    is_first: bool


def plan_files(
    tensors: Mapping[str, Tensor | Boxes],
    others: Mapping[str, Any],
    folder: Path,
    count: int,
    keep: int | None,
    gather: Gather,
    index: int,
) -> Plan:
    """Agree on who writes what; `index` is this process's among those that gather. Tensors that several processes have
    are written by one."""
    planner = PartSaver()
    planner.set_up_planner(dict(tensors), is_coordinator=index == 0)
    plans = gather(planner.create_local_plan())

    def decided() -> tuple[Path, list[SavePlan], Metadata]:
        plan, metadata = planner.create_global_plan(plans)
        path = folders.begin(folder, count)
        return path, FileSystemWriter(path).prepare_global_plan(plan), metadata

    found = gather(answered(decided) if index == 0 else None)[0]
    path, all_plans, metadata = result_of(found)
    return Plan(path, count, keep, planner.finish_plan(all_plans[index]), planner, metadata, others, index == 0)


def write_files(plan: Plan, gather: Gather) -> Path:
    """Write the files of this process, and wait for those of the others. Raises `ZbfxError` on all if one fails: then
    there is no such checkpoint."""
    writer = FileSystemWriter(plan.path, single_file_per_rank=True, sync_files=True)
    answers = gather(answered(lambda: writer.write_data(plan.own, plan.planner).value()))
    results = [result_of(answer) for answer in answers]

    def end() -> Path:
        missing = {info.relative_path for found in results for info in (r.storage_data for r in found)}
        missing -= {file.name for file in plan.path.iterdir()}
        if missing:
            raise ZbfxError(
                f"{plan.path.parent} is not the same folder on all processes; {listed(sorted(missing), 3)} "
                f"are missing here. Save into a folder that all of them share"
            )
        with (plan.path / OTHERS).open("wb") as file:
            torch.save(dict(plan.others), file)
            file.flush()
            os.fsync(file.fileno())
        writer.finish(plan.metadata, results)
        return folders.commit(plan.path, plan.count, plan.keep)

    return result_of(gather(answered(end) if plan.is_first else None)[0])


def answered(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of what other processes wait for, or why there is none."""
    try:
        return work(), None
    except Exception as error:  # whatever it is, the others wait for this process
        return None, first_line(error) or type(error).__name__


def result_of(answer: tuple[Any, str | None]) -> Any:
    value, refusal = answer
    if refusal is not None:
        raise ZbfxError(f"the checkpoint was not saved: {refusal}. Those before are as they were")
    return value


def others_of(folder: Path) -> dict[str, Any]:
    """What of a checkpoint is no tensor. Raises `ZbfxError` where it is missing or damaged."""
    try:
        with (folder / OTHERS).open("rb") as file:
            return torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        raise ZbfxError(
            f"{folder} is no checkpoint of step.save, or damaged: {first_line(error)}. Load another one"
        ) from error
    except Exception as error:  # pickle.UnpicklingError, for what is no plain data
        raise ZbfxError(
            f"{folder / OTHERS} holds other things than plain data, which are not read, for they may run code: "
            f"{first_line(error)}. Load what step.save wrote"
        ) from error
