"""A pipeline for another graph of the same model: other shapes of the microbatch, or the forward alone for evaluation.

Parameters stay where they are: the new graph is cut by the stages that hold the parameters of the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zbfx import cost
from zbfx.codegen import generate
from zbfx.errors import ZbfxError
from zbfx.graphs import Joint, Role, Stage, copy_graph
from zbfx.loss import Reduction, separate_count
from zbfx.messages import parameter_holders
from zbfx.passes.canonicalize import canonicalize
from zbfx.passes.extract import extract
from zbfx.passes.partition import place_like
from zbfx.passes.split import split
from zbfx.plan import Action, CostTable, Kind, Schedule
from zbfx.schedule import plan, simulate
from zbfx.schedule.beside import run_beside
from zbfx.trace import trace

if TYPE_CHECKING:
    from zbfx.pipeline import Pipeline

FORWARD = "forward"  # the name of a schedule without backwards


def variant(
    pipe: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int, *, evaluation: bool
) -> Pipeline:
    """The pipeline for a microbatch like (args, kwargs): trained in the same order, or evaluated, in eval mode.

    Raises `ZbfxError` if the model reads other parameters for it than a stage's rank holds.
    """
    count, placement = pipe.signature.input_count, pipe.schedule.costs.placement
    inputs, targets = tuple(args[:count]), tuple(args[count:])
    raw, signature = trace(
        pipe.model, pipe.loss_fn, inputs, dict(kwargs), targets, device=pipe.device, evaluation=evaluation
    )
    raw = separate_count(raw)
    joint = canonicalize(forward_only(raw) if evaluation else raw)
    stages = extract(split(place_like(joint, owners(pipe.stages), len(placement))))
    table = cost.estimate(stages, placement, cost.hardware_of(pipe.device))
    if evaluation:
        schedule = forward_schedule(table, microbatches)
    else:
        schedule = plan(table, microbatches, schedule=pipe.schedule, mem_limit=pipe.mem_limit)
        if pipe.schedule.beside:
            schedule = run_beside(schedule, frozenset(stage.index for stage in stages if stage.runs_beside))
    refuse_moved_parameters(pipe.stages, stages, placement)
    reductions = () if evaluation else tuple(found.whole() for found in pipe.reductions)
    return replace(
        pipe,
        signature=signature,
        examples=tuple(signature.flatten(args, kwargs)),
        reduction=Reduction.of(raw, pipe.reduction.name, microbatches),
        joint=raw,
        stages=stages,
        schedule=schedule,
        programs=generate(stages, schedule, reductions),
        reductions=reductions,
    )


def owners(stages: Sequence[Stage]) -> dict[str, frozenset[int]]:
    """The stages whose forward reads each parameter and buffer."""
    found: dict[str, set[int]] = {}
    for stage in stages:
        for port in stage.phases[Kind.F].ports:
            if port.role in (Role.PARAMETER, Role.BUFFER):
                found.setdefault(port.name, set()).add(stage.index)
    return {name: frozenset(indices) for name, indices in found.items()}


def forward_only(joint: Joint) -> Joint:
    """The joint graph without its backward."""
    graph = copy_graph(joint.graph)
    kept = [k for k, port in enumerate(joint.outputs) if port.role is not Role.GRADIENT]
    output = graph.output_node()
    output.args = (tuple(output.args[0][k] for k in kept),)  # type: ignore[index]
    graph.eliminate_dead_code()
    return replace(joint, graph=graph, outputs=tuple(joint.outputs[k] for k in kept))


def forward_schedule(costs: CostTable, microbatches: int) -> Schedule:
    """The forwards alone, microbatch by microbatch."""
    ranks = tuple(
        tuple(Action(Kind.F, stage, k) for k in range(microbatches) for stage in costs.stages_of(rank))
        for rank in range(costs.rank_count)
    )
    timed = simulate(costs, microbatches, ranks)
    return Schedule(FORWARD, costs, microbatches, ranks, timed.spans, timed.peak_bytes)


def refuse_moved_parameters(before: Sequence[Stage], after: Sequence[Stage], placement: Sequence[int]) -> None:
    held = parameter_holders(before, placement)
    for name, ranks in parameter_holders(after, placement).items():
        if not set(ranks) <= set(held.get(name, ())):
            raise ZbfxError(
                f"for these shapes, or in eval mode, rank {ranks[0]} would need {name}, which ranks "
                f"{held.get(name, ())} hold: the model runs its parts in another order. Compile a pipeline of its own"
            )
