"""Process groups of torch.distributed as pipelines use them: which library carries them, and how one is created.
In: processes, a timeout. Out: a group, and transfers in it that end within the timeout."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from zbfx._torch.distributed import set_group_timeout
from zbfx.comm.together import exchange

NCCL_BLOCKS = 2  # thread blocks per communicator: enough to hide a message behind an action
NCCL_REDUCTION_BLOCKS = 8  # of a communicator that reduces gradients beside the last Ws
MEETING = timedelta(seconds=10)  # how long processes that are all about to create a group wait for each other


class Library(Enum):
    """What carries a process group. The value is its name in torch.distributed."""

    GLOO = "gloo"
    NCCL = "nccl"


class Transfer(Protocol):
    """A tensor on its way."""

    def wait(self) -> Any: ...


class Bounded(NamedTuple):
    """A transfer in a gloo group. Without a timeout of its own it would end with the timeout for creating the group."""

    work: dist.Work
    timeout: timedelta

    def wait(self) -> Any:
        return self.work.wait(self.timeout)


def library_for(device: torch.device) -> Library:
    """NCCL between GPUs, unless processes share one, which NCCL refuses. Collective over all processes."""
    if device.type != "cuda":
        return Library.GLOO
    everywhere = exchange("bind (devices)", str(torch.cuda.get_device_properties(device).uuid))
    return Library.NCCL if len(set(everywhere)) == len(everywhere) else Library.GLOO


def new_group(processes: Collection[int], timeout: timedelta, library: Library, blocks: int) -> dist.ProcessGroup:
    """A process group. Every process of the world calls this, member or not, and at about the same time: none waits for
    as long as `timeout` for a process that has ended meanwhile. A receive that waits keeps its thread blocks spinning
    on the device. NCCL therefore gets few of them, and a stream whose kernels start ahead of queued compute."""
    if library is Library.GLOO:
        group = dist.new_group(sorted(processes), timeout=min(timeout, MEETING), backend=library.value)
        if dist.get_rank() in processes:
            set_group_timeout(group, timeout)
        return group
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = blocks
    return dist.new_group(sorted(processes), timeout=timeout, backend=library.value, pg_options=options)
