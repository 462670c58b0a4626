"""zbfx: compiled from a model on the meta device; each rank allocates the parameters of its own stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zbfx
from benchmarks.gpt import GPT, next_token_loss
from benchmarks.measure import Runnable, reset_peak
from benchmarks.place import Place, layer_counts, placement
from benchmarks.stages import CONFIGS, batch, fill, pieces
from benchmarks.throughput.cases import Case, ZbfxSchedule
from zbfx.runtime.step import Step

V_SCHEDULES = ("zb-v", "v-half", "v-min")


def ours(case: Case, place: Place, costs: str) -> Runnable:
    """One schedule and backend of zbfx over all ranks, planned from `costs`."""
    pipe, step = bound(case, place, costs)
    data = batch(CONFIGS[case.config], case.m * case.b, place.device)
    return Runnable(
        lambda: step(*data),
        list(step.parameters()),
        layers=blocks_of_stages(pipe),
        planned_ms=pipe.schedule.planned_s * 1e3,
        planned_gib=[memory.peak_bytes / 2**30 for memory in pipe.memory],
        close=step.close,
    )


def bound(case: Case, place: Place, costs: str) -> tuple[zbfx.Pipeline, Step]:
    """The case's pipeline and this rank's step."""
    config = CONFIGS[case.config]
    with torch.device("meta"):
        model = GPT(config).to(place.dtype)
    if "inductor" in case.backend:
        place.fresh_compiler(case.name)
    example_ids, example_targets = batch(config, case.b, place.device)
    arguments: dict[str, Any] = {
        "stages": place.ranks,
        "microbatches": case.m,
        "example_inputs": (example_ids,),
        "example_targets": example_targets,
        "loss_fn": next_token_loss,
        "device": place.device,
    }
    chosen = choices(case, place)
    if str(chosen.get("mem_limit", "")).endswith("%"):
        plain = zbfx.compile(model, **arguments, schedule="1f1b", overlap=False)
        chosen["mem_limit"] = int(max(plain.schedule.peak_bytes) * float(chosen["mem_limit"][:-1]) / 100)
    pipe = zbfx.compile(model, **arguments, costs=costs, **chosen)
    reset_peak(place.device)
    materialize(model, pipe, place)
    transport = ZbfxSchedule.parse(case.schedule).transport
    return pipe, pipe.bind(timeout_s=place.timeout_s, transport=transport)


def choices(case: Case, place: Place) -> dict[str, Any]:
    """The arguments of `compile` that the case decides; what it leaves open is left to zbfx."""
    asked = ZbfxSchedule.parse(case.schedule)
    arguments: dict[str, Any] = {"schedule": asked.name}
    if asked.recompute is not None:
        arguments["recompute"] = asked.recompute
    if asked.mem_limit is not None:
        arguments["mem_limit"] = asked.mem_limit
    if asked.stages_per_rank is not None:
        arguments["stages_per_rank"] = asked.stages_per_rank
    if case.backend != "eager":
        arguments["backend"] = case.backend
    if case.split == "rebalanced":
        arguments["rebalance"] = True
    elif case.split != "auto":
        arguments["cuts"] = cuts(case, asked, place)
    if asked.overlap is not None:
        arguments["overlap"] = asked.overlap
    return arguments


def cuts(case: Case, asked: ZbfxSchedule, place: Place) -> list[str]:
    """The submodules that begin the second stage, the third, ...: the same cuts as the other systems'."""
    style = "v" if asked.name in V_SCHEDULES else "loop"
    default = 2 if style == "v" or asked.name == "interleaved-1f1b" else 1
    counts = layer_counts(case, place, placement(place.ranks, asked.stages_per_rank or default, style))
    return [piece.first_module for piece in pieces(counts)[1:]]


def own_parameters(pipe: zbfx.Pipeline, rank: int) -> set[str]:
    """The parameters that this rank's stages read or give gradients to."""
    placed = pipe.schedule.costs.placement
    own = [stage for stage in pipe.stages if placed[stage.index] == rank]
    return {name for stage in own for phase in stage.phases.values() for name in phase.parameters}


def materialize(model: nn.Module, pipe: zbfx.Pipeline, place: Place) -> None:
    """Give this rank's parameters memory and their initial values; the others stay on the meta device."""
    for name in own_parameters(pipe, place.rank):
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        value = nn.Parameter(torch.empty_like(owner.get_parameter(leaf), device=place.device))
        fill(name, value)
        setattr(owner, leaf, value)


def blocks_of_stages(pipe: zbfx.Pipeline) -> list[int]:
    """How many blocks each stage holds, counted by the first weight of each."""
    mark = ".norm_1.weight"
    names = [{n for phase in stage.phases.values() for n in phase.parameters} for stage in pipe.stages]
    return [sum(name.endswith(mark) for name in found) for found in names]
