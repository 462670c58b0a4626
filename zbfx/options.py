"""What `compile` was called with, checked before anything is traced: each mistake names its argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from zbfx.arguments import kind_of, true_or_false, whole_number
from zbfx.errors import ZbfxError, listed
from zbfx.passes.recompute import LEVELS, Level
from zbfx.plan import CostTable
from zbfx.schedule.schedule import Schedule

V_SCHEDULES = ("zb-v", "zb-v-order", "v-half", "v-min")
LINEAR_SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")

DEVICES = ("cpu", "cuda")
FEW_BYTES = 1000.0  # less than any limit


def checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ZbfxError(f"model is an instance of torch.nn.Module; found {kind_of(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ZbfxError("model is a scripted module, which cannot be traced. Pass the module it was scripted from")
    if hasattr(model, "_orig_mod"):
        raise ZbfxError("model is compiled by torch.compile. Pass the module itself, and backend='inductor' to zbfx")
    tensors = chain(model.named_parameters(), model.named_buffers())
    if unshaped := [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]:
        raise ZbfxError(
            f"{listed(unshaped, 3)} get their shapes in the first forward (a lazy module of torch.nn). Run the model "
            f"once before compile: model(*example_inputs) under torch.no_grad()"
        )
    return model


def checked_examples(
    example_inputs: Any, example_kwargs: Any, example_targets: Any, loss_fn: Any
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """The positional, keyword and target arguments of the example microbatch."""
    if not isinstance(example_inputs, tuple | list):
        found = kind_of(example_inputs)
        raise ZbfxError(f"example_inputs is a tuple of the model's arguments, (x,) for one; found {found}")
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise ZbfxError(f"example_kwargs is a dict of the model's keyword arguments; found {kind_of(example_kwargs)}")
    if loss_fn is not None and not callable(loss_fn):
        raise ZbfxError(f"loss_fn is a function or module (outputs, *targets) -> scalar; found {kind_of(loss_fn)}")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise ZbfxError(f"loss_fn is an instance of a module, or a function; found {kind_of(loss_fn)}")
    targets = example_targets if isinstance(example_targets, tuple) else (example_targets,)
    return tuple(example_inputs), dict(example_kwargs or {}), targets


def checked_schedule(schedule: Any) -> Any:
    if isinstance(schedule, str | Schedule) or callable(schedule):
        return schedule
    if isinstance(schedule, Sequence) and all(isinstance(order, Sequence) for order in schedule):
        return schedule
    raise ZbfxError(
        f"schedule is a name, a Schedule, one order of actions per rank, or a function (costs, microbatches) -> "
        f"orders; found {kind_of(schedule)}"
    )


def checked_cuts(cuts: Any) -> Sequence[str] | None:
    if cuts is None:
        return None
    if isinstance(cuts, str) or not isinstance(cuts, Sequence) or not all(isinstance(c, str) and c for c in cuts):
        raise ZbfxError(f"cuts is a list of names of submodules, like ['layers.4', 'layers.8']; found {cuts!r}")
    return cuts


def placement_of(schedule: Any, ranks: Any, stages_per_rank: Any) -> tuple[int, ...]:
    """Stage -> rank: down and up again for the V schedules, looped for interleaved ones, one stage a rank otherwise."""
    ranks = whole_number("stages", ranks, "the number of pipeline ranks")
    if isinstance(schedule, Schedule):
        if schedule.costs.rank_count != ranks:
            raise ZbfxError(f"the schedule is for {schedule.costs.rank_count} ranks; found stages={ranks}")
        return schedule.costs.placement
    if stages_per_rank is not None:
        whole_number("stages_per_rank", stages_per_rank, "how many stages a rank holds")
    if isinstance(schedule, str):
        refuse_stages_per_rank(schedule, stages_per_rank)
    if isinstance(schedule, str) and schedule in V_SCHEDULES:
        return (*range(ranks), *reversed(range(ranks)))
    if schedule == "interleaved-1f1b":
        return tuple(range(ranks)) * (stages_per_rank or 2)
    return tuple(range(ranks)) * (stages_per_rank or 1)


def refuse_stages_per_rank(schedule: str, found: int | None) -> None:
    """Schedules that have a placement of their own take no other number of stages a rank."""
    if found is None:
        return
    wrong, holds = False, ""
    if schedule in V_SCHEDULES:
        wrong, holds = found != 2, "2 stages a rank, down the ranks and back up"
    elif schedule in LINEAR_SCHEDULES:
        wrong, holds = found != 1, "1 stage a rank"
    elif schedule == "interleaved-1f1b":
        wrong, holds = found < 2, "2 or more stages a rank"
    if wrong:
        raise ZbfxError(
            f"schedule={schedule!r} has {holds}; found stages_per_rank={found}. Leave stages_per_rank out, or choose "
            f"another schedule ('auto', 'ilp' and 'gpipe' take any)"
        )


def checked_limit(mem_limit: Any) -> Any:
    """A multiple that is no text would be taken for bytes."""
    if isinstance(mem_limit, float) and 0 < mem_limit < FEW_BYTES:
        raise ZbfxError(
            f"mem_limit is a number of bytes; found {mem_limit!r}. Say '{mem_limit:g}x' for so many times what the "
            f"activations of 1F1B need"
        )
    return mem_limit


def checked_rebalance(rebalance: Any, costs: Any, cuts: Any) -> bool:
    """Whether to cut stages again; only where they are measured, and no cuts are the user's."""
    if true_or_false("rebalance", rebalance) and (costs != "measure" or cuts is not None):
        raise ZbfxError(
            f"rebalance=True cuts stages again by their measured seconds, so it needs costs='measure' and no cuts; "
            f"found costs={costs if isinstance(costs, str) else 'a table'!r}, cuts={cuts!r}"
        )
    return bool(rebalance)


def levels_of(recompute: Any, mem_limit: Any, costs: Any) -> tuple[Level, ...]:
    """The levels of recomputation that a plan may use, least first."""
    if recompute != "auto":
        if recompute not in tuple(Level):
            raise ZbfxError(f"recompute is one of {', '.join(Level)}, auto; found {recompute!r}")
        return (Level(recompute),)
    return LEVELS if mem_limit is not None and not isinstance(costs, CostTable) else LEVELS[:1]


def placements_of(schedule: Any, ranks: Any, stages_per_rank: Any, *, fixed: bool) -> tuple[tuple[int, ...], ...]:
    """The placements to compare under a limit in bytes; `fixed`: the stages are the user's."""
    first = placement_of(schedule, ranks, stages_per_rank)
    if fixed or schedule != "auto" or stages_per_rank is not None or ranks == 1:
        return (first,)
    return (first, placement_of("zb-v", ranks, None))


def device_of(model: nn.Module) -> torch.device:
    """Where the model's tensors live; the CPU for a model on the meta device."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def checked_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ZbfxError(f"device is 'cpu' or 'cuda', or one of several like 'cuda:1'; found {device!r}") from error
    if found.type == "meta":
        raise ZbfxError(
            "device='meta' has no memory to run on. Name the device that the pipeline will run on, like 'cpu' or "
            "'cuda'; the model's tensors may be on meta"
        )
    if found.type not in DEVICES:
        raise ZbfxError(
            f"a pipeline runs on a CPU or on CUDA GPUs; found device={str(device)!r}. Use device='cpu' or 'cuda', with "
            f"the model's tensors there or on meta"
        )
    if found.type == "cuda" and not torch.backends.cuda.is_built():
        raise ZbfxError(
            f"device={str(device)!r}: this torch is built without CUDA. Use device='cpu', or install another"
        )
    return found


def checked_overlap(overlap: bool | None, device: torch.device) -> bool:
    """Whether Ws run beside Bs; by default where the device has streams."""
    if overlap not in (True, False, None):
        raise ZbfxError(f"overlap is True, False or None; found {overlap!r}")
    return device.type == "cuda" if overlap is None else bool(overlap)
