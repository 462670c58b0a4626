"""torch.distributed: collectives of parts, process groups, and the records of its checkpoints.

reduce_scatter_single, ...          2.13.0           public, and called reduce_scatter_tensor in 2.11.0
_set_pg_timeout                     2.11.0, 2.13.0   a group's timeout after its creation, but for messages of gloo
checkpoint.metadata, _StorageInfo   2.13.0           records in the table of contents of a DCP checkpoint
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem as checkpoint_files
from torch.distributed.checkpoint import metadata as checkpoint_records

# What the pickled table of contents of a torch.distributed.checkpoint consists of, beside plain values, by module and
# name.
CHECKPOINT_RECORDS: dict[tuple[str, str], Any] = {
    **{
        (record.__module__, record.__name__): record
        for record in (
            checkpoint_records.Metadata,
            checkpoint_records.TensorStorageMetadata,
            checkpoint_records.BytesStorageMetadata,
            checkpoint_records.TensorProperties,
            checkpoint_records.ChunkStorageMetadata,
            checkpoint_records.MetadataIndex,
            checkpoint_records.StorageMeta,
            checkpoint_records._MEM_FORMAT_ENCODING,
            checkpoint_files._StorageInfo,
            torch.Size,
        )
    },
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


def sum_shards(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum `whole` over a group, and to write this process's part of the sum into `shard`."""
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = start(shard, whole, group=group, async_op=True)
    return work


def join_shards(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to write each process's shard into `whole`, on all of a group."""
    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = start(whole, shard, group=group, async_op=True)
    return work


def group_store(group: dist.ProcessGroup) -> dist.Store:
    return group.get_group_store()


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long collectives of a group wait from now on; messages of gloo keep the timeout of its creation."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)
