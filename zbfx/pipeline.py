"""`compile`: a model and its loss become a pipeline. Start reading here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from zbfx._torch.compiling import uncompiled
from zbfx.arguments import compared
from zbfx.between import canonical
from zbfx.comm.together import on_all_ranks, on_first_rank, telling
from zbfx.compiled import Traced
from zbfx.fit import fit
from zbfx.handle import Pipeline
from zbfx.memo import Memo
from zbfx.memory.predict import resolved
from zbfx.modes import Modes, uncollected
from zbfx.options import (
    Options,
    checked_cuts,
    checked_device,
    checked_examples,
    checked_model,
    checked_overlap,
    checked_progress,
)
from zbfx.plan import CostTable
from zbfx.plans.cache import checked_folder, plan_cache
from zbfx.program.boxed import Compiler
from zbfx.progress import announce, showing
from zbfx.selfcheck import self_checked
from zbfx.trace.guard import Guard, Source
from zbfx.trace.loss import Reduction, separate_count
from zbfx.trace.tensor_names import named_tensors
from zbfx.trace.tensor_parallel import local_parts, refuse_measuring
from zbfx.trace.tracer import trace
from zbfx.user_pass import Pass, checked_passes, checked_tracing


@uncompiled
@telling("compile")
def compile(
    model: nn.Module,
    *,
    stages: int,
    microbatches: int,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    example_targets: Any = (),
    batch_dims: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    loss_reduction: str = "mean",
    schedule: Any = "auto",
    mem_limit: Any = None,
    costs: CostTable | str = "estimate",
    cuts: Sequence[str] | None = None,
    stages_per_rank: int | None = None,
    device: torch.device | str | None = None,
    backend: str = "eager",
    overlap: bool | None = None,
    recompute: str = "auto",
    optimizer_slots: float | None = None,
    grad_dtype: torch.dtype | None = None,
    rebalance: bool = False,
    prologue: bool = True,
    check: bool | str = "auto",
    share_layers: bool = True,
    passes: Sequence[Pass] = (),
    trace_passes: bool | str | None = None,
    progress: bool | None = None,
    cache: str | PathLike[str] | None = None,
) -> Pipeline:
    """Compile `model` into a pipeline over `stages` ranks. Nothing of the model changes, and nothing runs on its data.

    Under an initialised torch.distributed every rank calls this, and all get the plan of rank 0.

    model            any nn.Module; parameters may be on the meta device
    stages           pipeline ranks, each with one piece of the model, or with `stages_per_rank` of them
    microbatches     how many a step runs and accumulates
    example_inputs   positional arguments of the model for one microbatch, nested as you like; `example_kwargs` too.
                     Structure, shapes and dtypes count, values do not: meta tensors will do. Without `batch_dims`,
                     tensors as long as the first one in dimension 0 are cut along it; others are given to every
                     microbatch whole
    example_targets  further arguments of `loss_fn`, one or a tuple
    batch_dims       the dimension at which a batch is cut, for each tensor of (inputs, kwargs, targets), nested like
                     them: ((0, 1), {"mask": None}, 0). None in it: every microbatch gets the whole tensor. A dimension
                     in the place of a tuple or dict is that of all tensors in it. None: as above
    loss_fn          `(outputs, *targets) -> scalar`, a function or a module; None: the model returns its loss (itself,
                     as `.loss`, or first in a tuple). Losses over tokens return (sum, count): the loss of the batch is
                     then the sum of all sums over the sum of all counts, however the tokens fall into microbatches
    loss_reduction   "mean" or "sum" of the microbatches' losses, where they come without a count
    schedule         a name of `zbfx.schedule.names()`, a Schedule, an order of actions per rank, a function
                     `(costs, microbatches) -> orders`, or `zbfx.schedule.improve` of one of these. Orders say where
                     their stages lie; else the name does, or a CostTable
    mem_limit        what a rank may hold in all: bytes, text like "24GiB", one of them per rank, or "auto", what is
                     free on its device. The plan keeps it by order, recomputation, or two stages a rank in a V. A
                     multiple like "2x" of the activations of 1F1B limits what is held between F, B and W alone. None:
                     no limit
    recompute        what B may compute again so that less is held: "none" (views), "cheap" (all but matrix products,
                     convolutions and attention), "full" (everything, in segments), "auto": stage by stage as far as
                     `mem_limit` asks for it
    costs            "estimate" (closed form), "measure" (times the phases on `device`, takes seconds), or a CostTable
    cuts             names of the submodules that begin the second stage, the third, ...; None: balanced cuts, found
    stages_per_rank  2 or more for interleaved stages; V schedules have 2
    device           what the pipeline runs on; None: where the model's tensors are, the CPU for a model on meta
    backend          "eager", "inductor" (phases compiled, those that draw seeded random numbers as they are),
                     "cudagraph" (a rank's whole step as one graph), "cudagraph+inductor"
    overlap          run Ws beside Bs of other microbatches, on a second stream, where that is quicker and the memory
                     limit allows it; Ws of searched schedules move for it. None: on CUDA devices
    optimizer_slots  tensors of a parameter's size that the optimizer keeps for each parameter, which count as held:
                     2 for Adam, 1 for momentum. None: 2 under mem_limit="auto", else 0
    grad_dtype       the dtype of `.grad`, and of the sums of gradients over microbatches, stages and replicas, for
                     parameters of narrower dtypes: torch.float32 for bfloat16 parameters. None: `grad_dtype` of each
                     parameter, which is its own dtype unless you set another
    rebalance        with costs="measure": cut the stages again by what they were measured to take, where devices differ
                     in speed or compiled phases from their nodes, and keep the better of both. Takes as long again
    prologue         compute once a step what no microbatch changes, such as casts of weights under autocast, and hold
                     it to the end of the step; a `mem_limit` that has no room for that goes without. False: never
    check            run `zbfx.check` on two random microbatches, and refuse a pipeline that fails, or computes other
                     results than the model, such as one whose graph holds a Python value that changes from call to
                     call: True, False, or "auto": where it takes about a second at most, and all tensors have data
    share_layers     trace layers that run the same operators once, and copy their graph for the others, which takes a
                     fraction of the time. The graph is that of tracing each of them; where that is not certain, as for
                     layers that change objects or share memory, each is traced, and the schedule's notes say why
    passes           `zbfx.Pass`es of yours, which run between the compiler's, in their order: graph to graph, on the
                     joint graph, the split one, or each stage (docs/passes.md). `check` compares with the model before
    trace_passes     print on stderr what passes did: of the compiler's the time and the nodes, of yours the changes of
                     the graph, line by line, too; "all": of the compiler's as well. None: as the variable
                     ZBFX_TRACE_PASSES says (1, all)
    progress         say on stderr, on rank 0, what goes on once this call takes over two seconds. None: if stderr is a
                     terminal. The logger "zbfx" gets the same at level DEBUG
    cache            a folder of plans of earlier calls. A call with the same model, example, options, versions and kind
                     of device takes its plan from there, and neither traces, plans, measures nor checks; others add
                     theirs. What it compares, and what it cannot see: docs/plans.md. None: nothing is kept

    Raises `TraceError` where the model cannot be traced, naming the user's line; `InvalidSchedule` for an order that
    breaks a rule; `NoFeasibleSchedule` under a `mem_limit` that is too small; `ZbfxError`, their base, for the rest."""
    model = checked_model(model)
    inputs, kwargs, targets = checked_examples(example_inputs, example_kwargs, example_targets, loss_fn)
    device = checked_device(device, model)
    options = Options(
        stages=stages,
        microbatches=microbatches,
        device=device,
        batch_dims=batch_dims,
        loss_reduction=loss_reduction,
        schedule=schedule,
        mem_limit=mem_limit,
        costs=costs,
        cuts=checked_cuts(cuts),
        stages_per_rank=stages_per_rank,
        backend=backend,
        overlap=checked_overlap(overlap, device),
        recompute=recompute,
        optimizer_slots=optimizer_slots,
        grad_dtype=grad_dtype,
        rebalance=rebalance,
        prologue=prologue,
        check=check,
        share_layers=share_layers,
        passes=checked_passes(passes),
        trace_passes=checked_tracing(trace_passes),
    )
    asked = compared(options) | {"passes": [given.told for given in options.passes]}
    modes, told, folder = Modes.now(), on_first_rank(checked_progress(progress)), checked_folder(cache)
    with modes.fixed(), showing("zbfx.compile", told):
        local = local_parts(named_tensors(model, loss_fn))
        refuse_measuring(local, options.measures)
        source = Source(model, loss_fn, Guard.of(model, loss_fn), modes, local)
        kept = folder and plan_cache(folder, source, (inputs, kwargs, targets), options)
        if kept and (found := kept.found(source, options)):
            return Pipeline(found, source, Compiler(options.runs.compiles))
        chosen = {"device": device, "batch_dims": batch_dims, "grad_dtype": options.grad_dtype}
        chosen["share_layers"] = options.share_layers
        tracing = modes.traced()(partial(trace, model, loss_fn, inputs, kwargs, targets, **chosen))
        with uncollected():
            announce("tracing the model")
            raw, signature = on_all_ranks("compile (the trace)", tracing, asked)
            raw = separate_count(raw)
            examples = tuple(signature.flatten((*inputs, *targets), kwargs))
            reduction = Reduction.of(raw, loss_reduction, microbatches)
            traced, memo = Traced(raw, canonical(raw, options), signature, examples, reduction), Memo()
        with nullcontext() if options.measures else uncollected():  # what was measured is let go at once
            fitted = fit(traced, resolved(options), memo)
        compiled = self_checked(fitted, source)
        source = replace(source, guard=source.guard.renewed(model, loss_fn))
        if kept:
            kept.keep(compiled, source)
        return Pipeline(compiled, source, memo(Compiler, options.runs.compiles))
