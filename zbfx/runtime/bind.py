"""A step, from a compiled pipeline and the ranks that run it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbfx.checkpoint.weights import fill
from zbfx.comm.place import Place, find_place
from zbfx.comm.together import waiting
from zbfx.compiled import Compiled
from zbfx.errors import ZbfxError
from zbfx.program.boxed import Compiler
from zbfx.program.messages import buffer_holders, parameter_holders
from zbfx.runtime.agreement import agree, prepare, refuse_other_values, warn_of_other_values
from zbfx.runtime.captured import Captured, Launched
from zbfx.runtime.digest import digest
from zbfx.runtime.engine import rank_engine
from zbfx.runtime.engines import MakesFurther
from zbfx.runtime.flat import Shards
from zbfx.runtime.options import BindOptions, StepOptions
from zbfx.runtime.ranks import AllHere, OneOfMany
from zbfx.runtime.runner import Tensors
from zbfx.runtime.step import Step
from zbfx.runtime.survival import refuse_survival
from zbfx.runtime.worker import Worker
from zbfx.trace.guard import Source
from zbfx.trace.tensor_parallel import groups_of, refuse_other_shards


def local_step(
    pipe: Compiled, source: Source, ranks: AllHere, options: StepOptions, variants: MakesFurther, weights: Any
) -> Step:
    if options.buckets is not None:
        options.buckets.check(pipe)
    engine = ranks.engine(pipe, Tensors(source.tensors, pipe.joint.constants))
    seed = torch.initial_seed() if options.seed is None else options.seed
    if weights is not None:
        fill(source, weights, engine.tensor_names, source.tensors.keys() - engine.tensor_names, pipe.device, seed)
    prepare(pipe, source, engine)
    return Step(Worker(engine, replace(options, seed=seed), ranks, Launched(), source, variants))


def process_place(pipe: Compiled, source: Source, rank_or_mesh: int | DeviceMesh | None, options: BindOptions) -> Place:
    """Where this process stands among those that run the pipeline. Raises `ZbfxError` where they do not fit."""
    options.check()
    if options.buckets is not None:
        options.buckets.check(pipe)
    place = find_place(len(pipe.schedule.ranks), rank_or_mesh, options.independent)
    refuse_other_shards(source.named, place.shards, pipe.joint.graph)
    replicas = len(place.replicas)
    if pipe.reductions and replicas == 1:
        raise ZbfxError("this pipeline sums gradients over replicas; found one replica. Bind it to a mesh with more")
    options.check_replicas(replicas)
    if options.survive:
        refuse_survival(pipe, place, options)
    if options.checksums and pipe.options.runs.captures:
        raise ZbfxError(
            f"checksums are compared by the host, message by message, and backend={pipe.options.backend!r} captures "
            f"steps as CUDA graphs, which wait for no host: leave checksums out, or compile with another backend"
        )
    return place


def bound_step(
    pipe: Compiled,
    source: Source,
    compiler: Compiler,
    ranks: OneOfMany,
    options: BindOptions,
    variants: MakesFurther,
    weights: Any,
) -> Step:
    """This process's step of the pipeline, where all ranks hold the same one, with its tensors in place and equal, and
    its connections warm. Collective over all processes."""
    channels, tensors = ranks.channels, Tensors(source.tensors, pipe.joint.constants)
    place, engine = channels.place, rank_engine(pipe, tensors, channels)
    (runner,) = engine.runners
    holders = parameter_holders(pipe.stages, pipe.placement) | buffer_holders(pipe.stages, pipe.placement)
    seed = torch.initial_seed() if options.seed is None else options.seed
    seed = channels.gather_shards(ranks.everywhere(seed)[0])[0]

    def ready() -> None:
        if weights is not None:
            spare = spare_names(source, holders, place.rank)
            fill(source, weights, engine.tensor_names, spare, pipe.device, seed)
        prepare(pipe, source, engine, holders)

    agree(channels, digest(pipe), ready)
    copies = [(name, first, other) for name, (first, *others) in holders.items() for other in others]
    with waiting(channels.name, "the other ranks in bind, one of which"):
        channels.open(pipe.message_pairs | {(first, other) for _, first, other in copies})
        for name, first, other in copies:
            if place.rank in (first, other):
                channels.copy(tensors.named[name].detach(), first, other)
        if ranks.replicas > 1:
            refuse_other_values(channels, {name: tensors.named[name] for name in sorted(runner.tensor_names)})
    compared = {name: tensors.named[name] for name in holders if name not in source.local}
    warn_of_other_values(channels, compared, runner.tensor_names)
    if any(reductions.shards for reductions in pipe.reductions):  # on all ranks, those without parameters too
        runner.shard(Shards(pipe.reductions[place.rank].shards, tensors.named, place.replica, ranks.replicas))
    channels.users = groups_of(source.named)
    engine.run_phases_by(compiler)
    launch = Captured() if pipe.options.runs.captures else Launched()
    worker = Worker(engine, replace(options, seed=seed), ranks, launch, source, variants, compiler)
    if options.survive:
        worker.survive(channels)
    return Step(worker)


def spare_names(source: Source, holders: Collection[str], rank: int) -> set[str]:
    """What no stage reads, and this rank has all the same. These are buffers, which are small, and which evaluation may
    read; on the first rank parameters too."""
    spare = {name: tensor for name, tensor in source.tensors.items() if name not in holders}
    return {name for name, tensor in spare.items() if rank == 0 or not isinstance(tensor, nn.Parameter)}
