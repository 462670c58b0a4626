"""The check that `compile` runs by itself: on pipelines so small that it takes about a second."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy
import torch

from zbfx import rng
from zbfx.check import Report, check
from zbfx.comm.together import on_all_ranks
from zbfx.errors import TraceError, ZbfxError, first_line
from zbfx.passes.nodes import value_bytes

if TYPE_CHECKING:
    from zbfx.pipeline import Pipeline

CHOICES = (True, False, "auto")
LARGEST_BYTES, LARGEST_NODES, LARGEST_S = 1 << 26, 3000, 0.02  # of values, of the graph, of a microbatch's work
TOLERANCE = 1e-3  # what is lost, doubled or baked in is wrong by as much as it is large


def checked_choice(choice: bool | str) -> bool | str:
    if choice not in CHOICES:
        raise ZbfxError(f"check is one of {CHOICES}; found {choice!r}")
    return choice


def checked_pipeline(pipe: Pipeline, choice: bool | str) -> Pipeline:
    """The pipeline, once `check` has found it right, if `choice` asks for it. Raises `TraceError` if it is wrong.

    Where "auto" finds no memory for it, the schedule's notes say so.
    """
    return pipe if choice is False else on_all_ranks("compile (the check)", partial(run, pipe, choice))


def run(pipe: Pipeline, choice: bool | str) -> Pipeline:
    """Within one process: a model may have its data on one rank and none on another."""
    if choice == "auto" and not is_small(pipe):
        return pipe
    try:
        with undisturbed(pipe.device):
            report = check(pipe, tolerance=TOLERANCE, floor=TOLERANCE**2)
    except (MemoryError, torch.OutOfMemoryError) as error:
        if choice is True:
            raise
        note = f"not checked: {type(error).__name__}: {first_line(error)}"
        return replace(pipe, schedule=replace(pipe.schedule, notes=(*pipe.schedule.notes, note)))
    if not report:
        raise TraceError(refusal(report))
    return pipe


def refusal(report: Report) -> str:
    found = "; ".join(map(str, report.findings[:5]))
    more = f" and {len(report.findings) - 5} more" if len(report.findings) > 5 else ""
    own = any("of the model itself" in finding.name for finding in report.findings)
    way_out = (
        "Python values are part of the graph as they were when it was traced: pass what changes as a tensor, or keep "
        "it in a buffer"
        if own
        else "This is a fault of zbfx or of an operator's derivative: please report the model"
    )
    return (
        f"on random data the pipeline computes other results than the model: {found}{more}. {way_out}; or compile with "
        f"check=False"
    )


def is_small(pipe: Pipeline) -> bool:
    """Whether checking costs about a second, in this process, on tensors that are there."""
    if pipe.local:
        return False
    nodes = pipe.joint.graph.nodes
    if any(tensor.is_meta for tensor in (*pipe.tensors().named.values(), *pipe.examples)) or len(nodes) > LARGEST_NODES:
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
        with rng.undisturbed(device):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
