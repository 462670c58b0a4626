"""The check that `compile` runs by itself: on pipelines so small that it takes about a second."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy
import torch

from zbfx import rng
from zbfx.comm.together import on_all_ranks
from zbfx.compiled import Compiled
from zbfx.errors import TraceError, first_line, listed
from zbfx.gradient_check import Report, apart, check_compiled
from zbfx.passes.nodes import value_bytes
from zbfx.progress import announce
from zbfx.trace.guard import Source

LARGEST_BYTES, LARGEST_NODES, LARGEST_S = 1 << 26, 3000, 0.02  # of values, of the graph, of a microbatch's work
TOLERANCE = 1e-3  # what is lost, doubled or baked in is wrong by as much as it is large


def self_checked(pipe: Compiled, source: Source) -> Compiled:
    """The pipeline, once `check` has found it right, if the options ask for it. Raises `TraceError` if it is wrong.
    Where "auto" finds no memory for it, the schedule's notes say so."""
    choice = pipe.options.check
    return pipe if choice is False else on_all_ranks("compile (the check)", partial(checked, pipe, source, choice))


def checked(pipe: Compiled, source: Source, choice: bool | str) -> Compiled:
    """Within one process: a model may have its data on one rank and none on another."""
    if choice is not True and not is_small(pipe, source):
        return pipe
    announce("checking the pipeline on random microbatches")
    try:
        with undisturbed(pipe.device):
            report = check_compiled(apart(pipe), source, 0, TOLERANCE, TOLERANCE**2)
    except (MemoryError, torch.OutOfMemoryError) as error:
        if choice is True:
            raise
        note = f"not checked: {type(error).__name__}: {first_line(error)}"
        schedule = replace(pipe.schedule, notes=(*pipe.schedule.notes, note))
        return pipe.described(schedule)
    if not report:
        raise TraceError(refusal(report, [given.name for given in pipe.options.passes]))
    return pipe


def refusal(report: Report, passes: Sequence[str]) -> str:
    found = "; ".join(map(str, report.findings[:5]))
    more = f" and {len(report.findings) - 5} more" if len(report.findings) > 5 else ""
    if any(finding.of_model for finding in report.findings):
        way_out = (
            "Python values are part of the graph as they were when it was traced: pass what changes as a tensor, or "
            "keep it in a buffer; or compile with check=False"
        )
    elif passes:
        way_out = (
            f"{listed(passes)} ran on its graph and may have changed them: where that is meant, compile with "
            f"check=False, and compare by zbfx.check(pipe, tolerance=...)"
        )
    else:
        way_out = (
            "This is a fault of zbfx or of an operator's derivative: please report the model; or compile with "
            "check=False"
        )
    return f"on random data the pipeline computes other results than the model: {found}{more}. {way_out}"


def is_small(pipe: Compiled, source: Source) -> bool:
    """Whether checking costs about a second, in this process, on tensors that are there."""
    if source.local:
        return False
    nodes, tensors = pipe.joint.graph.nodes, source.tensors.values()
    if any(tensor.is_meta for tensor in (*tensors, *pipe.examples)) or len(nodes) > LARGEST_NODES:
        return False
    if pipe.device.type == "cuda" and not torch.cuda.is_available():
        return False
    if sum(stage.work_s for stage in pipe.schedule.costs.stages) > LARGEST_S:
        return False
    return sum(value_bytes(node) for node in nodes if "val" in node.meta) < LARGEST_BYTES


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Meanwhile, random numbers may be drawn by torch, numpy and Python; afterwards all go on as before."""
    python, array = random.getstate(), numpy.random.get_state()
    try:
        with rng.preserved_generators(device):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
