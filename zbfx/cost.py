"""Stages -> CostTable in closed form: a roofline per node, summed over each phase, and bytes from the storages.

Good enough to balance stages and to order actions on hardware of the assumed proportions; measured costs replace it
where the plan has to be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zbfx.graphs import Stage
from zbfx.passes.nodes import flops, is_view, value_bytes
from zbfx.plan import CostTable, Edge, Kind, StageCost


@dataclass(frozen=True, slots=True)
class Hardware:
    """Sustained rates of a device and of the link between two ranks."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    link_bytes_per_s: float
    link_latency_s: float


# Measured orders of magnitude: one core of a server CPU with gloo over loopback; an H100 with NVLink.
CPU = Hardware(flops_per_s=5e10, bytes_per_s=1e10, launch_s=2e-6, link_bytes_per_s=2e9, link_latency_s=1e-4)
GPU = Hardware(flops_per_s=6e14, bytes_per_s=2.5e12, launch_s=2e-6, link_bytes_per_s=1.7e11, link_latency_s=2e-5)


def hardware_of(device: torch.device) -> Hardware:
    return CPU if device.type == "cpu" else GPU


def node_s(node: fx.Node, hardware: Hardware) -> float:
    """Estimated seconds of one node: the larger of arithmetic and memory traffic, plus the launch; views are free."""
    if node.op != "call_function" or is_view(node) or "val" not in node.meta:
        return 0.0
    moved_bytes = value_bytes(node) + sum(
        value_bytes(source) for source in node.all_input_nodes if "val" in source.meta
    )
    return max(flops(node) / hardware.flops_per_s, moved_bytes / hardware.bytes_per_s) + hardware.launch_s


def estimate(stages: Sequence[Stage], placement: Sequence[int], hardware: Hardware) -> CostTable:
    """The cost table of these stages: seconds of each phase, M_B and M_W, and every edge between two stages."""
    return CostTable(tuple(stage_cost(stage, hardware) for stage in stages), edges(stages, hardware), tuple(placement))


def stage_cost(stage: Stage, hardware: Hardware) -> StageCost:
    def phase_s(kind: Kind) -> float:
        return sum(node_s(node, hardware) for node in stage.phases[kind].module.graph.nodes)

    weight_saved_bytes = stage.stored_bytes(stage.phases[Kind.W].values)
    return StageCost(
        forward_s=phase_s(Kind.F),
        backward_input_s=phase_s(Kind.B),
        backward_weight_s=phase_s(Kind.W),
        # B needs room for what it leaves to W: where that is more than B frees, it counts from F on.
        saved_bytes=max(stage.stored_bytes(stage.saved), weight_saved_bytes),
        weight_saved_bytes=weight_saved_bytes,
        static_bytes=static_bytes(stage),
    )


def static_bytes(stage: Stage) -> int:
    """Bytes of the stage's parameters and of the gradients that it accumulates."""
    parameters = {name: t for phase in stage.phases.values() for name, t in phase.parameters.items()}
    trained = {name for phase in stage.phases.values() for name in phase.gradients}
    return sum(t.numel() * t.element_size() * (2 if name in trained else 1) for name, t in parameters.items())


def edges(stages: Sequence[Stage], hardware: Hardware) -> tuple[Edge, ...]:
    """One edge per pair of stages that exchange values, timed by latency and bytes."""
    sent: dict[tuple[int, int, Kind], int] = {}
    for stage in stages:
        for name in {name for phase in stage.phases.values() for name in phase.values}:
            source, kind = stage.origins[name]
            if source != stage.index:
                key = (source, stage.index, kind)
                sent[key] = sent.get(key, 0) + stage.storages[name][1]
    pairs = sorted({(min(source, target), max(source, target)) for source, target, _ in sent})

    def seconds(source: int, target: int) -> float | None:
        total = sum(size for (a, b, _), size in sent.items() if (a, b) == (source, target))
        return hardware.link_latency_s + total / hardware.link_bytes_per_s if total else None

    return tuple(Edge(low, high, seconds(low, high), seconds(high, low)) for low, high in pairs)
