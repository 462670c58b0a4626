"""`load_plan`: a file of `Pipeline.save`, and the model that it was made of, become the pipeline again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbfx._torch.compiling import uncompiled
from zbfx.comm.together import telling
from zbfx.handle import Pipeline
from zbfx.modes import Modes, uncollected
from zbfx.options import checked_device, checked_model
from zbfx.plans.saved import load_saved
from zbfx.program.boxed import Compiler
from zbfx.trace.guard import Guard, Source
from zbfx.user_pass import Pass, checked_passes


@uncompiled
@telling("load_plan")
def load_plan(
    file: str | PathLike[str],
    model: nn.Module,
    loss_fn: Callable[..., Any] | None = None,
    *,
    device: torch.device | str | None = None,
    passes: Sequence[Pass] = (),
    namespaces: Sequence[str] = (),
) -> Pipeline:
    """The pipeline whose plan `Pipeline.save` wrote to `file`, of this model and this loss. Nothing is traced, planned
    or measured; further shapes and evaluation are traced when a step first meets them, as after `compile`.

    `device` is of the plan's kind; None: where the model's tensors are, the CPU for a model on meta. `passes` are those
    that the pipeline was compiled with, `namespaces` those of operators beside torch's that its graphs may call.

    Raises `ZbfxError` for a file that is no plan, and for one of another version of zbfx or torch, another kind of
    device, or another model, and names what differs: modules and their modes, the values that their code reads, names,
    shapes, dtypes and strides of tensors, the source of the modules' classes and of the loss.
    """
    model, passes = checked_model(model), checked_passes(passes)
    modes, own = Modes.now(), checked_device(device, model)
    with modes.fixed(), uncollected():
        source = Source(model, loss_fn, Guard.of(model, loss_fn), modes)
        loaded = load_saved(Path(file), source, own, passes, tuple(namespaces))
    compiler = Compiler(loaded.compiled.options.runs.compiles)
    return Pipeline(loaded.compiled, replace(source, modes=loaded.modes), compiler)
