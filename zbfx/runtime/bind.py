"""A rank's step, from a pipeline and the channels to its other ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zbfx.comm.channels import Channels
from zbfx.program.messages import buffer_holders, parameter_holders
from zbfx.runtime.agreement import agree, prepare, refuse_other_values, warn_of_other_values
from zbfx.runtime.captured import CapturedStep
from zbfx.runtime.digest import digest
from zbfx.runtime.engine import message_pairs, rank_engine
from zbfx.runtime.flat import Shards
from zbfx.runtime.rank_step import RankStep
from zbfx.runtime.step import StepOptions

if TYPE_CHECKING:
    from zbfx.pipeline import Pipeline


def bound_step(pipe: Pipeline, channels: Channels, options: StepOptions) -> RankStep:
    """This process's step of the pipeline, where all ranks hold the same one, with its tensors in place and equal, and
    its connections warm. Collective over all processes."""
    place, tensors = channels.place, pipe.tensors()
    engine = rank_engine(pipe, tensors, channels)
    runner = engine.runners[0]
    placement = pipe.schedule.costs.placement
    holders = parameter_holders(pipe.stages, placement) | buffer_holders(pipe.stages, placement)
    agree(channels, digest(pipe), partial(prepare, pipe, engine, holders))
    copies = [(name, first, other) for name, (first, *others) in holders.items() for other in others]
    channels.open(message_pairs(pipe) | {(first, other) for _, first, other in copies})
    for name, first, other in copies:
        if place.rank in (first, other):
            channels.copy(tensors.named[name].detach(), first, other)
    if len(place.replicas) > 1:
        refuse_other_values(channels, {name: tensors.named[name] for name in sorted(runner.tensor_names)})
    compared = {name: tensors.named[name] for name in holders if name not in pipe.local}
    warn_of_other_values(channels, compared, runner.tensor_names)
    if pipe.reductions and pipe.reductions[place.rank].shards:
        buckets = pipe.reductions[place.rank].shards
        runner.shards = Shards(buckets, tensors.named, place.replica, len(place.replicas))
    options = replace(options, seed=int(channels.gather(options.seed)[0]))
    for call in runner.calls:
        call.run = pipe.compiler(call.phase)
    step_type = CapturedStep if pipe.backend.startswith("cudagraph") else RankStep
    return step_type(engine, options, channels, tensors)
