"""A pipeline -> the same as one of several replicas, with the sums of gradients in its programs (appendix A)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zbfx.codegen import generate
from zbfx.reductions import whole_reductions

if TYPE_CHECKING:
    from zbfx.pipeline import Pipeline

BUCKET_BYTES = 25 * 2**20


def replicated(pipe: Pipeline, replicas: int) -> Pipeline:
    """`pipe` as one of so many replicas; itself if there is only one, or if it is already."""
    if replicas == 1 or pipe.reductions:
        return pipe
    reductions = whole_reductions(pipe.stages, pipe.schedule, BUCKET_BYTES)
    return replace(pipe, reductions=reductions, programs=generate(pipe.stages, pipe.schedule, reductions))
