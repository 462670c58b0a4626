"""torch.distributed.pipelining, set up as well as its public interface allows.

Shapes are given in advance, outputs of the last stage are not kept, the loss carries the factor 1/m so that no pass
over the gradients is needed, and compiled stages come with a compiled loss. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from benchmarks.gpt import next_token_loss
from benchmarks.measure import Runnable, reset_peak
from benchmarks.place import Place, own_pieces
from benchmarks.stages import CONFIGS, Piece, batch, stage
from benchmarks.throughput.cases import TORCH_SCHEDULES, Case


def peer(case: Case, place: Place) -> Runnable:
    """One schedule of torch.distributed.pipelining over all ranks."""
    reset_peak(place.device)
    kind = TORCH_SCHEDULES[case.schedule]
    counts, own = own_pieces(case, place, stages_per_rank=kind.stages_per_rank, style=kind.placement)
    warm_communicator(place.device)
    if case.backend == "inductor":
        place.fresh_compiler(f"torch {case.config} {case.b} {list(own.values())}")
    stages = [pipeline_stage(index, piece, len(counts), case, place) for index, piece in own.items()]

    schedule_class = get_schedule_class(kind.name)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    loss_fn = mean_loss(case, place.device)
    schedule = schedule_class(stages[0] if single else stages, case.m, loss_fn=loss_fn, scale_grads=False)
    ids, targets = batch(CONFIGS[case.config], case.m * case.b, place.device)
    inputs = (ids,) if any(s.is_first for s in stages) else ()
    target = targets if any(s.is_last for s in stages) else None

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).sum() if losses else None

    return Runnable(step, [parameter for s in stages for parameter in s.submod.parameters()], counts)


def warm_communicator(device: torch.device) -> None:
    """Create the group's communicator before anything is in flight: created lazily by a batch it can deadlock."""
    dist.all_reduce(torch.zeros(1, device=device))


def mean_loss(case: Case, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of one microbatch over m: the microbatches' sum is the batch's mean."""
    share = torch.tensor(1 / case.m, device=device)  # a tensor: the same compiled code for every m

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(logits, targets) * share

    return loss_fn if case.backend == "eager" else torch.compile(loss_fn, dynamic=False)


def pipeline_stage(index: int, piece: Piece, stage_count: int, case: Case, place: Place) -> PipelineStage:
    """A stage whose inputs' and outputs' shapes are given, so that no step is spent on finding them."""
    config = CONFIGS[case.config]
    own = stage(config, piece, place.device, place.dtype)
    own.checkpoint = TORCH_SCHEDULES[case.schedule].checkpoint
    module: nn.Module = own
    if case.backend == "inductor":
        module = torch.compile(module, dynamic=False)  # type: ignore[assignment]

    def hidden(width: int) -> Tensor:
        shape = (case.b, config.sequence, width)
        return torch.empty(shape, dtype=place.dtype, device="meta", requires_grad=True)

    ids = torch.empty((case.b, config.sequence), dtype=torch.long, device="meta")
    return PipelineStage(
        module,
        index,
        stage_count,
        place.device,
        input_args=(ids if piece.first else hidden(config.hidden),),
        output_args=(hidden(config.vocabulary if piece.last else config.hidden),),
    )
