"""A model that the command line names, compiled, and a step of it measured: in this process, or over those of torchrun.

Takes   the arguments of `zbfx.compile`.
Gives   the pipeline, and the measured timeline of a step on the example microbatch, as often as there are microbatches.
Raises  `ZbfxError` as `compile` and `bind` do, and for an example without data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import zbfx
from zbfx.report import example_batch
from zbfx.runtime.step import Step
from zbfx.runtime.timeline import Profile

WARM_UPS = 2  # steps: the first loads code, the second may capture


def measured_step(arguments: Mapping[str, Any], tell: Callable[[str], None]) -> tuple[zbfx.Pipeline, Profile]:
    if not dist.is_torchelastic_launched():
        tell("compiling")
        pipe = zbfx.compile(**arguments)
        tell(f"running {WARM_UPS + 1} steps in this process")
        return pipe, measured(pipe, pipe.run_local())
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        tell(f"compiling for {dist.get_world_size()} processes")
        pipe = zbfx.compile(**{"device": device, **arguments, "stages": dist.get_world_size()})
        step = pipe.bind()
        tell(f"running {WARM_UPS + 1} steps over {dist.get_world_size()} processes")
        profile = measured(pipe, step)
        step.close()
        return pipe, profile
    finally:
        dist.destroy_process_group()


def measured(pipe: zbfx.Pipeline, step: Step) -> Profile:
    args, kwargs = example_batch(pipe.compiled)
    for _ in range(WARM_UPS):
        step(*args, **kwargs)
    return step.profile(*args, **kwargs)
