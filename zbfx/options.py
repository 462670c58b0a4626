"""What `compile` was called with, checked before anything is traced: each mistake names its argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from zbfx._torch.modules import is_optimized
from zbfx.arguments import finite_number, kind_of, true_or_false, whole_number
from zbfx.errors import ZbfxError, listed
from zbfx.passes.recompute import LEVELS, Level
from zbfx.plan import CostTable, require_size
from zbfx.schedule.orders.registry import ANY, SHAPES, Improve, V, is_searched
from zbfx.schedule.orders.written import placement_of_orders, read_orders
from zbfx.schedule.schedule import Schedule
from zbfx.user_pass import Pass, Tracing

DEVICES = ("cpu", "cuda")
FEW_BYTES = 1000.0  # less than any limit
CHECKS = (True, False, "auto")


@dataclass(frozen=True, slots=True)
class Backend:
    """How a rank's program runs: with phases compiled by inductor, or as they are; launched, or captured as a graph."""

    compiles: bool = False
    captures: bool = False


BACKENDS = {
    "eager": Backend(),
    "inductor": Backend(compiles=True),
    "cudagraph": Backend(captures=True),
    "cudagraph+inductor": Backend(compiles=True, captures=True),
}


@dataclass(frozen=True, eq=False)
class Options:
    """What `compile` was asked for, under the names of its arguments, and what follows from it alone. Ranks compare all
    fields but `device`, of which each has its own. Raises `ZbfxError` for what no pipeline has."""

    stages: int
    microbatches: int
    device: torch.device = field(compare=False)
    batch_dims: Any = None
    loss_reduction: str = "mean"
    schedule: Any = "auto"
    mem_limit: Any = None
    costs: CostTable | str = "estimate"
    cuts: tuple[str, ...] | None = None
    stages_per_rank: int | None = None
    backend: str = "eager"
    overlap: bool = False
    recompute: str = "auto"
    optimizer_slots: float | None = None
    grad_dtype: torch.dtype | None = None
    rebalance: bool = False
    prologue: bool = True
    check: bool | str = "auto"
    least: Level = Level.NONE  # of recomputation, where `recompute` leaves the level open
    share_layers: bool = True
    passes: tuple[Pass, ...] = field(default=(), compare=False)  # ranks compare what they are told as
    trace_passes: Tracing = field(default=Tracing.NOTHING, compare=False)

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        placement = placement_of(self.schedule, self.stages, self.stages_per_rank, self.costs)
        if isinstance(self.mem_limit, float) and 0 < self.mem_limit < FEW_BYTES:  # a multiple, taken for bytes
            raise ZbfxError(
                f"mem_limit is a number of bytes; found {self.mem_limit!r}. Say '{self.mem_limit:g}x' for so many "
                f"times what the activations of 1F1B need"
            )
        if not isinstance(self.costs, CostTable) and self.costs not in ("estimate", "measure"):
            raise ZbfxError(f"costs is 'estimate', 'measure' or a CostTable; found {self.costs!r}")
        if self.recompute != "auto" and self.recompute not in LEVELS:
            raise ZbfxError(f"recompute is one of {', '.join(Level)}, auto; found {self.recompute!r}")
        microbatches = whole_number("microbatches", self.microbatches, "how many microbatches a step runs")
        require_size(len(placement), microbatches)
        check_backend(self.backend, self.device)
        if self.check not in CHECKS:
            raise ZbfxError(f"check is one of {CHECKS}; found {self.check!r}")
        if self.optimizer_slots is not None:
            slots = "how many tensors the optimizer keeps for each parameter"
            finite_number("optimizer_slots", self.optimizer_slots, slots)
        is_dtype = isinstance(self.grad_dtype, torch.dtype)
        if self.grad_dtype is not None and not (is_dtype and self.grad_dtype.is_floating_point):
            raise ZbfxError(f"grad_dtype is a floating-point torch.dtype, or None; found {self.grad_dtype!r}")
        true_or_false("prologue", self.prologue)
        check_rebalance(self.rebalance, self.costs, self.cuts)
        true_or_false("share_layers", self.share_layers)

    @property
    def runs(self) -> Backend:
        return BACKENDS[self.backend]

    @property
    def is_searched(self) -> bool:
        """Whether the order is left to the search."""
        return is_searched(self.schedule)

    @property
    def measures(self) -> bool:
        """Whether costs are taken on the device."""
        return self.costs == "measure"

    @property
    def limits_bytes(self) -> bool:
        """Whether `mem_limit` is on all that a rank holds; else it is on activations, if there is one."""
        return self.mem_limit is not None and self.multiple is None

    @property
    def limits_to_free(self) -> bool:
        """Whether `mem_limit` is what is free on the device."""
        return isinstance(self.mem_limit, str) and self.mem_limit == "auto"

    @property
    def multiple(self) -> float | None:
        """What `mem_limit` allows, in the activations of 1F1B, where it is such a multiple."""
        text = self.mem_limit.strip().lower() if isinstance(self.mem_limit, str) else ""
        with suppress(ValueError):
            return float(text[:-1]) if text.endswith("x") else None
        return None

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of recomputation that a plan may use, least first."""
        if self.recompute != "auto":
            return (Level(self.recompute),)
        allowed = LEVELS[LEVELS.index(self.least) :]
        return allowed if self.mem_limit is not None and not isinstance(self.costs, CostTable) else allowed[:1]

    @property
    def placements(self) -> tuple[tuple[int, ...], ...]:
        """Those to compare, stage -> rank; all but the first for limits in bytes alone."""
        first = placement_of(self.schedule, self.stages, self.stages_per_rank, self.costs)
        is_fixed = isinstance(self.costs, CostTable) or self.cuts is not None or self.stages_per_rank is not None
        if self.schedule != "auto" or is_fixed or self.stages == 1:
            return (first,)
        return (first, V.placement(self.stages, V.default))


def checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ZbfxError(f"model is an instance of torch.nn.Module; found {kind_of(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ZbfxError("model is a scripted module, which cannot be traced. Pass the module it was scripted from")
    if is_optimized(model):
        raise ZbfxError("model is compiled by torch.compile. Pass the module itself, and backend='inductor' to zbfx")
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ZbfxError(
                f"{name or 'model'} is wrapped in {type(module).__name__}, which would add up gradients by itself. "
                f"Pass what it wraps (.module): for replicas, bind a DeviceMesh with the dimensions ('dp', 'pp')"
            )
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


def check_schedule(schedule: Any) -> None:
    if isinstance(schedule, Improve):
        return check_schedule(schedule.start)
    if isinstance(schedule, str | Schedule) or callable(schedule):
        return None
    if isinstance(schedule, Sequence) and all(isinstance(order, Sequence) for order in schedule):
        return None
    raise ZbfxError(
        f"schedule is a name, a Schedule, one order of actions per rank, a function (costs, microbatches) -> orders, "
        f"or zbfx.schedule.improve of one of these; found {kind_of(schedule)}"
    )


def checked_cuts(cuts: Any) -> tuple[str, ...] | None:
    if cuts is None:
        return None
    if isinstance(cuts, str) or not isinstance(cuts, Sequence) or not all(isinstance(c, str) and c for c in cuts):
        raise ZbfxError(f"cuts is a list of names of submodules, like ['layers.4', 'layers.8']; found {cuts!r}")
    return tuple(cuts)


def placement_of(schedule: Any, ranks: Any, stages_per_rank: Any, costs: Any = None) -> tuple[int, ...]:
    """Stage -> rank: that of the schedule, or what its name stands for; where it stands for any, that of `costs`, if
    they are a table. Raises `ZbfxError` where they do not fit."""
    ranks = whole_number("stages", ranks, "the number of pipeline ranks")
    if isinstance(schedule, Improve):
        return placement_of(schedule.start, ranks, stages_per_rank, costs)
    if not isinstance(schedule, str) and not callable(schedule):
        placement = placement_of_given(schedule, ranks)
        if stages_per_rank is not None and len(placement) != stages_per_rank * ranks:
            raise ZbfxError(
                f"the schedule has {len(placement)} stages on {ranks} ranks; found stages_per_rank={stages_per_rank}. "
                f"Leave it out: it follows from the schedule"
            )
        return placement
    shape = SHAPES.get(schedule, ANY) if isinstance(schedule, str) else ANY
    if shape is ANY and stages_per_rank is None and isinstance(costs, CostTable) and costs.rank_count == ranks:
        return costs.placement
    count = shape.default
    if stages_per_rank is not None:
        count = whole_number("stages_per_rank", stages_per_rank, "how many stages a rank holds")
    if not shape.least <= count <= shape.most:
        raise ZbfxError(
            f"schedule={schedule!r} has {shape.holds}; found stages_per_rank={count}. Leave stages_per_rank out, or "
            f"choose another schedule ('auto', 'ilp' and 'gpipe' take any)"
        )
    require_size(ranks * count, 1)
    return shape.placement(ranks, count)


def placement_of_given(schedule: Any, ranks: int) -> tuple[int, ...]:
    """Stage -> rank of a `Schedule`, or of an order per rank."""
    if isinstance(schedule, Schedule):
        found, placement = schedule.costs.rank_count, schedule.costs.placement
    else:
        orders = read_orders(schedule)
        found, placement = len(orders), placement_of_orders(orders)
    if found != ranks:
        raise ZbfxError(f"the schedule is for {found} ranks; found stages={ranks}")
    return placement


def check_backend(backend: Any, device: torch.device) -> None:
    if backend not in BACKENDS:
        raise ZbfxError(f"backend is one of {', '.join(BACKENDS)}; found {backend!r}")
    if BACKENDS[backend].captures and device.type != "cuda":
        raise ZbfxError(
            f"backend={backend!r} captures CUDA graphs and needs a CUDA device; found {device}. Use 'eager'"
        )


def check_rebalance(rebalance: Any, costs: Any, cuts: Any) -> None:
    """Stages are cut again only where they are measured, and no cuts are the user's."""
    if true_or_false("rebalance", rebalance) and (costs != "measure" or cuts is not None):
        raise ZbfxError(
            f"rebalance=True cuts stages again by their measured seconds, so it needs costs='measure' and no cuts; "
            f"found costs={costs if isinstance(costs, str) else 'a table'!r}, cuts={cuts and list(cuts)!r}"
        )


def checked_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """The device, by default where the model's tensors live; the CPU for a model on the meta device."""
    if device is None:
        found = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        device = torch.device("cpu") if found.type == "meta" else found
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


def checked_progress(progress: bool | None) -> bool | None:
    if progress not in (True, False, None):
        raise ZbfxError(f"progress is True, False or None; found {progress!r}")
    return progress
