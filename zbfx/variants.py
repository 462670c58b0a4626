"""A pipeline for another graph of the same model: other shapes of the microbatch, or the forward alone, to evaluate or
for outputs that a user asks for.
Parameters stay where they are. A graph of the same operations is cut where the first one was; one with others (random
ops are missing in evaluation, shapes may choose a branch) by the stages that hold the first one's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
from torch import Tensor

from zbfx.between import canonical, divided, extracted
from zbfx.candidate import with_pairs
from zbfx.compiled import Compiled, Form, refuse_other_ways
from zbfx.costs.estimate import Formulas, estimate, formulas, hardware_of
from zbfx.errors import ZbfxError
from zbfx.graphs import Joint, Phase, Role, Stage, copy_graph
from zbfx.modes import uncollected
from zbfx.passes.partition import place_like, place_same
from zbfx.passes.sizes import joint_with_numbers, stage_with_numbers
from zbfx.plan import CostTable, Kind
from zbfx.program.chain import loss_phase
from zbfx.program.messages import parameter_holders
from zbfx.runtime.pace import ActionKind
from zbfx.runtime.ranks import Ranks
from zbfx.schedule import plan
from zbfx.schedule.forward import forward_schedule
from zbfx.schedule.planner import build
from zbfx.schedule.schedule import Schedule
from zbfx.trace.guard import Source
from zbfx.trace.loss import Reduction, separate_count
from zbfx.trace.refusals import OF_BATCH
from zbfx.trace.signature import Signature
from zbfx.trace.symbols import Dimension, GuardBroken, Numbers, Shapes, Sizes, changed_dimensions
from zbfx.trace.tracer import trace
from zbfx.trace.wanted import Request, Wanted

REPLAN_S = 1.0  # seconds to search for the schedule of a further shape


class Variants:
    """The pipelines of one model for further shapes and requests. `symbolic`: trace once with a symbol
    for each size that changes, and put in the numbers of every further shape. Where that does not hold (the model's
    code fixes a size, or chooses by it), a shape is traced like any other, and the schedule's notes say why."""

    def __init__(self, pipe: Compiled, source: Source, ranks: Ranks, *, symbolic: bool) -> None:
        self.pipe, self.source, self.ranks, self.symbolic = pipe, source, ranks, symbolic
        self.templates: dict[Request, list[Template]] = defaultdict(list)
        self.fixed: dict[Request, set[Dimension]] = defaultdict(set)

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int, request: Request) -> Compiled:
        """The pipeline for a microbatch like (args, kwargs), planned anew for its costs, that does what is requested.
        Raises `ZbfxError` if the model reads other parameters for it than a stage's rank holds."""
        with uncollected():
            form, notes = self.made(args, kwargs, request)
            schedule = self.plan(form.costs, microbatches, request.wanted, notes)
            return assembled(self.pipe, form, form.signature.flatten(args, kwargs), schedule)

    def form(self, args: Sequence[Any], kwargs: Mapping[str, Any], request: Request) -> Form:
        """The stages of a microbatch like (args, kwargs), for steps whose microbatches are unlike. Costs are in
        the unit of the pipeline's. Raises `ZbfxError` where such a microbatch takes another way through the model."""
        pipe = self.pipe
        if request.wanted.trains and shapes_of(request.signature.flatten(args, kwargs)) == shapes_of(pipe.examples):
            return Form(pipe.signature, pipe.joint, pipe.stages, pipe.schedule.costs)
        with uncollected():
            form, _ = self.made(args, kwargs, request)
            refuse_other_ways(pipe, form.stages, request.wanted.trains)
            stages = tuple(map(with_prologue_of, form.stages, pipe.stages))
            return replace(form, stages=stages, costs=self.in_its_unit(form.costs))

    def in_its_unit(self, costs: CostTable) -> CostTable:
        """Estimated costs times what the pipeline's own, measured or given, are of its estimated ones."""
        own = self.pipe.schedule.costs
        stages = []
        for stage, here, said in zip(costs.stages, own.stages, self.estimated.stages, strict=True):
            names = "forward_s", "backward_input_s", "backward_weight_s"
            factors = {name: (getattr(here, name), getattr(said, name)) for name in names}
            seconds = {name: getattr(stage, name) * (a / b if b else 1) for name, (a, b) in factors.items()}
            stages.append(replace(stage, **seconds, static_bytes=here.static_bytes, prologue_s=here.prologue_s))
        return replace(costs, stages=tuple(stages))

    @cached_property
    def estimated(self) -> CostTable:
        return estimate(self.pipe.stages, self.pipe.placement, hardware_of(self.pipe.device))

    def made(self, args: Sequence[Any], kwargs: Mapping[str, Any], request: Request) -> tuple[Form, tuple[str, ...]]:
        """The stages of a microbatch like (args, kwargs), and notes on how they were made."""
        notes: tuple[str, ...] = ()
        if self.symbolic:
            try:
                return self.substituted(args, kwargs, request), notes
            except GuardBroken as reason:
                notes = (f"traced for these shapes: {reason}",)
        raw, signature = self.traced(args, kwargs, request)
        stages = restaged(self.pipe, raw, request.wanted)
        table = estimate(stages, self.pipe.placement, hardware_of(self.pipe.device))
        return Form(signature, raw, stages, table), notes

    def traced(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], request: Request, sizes: Sizes | None = None
    ) -> tuple[Joint, Signature]:
        source, count = self.source, request.signature.input_count
        with source.modes.traced():
            raw, signature = trace(
                source.model,
                source.loss_fn,
                tuple(args[:count]),
                dict(kwargs),
                tuple(args[count:]),
                device=self.pipe.device,
                batch_dims=request.signature.batch_dims,
                grad_dtype=self.pipe.options.grad_dtype,
                wanted=request.wanted,
                sizes=sizes,
                undo=source.guard.undo,
                share_layers=self.pipe.options.share_layers,
                given=OF_BATCH,
            )
        return separate_count(raw), signature

    def plan(self, costs: CostTable, microbatches: int, wanted: Wanted, notes: tuple[str, ...] = ()) -> Schedule:
        """An order for these costs, the same on every rank. Replicas, whose batches differ, keep the first shape's."""
        options, replicated = self.pipe.options, self.ranks.replicas > 1
        if not wanted.trains:
            found = forward_schedule(costs, microbatches)
        else:
            request = self.pipe.schedule if replicated else options.schedule
            found = plan(costs, microbatches, schedule=request, mem_limit=options.mem_limit, budget_s=REPLAN_S)
            found = found if replicated else self.ranks.along(found)[0]
        return replace(found, notes=(*found.notes, *notes))

    def reordered(self, pipe: Compiled, seconds: Mapping[ActionKind, float]) -> Compiled:
        """A training pipeline of the same stages in the order that is fastest for measured `seconds` of its actions;
        itself where its own is as fast, or the limit on bytes would be broken. The same on every rank."""
        costs = costs_of_seconds(pipe.schedule.costs, seconds)
        now = build(pipe.schedule.name, costs, pipe.schedule.microbatches, pipe.schedule.ranks)
        options = pipe.options
        found = plan(costs, now.microbatches, schedule=options.schedule, mem_limit=options.mem_limit, budget_s=REPLAN_S)
        found = self.ranks.everywhere(found)[0]
        if found.makespan_s >= now.makespan_s:
            return pipe
        note = (
            f"planned again for measured seconds: {found.makespan_s:.6g} s, {now.makespan_s:.6g} s in the order before"
        )
        found = replace(found, notes=(*found.notes, note))
        made = assembled(pipe, Form(pipe.signature, pipe.joint, pipe.stages, costs), pipe.examples, found)
        limits = found.mem_limit if options.limits_bytes else None
        fits = limits is None or all(m.peak_bytes <= limit for m, limit in zip(made.memory, limits, strict=True))
        return made if fits else pipe

    def substituted(self, args: Sequence[Any], kwargs: Mapping[str, Any], request: Request) -> Form:
        """Stages from a template, without a trace of their own. Raises `GuardBroken` where there can be none."""
        shapes = shapes_of(request.signature.flatten(args, kwargs))
        for template in self.templates[request]:
            if template.covers(shapes):
                return from_template(template, args, kwargs, request)
        groups = changed_dimensions(request.signature, shapes)
        fixed = [dim for group in groups for dim in group if dim in self.fixed[request]]
        if not groups:
            raise GuardBroken("no size has changed")
        if fixed:
            names = ", ".join(f"{request.signature.tensors[index].name}.shape[{dim}]" for index, dim in fixed)
            raise GuardBroken(f"the model's code takes {names} for a constant")
        if any(shapes[index][dim] < 2 for group in groups for index, dim in group):
            raise GuardBroken("a size of 0 or 1 is a constant to the tracer")
        sizes = Sizes(signature_of(request, args, kwargs), groups)
        try:
            raw, _ = self.traced(args, kwargs, request, sizes)
            stages = restaged(self.pipe, raw, request.wanted)
            costs = formulas(stages, self.pipe.placement, hardware_of(self.pipe.device))
        except Exception as error:
            known = {dim for template in self.templates[request] for dim in template.sizes.ints}
            self.fixed[request] |= set(sizes.ints) - known
            raise GuardBroken(f"the model cannot be traced with symbols: {type(error).__name__}: {error}") from error
        self.fixed[request] |= sizes.fixed()
        template = Template(sizes, raw, stages, costs)
        self.templates[request].append(template)
        return from_template(template, args, kwargs, request)


@dataclass(frozen=True)
class Template:
    """A model's stages with symbols for sizes of the microbatch, and the formulas of their costs."""

    sizes: Sizes
    joint: Joint
    stages: tuple[Stage, ...]
    formulas: Formulas

    def covers(self, shapes: Shapes) -> bool:
        """Whether these shapes differ from the template's in its symbols alone, each of which has one size."""
        for index, (spec, shape) in enumerate(zip(self.sizes.signature.tensors, shapes, strict=True)):
            if len(spec.shape) != len(shape):
                return False
            for dim, (before, after) in enumerate(zip(spec.shape, shape, strict=True)):
                if before != after and (index, dim) not in self.sizes.ints:
                    return False
        return all(len({shapes[index][dim] for index, dim in group}) == 1 for group in self.sizes.groups)

    def at(self, values: Mapping[sympy.Symbol, int]) -> tuple[Joint, tuple[Stage, ...]]:
        """Graph and stages for these sizes."""
        numbers = Numbers(values)
        return joint_with_numbers(self.joint, numbers), tuple(stage_with_numbers(s, numbers) for s in self.stages)


def from_template(template: Template, args: Sequence[Any], kwargs: Mapping[str, Any], request: Request) -> Form:
    signature = signature_of(request, args, kwargs)
    values = template.sizes.values(shapes_of(signature.flatten(args, kwargs)))
    return Form(signature, *template.at(values), template.formulas.at(values))


def shapes_of(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def with_prologue_of(stage: Stage, first: Stage) -> Stage:
    """The stage with the very prologue of another one if they are equal, so that one serves both."""
    own, other = stage.phases[Kind.P], first.phases[Kind.P]
    if any(port.role is Role.CONSTANT for port in own.ports) or text_of_prologue(own) != text_of_prologue(other):
        return stage
    return replace(stage, phases={**stage.phases, Kind.P: other})


def text_of_prologue(phase: Phase) -> list[str]:
    nodes = phase.module.graph.nodes
    said = [f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in nodes]
    return [*map(str, phase.ports), *phase.results, *said]


def signature_of(request: Request, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    count = request.signature.input_count
    return Signature.of(tuple(args[:count]), kwargs, tuple(args[count:]), request.signature.batch_dims)


def restaged(pipe: Compiled, raw: Joint, wanted: Wanted) -> tuple[Stage, ...]:
    """The stages of another graph of the model, each with the operations and parameters of the pipeline's."""
    placement = pipe.placement
    joint = canonical(raw if wanted.trains else forward_only(raw), pipe.options)
    placed = place_same(joint, canonical(pipe.joint, pipe.options), [stage.start for stage in pipe.stages[1:]])
    if placed is None:
        # Where the loss arises, the chain of an optimizer step without a barrier ends.
        placed = place_like(joint, owners(pipe.stages), len(placement), loss_phase(pipe.stages).stage)
    stages = extracted(divided(placed, pipe.options, pipe.has_prologues), pipe.options)
    refuse_moved_parameters(pipe.stages, stages, placement)
    return stages


def assembled(pipe: Compiled, form: Form, examples: Sequence[Tensor], schedule: Schedule) -> Compiled:
    stages = form.stages
    made = replace(
        pipe,
        signature=form.signature,
        examples=tuple(examples),
        reduction=Reduction.of(form.joint, pipe.reduction.name, schedule.microbatches),
        joint=form.joint,
        stages=stages,
        schedule=schedule,
        chain=None,
    )
    if not made.trains:
        return replace(made, reductions=tuple(found.forward() for found in pipe.reductions))
    if pipe.schedule.beside:
        made = replace(made, schedule=with_pairs(schedule, stages, pipe.options))
    return replace(made, reductions=tuple(found.whole() for found in pipe.reductions))


def costs_of_seconds(costs: CostTable, seconds: Mapping[ActionKind, float]) -> CostTable:
    """Costs with measured seconds of Fs, Bs and Ws, where there are any."""
    stages = []
    for index, cost in enumerate(costs.stages):
        f_s, b_s, w_s = (seconds.get((kind, index), cost.seconds(kind)) for kind in (Kind.F, Kind.B, Kind.W))
        known = cost.beside_s is not None and cost.backward_input_s
        beside_s = cost.beside_s * b_s / cost.backward_input_s if known else cost.beside_s  # type: ignore[operator]
        times = {"forward_s": f_s, "backward_input_s": b_s, "backward_weight_s": w_s}
        stages.append(replace(cost, **times, backward_s=None, beside_s=beside_s))
    return replace(costs, stages=tuple(stages))


def owners(stages: Sequence[Stage]) -> dict[str, frozenset[int]]:
    """The stages whose forward, or prologue, reads each parameter and buffer."""
    found: dict[str, set[int]] = {}
    for stage in stages:
        for port in (*stage.phases[Kind.P].ports, *stage.phases[Kind.F].ports):
            if port.role in (Role.PARAMETER, Role.BUFFER):
                found.setdefault(port.name, set()).add(stage.index)
    return {name: frozenset(indices) for name, indices in found.items()}


def forward_only(joint: Joint) -> Joint:
    """The joint graph without its backward. What the user asks for may be detached after it, and belongs to the forward
    all the same."""
    graph = copy_graph(joint.graph)
    ends = zip(joint.output_values, joint.outputs, strict=True)
    kept = [
        k
        for k, (value, port) in enumerate(ends)
        if port.role is Role.OUTPUT or not (port.role is Role.GRADIENT or value.meta.get("is_backward"))
    ]
    output = graph.output_node()
    output.args = (tuple(output.args[0][k] for k in kept),)  # type: ignore[index]
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.meta.get("is_backward"):
            node.meta = {**node.meta, "is_backward": False}
    return replace(joint, graph=graph, outputs=tuple(joint.outputs[k] for k in kept))


def refuse_moved_parameters(before: Sequence[Stage], after: Sequence[Stage], placement: Sequence[int]) -> None:
    held = parameter_holders(before, placement)
    for name, ranks in parameter_holders(after, placement).items():
        if not set(ranks) <= set(held.get(name, ())):
            raise ZbfxError(
                f"for these shapes, or in eval mode, rank {ranks[0]} would need {name}, which ranks "
                f"{held.get(name, ())} hold: the model runs its parts in another order. Compile a pipeline of its own"
            )
