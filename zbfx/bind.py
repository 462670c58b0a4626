"""Checks and preparations before a pipeline runs: who takes part, that all hold one plan, where the tensors are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbfx._torch import has_gradient_hooks
from zbfx.comm import Channels
from zbfx.errors import ZbfxError
from zbfx.run import RankRunner


def checked_rank(count: int, rank: int | None) -> int:
    """This process's rank in a pipeline of `count` ranks."""
    if not dist.is_initialized():
        raise ZbfxError(
            "bind runs under torch.distributed: start with `torchrun --nproc-per-node=...` and call "
            "torch.distributed.init_process_group first, or use run_local() in one process"
        )
    world, own = dist.get_world_size(), dist.get_rank()
    if world != count:
        raise ZbfxError(f"the pipeline has {count} ranks, torch.distributed has {world}: start {count} processes")
    if rank not in (None, own):
        raise ZbfxError(f"rank is this process's rank in torch.distributed, {own}; found {rank}")
    return own


def agree(channels: Channels, digest: str, prepare: Callable[[], None]) -> None:
    """Prepare this rank, and check that all hold one plan. What one rank refuses, every rank refuses."""
    refusal = None
    try:
        prepare()
    except ZbfxError as error:
        refusal = str(error)
    answers: list[Any] = channels.gather((digest, refusal))
    for rank, (_, text) in enumerate(answers):
        if text is not None:
            raise ZbfxError(f"rank {rank}: {text}")
    different = [rank for rank, (other, _) in enumerate(answers) if other != answers[0][0]]
    if different:
        raise ZbfxError(
            f"ranks {different} hold another plan than rank 0. "
            f"Compile with the same model, arguments and costs on every rank, and call init_process_group before "
            f"compile: only then do ranks share measured costs and searched plans"
        )


def refuse_gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Gradients are accumulated by the stages' graphs, not by autograd: hooks on them would never run."""
    hooked = [name for name, parameter in parameters.items() if has_gradient_hooks(parameter)]
    if hooked:
        raise ZbfxError(
            f"gradients accumulate into .grad inside the pipeline, where no hook runs; found hooks on the gradients of "
            f"{', '.join(hooked)}. Remove them, and do their work after the step, on .grad"
        )


def move_to(runners: Sequence[RankRunner], device: torch.device) -> None:
    """Move the parameters, buffers and constants that these ranks use. Raises `ZbfxError` if one has no data."""
    for runner in runners:
        refuse_gradient_hooks(runner.parameters)
        for name in sorted(runner.tensor_names):
            tensor = runner.tensors.named[name]
            if tensor.is_meta:
                raise ZbfxError(
                    f"{name} is on the meta device and has no data: fill the model first, for example "
                    f"model.to_empty(device={str(device)!r}) followed by its initialisation or load_state_dict"
                )
            tensor.data = tensor.data.to(device)
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = tensor.grad.to(device)
