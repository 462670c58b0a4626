"""A pipeline as a page: what `Pipeline.report` writes.

Takes   a `Compiled`, a measured step or none, names of schedules to compare with.
Gives   the `Subject` of a page (`zbfx.show.page`).
Raises  `ZbfxError` for a schedule that has no such name, or that these stages cannot run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from zbfx.compiled import Compiled
from zbfx.errors import ZbfxError
from zbfx.graphs import Stage
from zbfx.plan import Kind
from zbfx.runtime.timeline import Profile
from zbfx.schedule.others import others
from zbfx.show.page import CutEdge, Subject


def subject(compiled: Compiled, profile: Profile | None, compare: Sequence[str] | None) -> Subject:
    """`compare` None: all schedules by hand that these stages can run, but the pipeline's own."""
    schedule = compiled.schedule if profile is None else profile.schedule
    programs = compiled.programs if schedule.ranks == compiled.schedule.ranks else ()
    return Subject(
        schedule,
        None if profile is None else profile.spans,
        cut_edges(compiled.stages),
        tuple(program.code.strip() for program in programs),
        others(schedule, compare) if compiled.trains else (),
    )


def example_batch(compiled: Compiled) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of a step, the example microbatch as often as there are microbatches: positional and keyword arguments.
    Raises `ZbfxError` for an example without data."""
    if any(example.is_meta for example in compiled.examples):
        raise ZbfxError(
            "the example microbatch has no data (it is on the meta device), so that no step can run on it. Compile "
            "with an example that has data, or profile a batch of your own: step.profile(...)"
        )
    count, specs = compiled.schedule.microbatches, compiled.signature.tensors
    tensors = [
        example if spec.batch_dim is None else torch.cat([example] * count, spec.batch_dim)
        for spec, example in zip(specs, compiled.examples, strict=True)
    ]
    return compiled.signature.unflatten(tensors)


def cut_edges(stages: Sequence[Stage]) -> tuple[CutEdge, ...]:
    """What stages send each other for one microbatch, each value once for each stage that reads it."""
    sent: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for stage in stages:
        for name in (name for kind in (Kind.F, Kind.B, Kind.W) for name in stage.phases[kind].values):
            source = stage.origins[name][0]
            if source != stage.index:
                sent[source, stage.index][name] = stage.stored_bytes([name])
    pairs = sorted({(min(ends), max(ends)) for ends in sent})
    return tuple(
        CutEdge(low, high, sum(forward.values()), sum(back.values()), (*forward, *back))
        for low, high in pairs
        for forward, back in [(sent.get((low, high), {}), sent.get((high, low), {}))]
    )
