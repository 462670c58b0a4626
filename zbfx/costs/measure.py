"""Costs taken on the device: of single nodes (for the partition) and of whole phases (for the plan).
In: a joint graph or stages, and the conditions under which they run. Out: seconds of nodes, or a `Costed`. All ranks
measure at the same time, each its own stages, and share the results: every rank plans from the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from zbfx.comm.together import exchange, from_rank
from zbfx.costs import made_up
from zbfx.costs.clock import WARM_S, call_s, captured, most_bytes, side_by_side, sustained_s
from zbfx.costs.estimate import Costed, Hardware, estimate, hardware_of, node_s
from zbfx.costs.fused import fused
from zbfx.costs.links import measured_edges
from zbfx.errors import ZbfxError, first_line
from zbfx.graphs import CallBytes, Joint, Phase, Stage
from zbfx.memory.lifetimes import CUDA_GRANULE, Reading, call_effect, lifetimes, reading, transient_bytes
from zbfx.options import Options
from zbfx.passes.nodes import is_view
from zbfx.plan import CostTable, Kind, StageCost
from zbfx.program.boxed import Boxed, code_of
from zbfx.progress import announce
from zbfx.rng import preserved_generators

BESIDE = "W beside B"

TimedPart = tuple[int, str]  # a stage, and what of it is timed


def node_timer(joint: Joint, options: Options) -> Callable[[fx.Node], float]:
    """Seconds of a node of the joint graph: measured if the options ask for it, estimated otherwise; in compiled phases
    as one of a fused kernel."""
    hardware = hardware_of(options.device)
    alone: Callable[[fx.Node], float] = partial(node_s, hardware=hardware)
    if options.measures:
        with preserved_generators(options.device):
            measured = node_seconds(joint, hardware, options.device)
        alone = partial(seconds_of, measured)
    return fused(joint, alone) if options.runs.compiles else alone


def seconds_of(seconds: Mapping[str, float], node: fx.Node) -> float:
    return seconds.get(node.name, 0.0)


@dataclass(frozen=True, slots=True)
class Conditions:
    """How phases are measured: on `device`, as `compiled` runs them, after `warm_s` of load; Ws beside Bs if
    `overlap`."""

    device: torch.device
    compiled: Callable[[Phase], Boxed]
    overlap: bool
    warm_s: float


def cost_table(
    stages: tuple[Stage, ...],
    placement: Sequence[int],
    options: Options,
    compiled: Callable[[Phase], Boxed],
    warm_s: float = WARM_S,
) -> Costed:
    """The stages, and the costs to plan from: the options' own table, measured ones or estimated ones. Measured phases
    run as `compiled` makes them, after `warm_s` of load; the stages then say what calls of these phases hold."""
    if isinstance(options.costs, CostTable):
        if options.costs.placement != tuple(placement):
            raise ZbfxError(
                f"costs are for the placement {tuple(placement)}, which the schedule asks for; found a table for "
                f"{options.costs.placement}. Set its field placement, or choose another schedule"
            )
        return Costed(stages, options.costs)
    hardware = hardware_of(options.device)
    if not options.measures:
        return Costed(stages, estimate(stages, placement, hardware))
    with preserved_generators(options.device):
        conditions = Conditions(options.device, compiled, options.overlap, warm_s)
        return measured_costs(stages, placement, hardware, conditions)


def node_seconds(joint: Joint, hardware: Hardware, device: torch.device) -> dict[str, float]:
    """Measured seconds of every node by name. Rank 0's numbers on every rank."""
    seconds: dict[str, float] = {}
    if not dist.is_initialized() or dist.get_rank() == 0:
        seconds = graph_seconds(joint.graph, hardware, device)
    return from_rank(0, "compile (seconds of nodes)", seconds)


def graph_seconds(graph: fx.Graph, hardware: Hardware, device: torch.device) -> dict[str, float]:
    """Measured seconds of a graph's nodes by name, each different (op, shapes, arguments) once. Ops that cannot run on
    made-up values keep their estimate."""
    known: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not is_view(node) and "val" in node.meta:
            key = signature(node)
            if key not in known:
                announce("timing operators", len(known) + 1)
                known[key] = one_node_s(node, hardware, device)
            seconds[node.name] = known[key]
    return seconds


def signature(node: fx.Node) -> str:
    def describe(source: fx.Node) -> Any:
        value = source.meta.get("val")  # a seed has none
        values = value if isinstance(value, tuple | list) else [value]
        return str([(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v for v in values])

    return f"{node.target}{fx.map_arg((node.args, node.kwargs), describe)}"


@torch.no_grad()
def one_node_s(node: fx.Node, hardware: Hardware, device: torch.device) -> float:
    if any(isinstance(source.meta.get("val"), tuple | list) for source in node.all_input_nodes):
        return node_s(node, hardware)
    positive = made_up.positive_inputs([node])
    made = {source: made_up.argument_of(source, device, positive) for source in node.all_input_nodes}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: made[n])
    try:
        return call_s(lambda: node.target(*args, **kwargs), device)  # type: ignore[operator]
    except made_up.REFUSALS:
        return node_s(node, hardware)


def measured_costs(
    stages: tuple[Stage, ...], placement: Sequence[int], hardware: Hardware, conditions: Conditions
) -> Costed:
    """The stages, with what calls of their phases hold, and their cost table. Each rank times the phases that it will
    run, all ranks at once; edges are timed as messages between their ranks."""
    table = estimate(stages, placement, hardware)
    ranks = max(placement) + 1
    # With several replicas the first `ranks` processes measure for all; the others put the same load on the machine.
    distributed = dist.is_initialized() and dist.get_world_size() % ranks == 0
    own = [s for s in stages if not distributed or placement[s.index] == dist.get_rank() % ranks]
    ready = []
    for number, stage in enumerate(own, start=1):
        announce("preparing stages to time them", number, len(own))
        ready.append(prepared(stage, conditions))
    announce("timing stages")
    found = measured_stages(ready, table, hardware, conditions)
    edges = table.edges
    if distributed:
        everywhere = exchange("compile (costs of stages)", found)
        found = {index: measured for part in everywhere[:ranks] for index, measured in part.items()}
        edges = measured_edges(edges, stages, placement, conditions.device)
    known = tuple(with_call_bytes(s, found[s.index].call_bytes) for s in stages)
    costs = tuple(replace(found[s.index].cost, transient_bytes=transient_bytes(s)) for s in known)
    notes = {index: measured.notes for index, measured in found.items()}
    return Costed(known, replace(table, stages=costs, edges=edges), notes)


def with_call_bytes(stage: Stage, measured: Mapping[Kind, CallBytes]) -> Stage:
    phases = {kind: replace(phase, measured=measured.get(kind)) for kind, phase in stage.phases.items()}
    return replace(stage, phases=phases)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A stage whose phases can be called again and again on made-up values, and what such calls hold on a GPU. Phases
    in `refused` cannot be: they raise this."""

    stage: Stage
    calls: Mapping[Kind, Callable[[], Any]]
    call_bytes: Mapping[Kind, CallBytes]
    refused: Mapping[Kind, str]


@torch.no_grad()
def prepared(stage: Stage, conditions: Conditions) -> Prepared:
    """Compile the stage's phases, and try each once. A tensor that several of them read is made once."""
    device = conditions.device
    made: dict[Any, Any] = {}
    calls: dict[Kind, Callable[[], Any]] = {}
    held: dict[Kind, CallBytes] = {}
    refused: dict[Kind, str] = {}
    for kind, phase in stage.phases.items():
        if not phase.is_empty:
            keys = made_up.argument_keys(phase)
            for key, make in zip(keys, made_up.argument_makers(phase.module.graph, device), strict=True):
                if key not in made:
                    made[key] = make()
            args = [made[key] for key in keys]
            run = conditions.compiled(made_up.without_checks(phase))
            calls[kind] = partial(keeping, run, args)
            try:
                calls[kind]()
                if device.type == "cuda":  # a capture may raise what a call does not
                    captured(calls[kind], repetitions=1)
            except torch.OutOfMemoryError:
                raise
            except made_up.REFUSALS as error:
                refused[kind] = f"{type(error).__name__}: {first_line(error)}"
                del calls[kind]
                continue
            if device.type == "cuda":
                held[kind] = call_bytes(stage, kind, run, args, device)
    return Prepared(stage, calls, held, refused)


@dataclass(frozen=True, slots=True)
class Measured:
    """A stage's costs, what calls of its phases hold, and notes on phases that could not be called."""

    cost: StageCost
    call_bytes: Mapping[Kind, CallBytes]
    notes: tuple[str, ...]


@torch.no_grad()
def measured_stages(
    ready: Sequence[Prepared], estimated: CostTable, hardware: Hardware, conditions: Conditions
) -> dict[int, Measured]:
    """The costs of a rank's stages. All of their phases are timed in turn, as a step runs them, once the device has the
    clock that it keeps under load; of phases that compute the same, one. A phase that refuses made-up values counts as
    the sum of its nodes."""
    alone = {(one.stage.index, str(kind)): call for one in ready for kind, call in one.calls.items()}
    forward = {key: call for key, call in alone.items() if key[1] == Kind.F}
    pairs = {(one.stage.index, BESIDE): pair for one in ready if (pair := beside(one, conditions))}
    rounds = [alone, {**forward, **pairs}] if pairs else [alone]
    like = first_alike(ready)
    timed = [{key: call for key, call in calls.items() if like[key] == key} for calls in rounds]
    taken = sustained_s(timed, conditions.device, conditions.warm_s)
    seconds, *mixed = ({key: found[like[key]] for key in calls} for found, calls in zip(taken, rounds, strict=True))
    found = {}
    for one in ready:
        index = one.stage.index
        for kind in one.refused:
            graph = one.stage.phases[kind].module.graph
            seconds[index, kind] = sum(graph_seconds(graph, hardware, conditions.device).values())
        notes = tuple(
            f"the seconds of {one.stage.phases[kind].name} are the sum of those of its nodes: called on made-up "
            f"values, it raises {error}"
            for kind, error in one.refused.items()
        )
        cost = replace(
            estimated.stages[index],
            forward_s=seconds.get((index, Kind.F), 0.0),
            backward_input_s=seconds.get((index, Kind.B), 0.0),
            backward_weight_s=seconds.get((index, Kind.W), 0.0),
            prologue_s=seconds.get((index, Kind.P), 0.0),
            beside_s=None,
        )
        if (index, BESIDE) in pairs:
            cost = replace(cost, beside_s=beside_s(index, seconds, mixed[0]))
        elif runs_pairs(one, conditions):
            cost = replace(cost, beside_s=cost.backward_input_s + hardware.beside * cost.backward_weight_s)
        found[index] = Measured(cost, one.call_bytes, notes)
    return found


def first_alike(ready: Sequence[Prepared]) -> dict[TimedPart, TimedPart]:
    """For each part of each stage, the first part that computes the same."""
    first: dict[Any, TimedPart] = {}
    like: dict[TimedPart, TimedPart] = {}
    for one in ready:
        codes = {str(kind): code_of(one.stage.phases[kind]) for kind in one.calls}
        for part, code in {**codes, BESIDE: (codes.get(Kind.B), codes.get(Kind.W))}.items():
            key = one.stage.index, part
            like[key] = first.setdefault((part, code), key)
    return like


def runs_pairs(one: Prepared, conditions: Conditions) -> bool:
    """Whether steps run the stage's B with its W beside it."""
    return conditions.overlap and conditions.device.type == "cuda" and {Kind.B, Kind.W} <= {*one.calls, *one.refused}


def beside(one: Prepared, conditions: Conditions) -> Callable[[], Any] | None:
    """A call of the stage's B with its W beside it; None if steps run no such pair, or if it cannot be called."""
    if not runs_pairs(one, conditions) or not {Kind.B, Kind.W} <= set(one.calls):
        return None
    return partial(side_by_side, one.calls[Kind.W], one.calls[Kind.B], conditions.device)


def beside_s(stage: int, alone: Mapping[TimedPart, float], mixed: Mapping[TimedPart, float]) -> float:
    """Seconds of B with W beside it: what a round of Fs and such pairs takes beyond the Fs alone. This round is timed
    apart from the one of B and W in turn, because a device that does more at once draws more power and lowers its
    clock. The time that the Fs lose to that counts as the pair's."""
    forward = (stage, str(Kind.F))
    return mixed[stage, BESIDE] + mixed.get(forward, 0.0) - alone.get(forward, 0.0)


def keeping(run: Boxed, args: Sequence[Any]) -> Any:
    """A call whose arguments live on."""
    return run(list(args))


def call_bytes(stage: Stage, kind: Kind, run: Boxed, args: Sequence[Any], device: torch.device) -> CallBytes:
    """What a call of the phase holds on a GPU: one whose arguments live on, and one as a step makes it."""
    inside = lifetimes(stage.phases[kind], CUDA_GRANULE)
    every = range(len(stage.phases[kind].values))
    alive = call_effect(inside, every, (), dict.fromkeys(every, 0)).peak
    most = most_bytes(run, lambda: list(args), device)
    read = reading(stage, kind, CUDA_GRANULE)
    expected = call_effect(inside, read.groups, read.owned, read.sizes).peak
    usual = most_bytes(run, lambda: leaving(stage, kind, read, args, device), device)
    return CallBytes(max(0, most - alive), most, expected, usual)


def leaving(stage: Stage, kind: Kind, read: Reading, args: Sequence[Any], device: torch.device) -> list[Any]:
    """These arguments, with storages that nothing else holds for the values that the call owns."""
    phase, box = stage.phases[kind], list(args)
    owned = [name for name, slot in zip(phase.values, read.groups, strict=True) if slot in read.owned]
    for name, value in made_up.made_up_values(stage, owned, made_up.positive_values(phase), device).items():
        box[len(phase.ports) + phase.values.index(name)] = value
    return box
