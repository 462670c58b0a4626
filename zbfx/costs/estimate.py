"""Stages -> CostTable in closed form: a roofline per node, summed over each phase, and bytes from the storages: good
enough to balance stages and to order actions on hardware of the assumed proportions. Stages traced with symbols for
sizes give `Formulas`, which become a table for any sizes by substitution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from zbfx.graphs import Role, Stage
from zbfx.memory.lifetimes import transient_bytes
from zbfx.passes.nodes import expression, flops, hint, is_view, value_bytes
from zbfx.plan import CostTable, Edge, Kind, StageCost


@dataclass(frozen=True, slots=True)
class Hardware:
    """Sustained rates of a device and of the link between two ranks."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    link_bytes_per_s: float
    link_latency_s: float
    beside: float  # the share of a W's time that it adds to a B beside it


@dataclass(frozen=True, slots=True)
class Link:
    """What it takes to sum over replicas: seconds for any sum, and bytes a second in and out of each process."""

    latency_s: float
    bytes_per_s: float
    replicas: int

    def sum_s(self, size_bytes: int) -> float:
        """A ring of so many processes sends 2 (replicas - 1) / replicas times the bytes of a sum through each."""
        return self.latency_s + 2 * (self.replicas - 1) / self.replicas * size_bytes / self.bytes_per_s


# Measured orders of magnitude: one core of a server CPU with gloo over loopback; an H100 with NVLink.
CPU = Hardware(5e10, bytes_per_s=1e10, launch_s=2e-6, link_bytes_per_s=2e9, link_latency_s=1e-4, beside=1.0)
GPU = Hardware(6e14, bytes_per_s=2.5e12, launch_s=2e-6, link_bytes_per_s=1.7e11, link_latency_s=2e-5, beside=0.9)


def hardware_of(device: torch.device) -> Hardware:
    return CPU if device.type == "cpu" else GPU


@dataclass(frozen=True, slots=True)
class Formulas:
    """A cost table whose numbers are sympy expressions in the sizes of the microbatch: the fields of every stage, and
    (source, target, seconds forward, seconds back) of every edge."""

    stages: tuple[Mapping[str, Any], ...]
    edges: tuple[tuple[int, int, Any, Any], ...]
    placement: tuple[int, ...]

    def at(self, values: Mapping[sympy.Symbol, int]) -> CostTable:

        def number(formula: Any) -> Any:
            if not isinstance(formula, sympy.Expr):
                return formula
            found = formula.xreplace(values)
            return int(found) if found.is_integer else float(found)

        return CostTable(
            tuple(StageCost(**{name: number(formula) for name, formula in stage.items()}) for stage in self.stages),
            tuple(Edge(low, high, number(there), number(back)) for low, high, there, back in self.edges),
            self.placement,
        )


@dataclass(frozen=True, slots=True)
class Costed:
    """Stages, their cost table, and for each stage notes on how its costs were found."""

    stages: tuple[Stage, ...]
    costs: CostTable
    notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def node_s(node: fx.Node, hardware: Hardware, size: Callable[[Any], Any] = hint) -> Any:
    """Estimated seconds of one node: the larger of arithmetic and memory traffic, plus the launch; views are free."""
    if node.op != "call_function" or is_view(node) or "val" not in node.meta:
        return 0.0
    moved_bytes = value_bytes(node, size) + sum(
        value_bytes(source, size) for source in node.all_input_nodes if "val" in source.meta
    )
    return larger(flops(node, size) / hardware.flops_per_s, moved_bytes / hardware.bytes_per_s) + hardware.launch_s


def larger(one: Any, other: Any) -> Any:
    if isinstance(one, sympy.Expr) or isinstance(other, sympy.Expr):
        return sympy.Max(one, other, evaluate=False)  # substitution decides which
    return max(one, other)


def estimate(stages: Sequence[Stage], placement: Sequence[int], hardware: Hardware) -> CostTable:
    """The cost table of these stages: seconds of each phase, M_B and M_W, transients, and every edge between two."""
    table = formulas(stages, placement, hardware).at({})
    transient = map(transient_bytes, stages)
    costs = tuple(replace(s, transient_bytes=size) for s, size in zip(table.stages, transient, strict=True))
    return replace(table, stages=costs)


def formulas(stages: Sequence[Stage], placement: Sequence[int], hardware: Hardware) -> Formulas:
    """The cost table of these stages, as formulas where their sizes are symbols."""
    return Formulas(tuple(stage_terms(stage, hardware) for stage in stages), edges(stages, hardware), tuple(placement))


def stage_terms(stage: Stage, hardware: Hardware) -> dict[str, Any]:

    def phase_s(kind: Kind) -> Any:
        return total(node_s(node, hardware, expression) for node in stage.phases[kind].module.graph.nodes)

    prologue_s, forward_s, input_s, weight_s = map(phase_s, (Kind.P, Kind.F, Kind.B, Kind.W))
    return {
        "forward_s": forward_s,
        "backward_input_s": input_s,
        "backward_weight_s": weight_s,
        "beside_s": input_s + hardware.beside * weight_s,
        "saved_bytes": stage.saved_bytes,
        "weight_saved_bytes": stage.weight_saved_bytes,
        "static_bytes": stage_static_bytes(stage),
        "prologue_s": prologue_s,
    }


def total(terms: Iterable[Any]) -> Any:
    """The sum of the terms. Expressions are added in one call, which collects equal terms."""
    numbers = list(terms)
    if any(isinstance(number, sympy.Expr) for number in numbers):
        return sympy.Add(*numbers)
    return sum(numbers)


def stage_static_bytes(stage: Stage) -> Any:
    """Bytes of the stage's parameters, of the gradients that it accumulates, and of what its prologue keeps."""
    sums = {name: t for phase in stage.phases.values() for name, t in phase.sums.items()}
    parameters = sums | {
        port.name: node.meta["val"]
        for phase in stage.phases.values()
        for port, node in zip(phase.ports, phase.module.graph.find_nodes(op="placeholder"), strict=False)
        if port.role is Role.PARAMETER
    }
    own = sum(tensor.numel() * tensor.element_size() for tensor in (*parameters.values(), *sums.values()))
    return own + stage.kept_bytes


def edges(stages: Sequence[Stage], hardware: Hardware) -> tuple[tuple[int, int, Any, Any], ...]:
    """One edge per pair of stages that exchange values, timed by latency and bytes: source, target, there and back."""
    sent: dict[tuple[int, int, Kind], Any] = {}
    for stage in stages:
        for name in {name for phase in stage.phases.values() for name in phase.values}:
            source, kind = stage.origins[name]
            if source != stage.index:
                key = (source, stage.index, kind)
                sent[key] = sent.get(key, 0) + stage.storages[name][1]
    pairs = sorted({(min(source, target), max(source, target)) for source, target, _ in sent})

    def seconds(source: int, target: int) -> Any:
        sizes = [size for (a, b, _), size in sent.items() if (a, b) == (source, target)]
        return hardware.link_latency_s + total(sizes) / hardware.link_bytes_per_s if any(sizes) else None

    return tuple((low, high, seconds(low, high), seconds(high, low)) for low, high in pairs)
