"""Costs taken on the device: of single nodes (for the partition), of whole phases and of messages (for the plan).

Everything is timed in the state in which it will run: many repetitions back to back, as one captured CUDA graph where
there is a GPU, so that neither launches nor cold clocks enter. All ranks measure at the same time, each its own
stages, and share the results: every rank plans from the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from zbfx.channels import Channels
from zbfx.cost import Hardware, Link, estimate, node_s
from zbfx.errors import ZbfxError
from zbfx.graphs import Joint, Phase, Stage
from zbfx.passes.nodes import is_view
from zbfx.plan import CostTable, Edge, Kind, StageCost
from zbfx.rng import undisturbed

REPETITIONS = 8  # calls per timing, back to back
TIMINGS = 5  # of which the median counts
BESIDE = "W beside B"
LINK_BYTES = 2**24  # of the large sum that a link is timed with
WARM_UP_S = 2.0  # a GPU lowers its clock within this time of full load


def node_timer(
    costs: CostTable | str, joint: Joint, hardware: Hardware, device: torch.device
) -> Callable[[fx.Node], float]:
    """Seconds of a node of the joint graph: measured if `costs` asks for it, estimated otherwise."""
    if costs != "measure":
        return lambda node: node_s(node, hardware)
    with undisturbed(device):
        seconds = node_seconds(joint, hardware, device)
    return lambda node: seconds.get(node.name, 0.0)


def cost_table(
    costs: CostTable | str,
    stages: Sequence[Stage],
    placement: Sequence[int],
    hardware: Hardware,
    device: torch.device,
    compiled: Callable[[Phase], Callable[..., Any]],
) -> CostTable:
    """The costs to plan from: the given table, measured ones ("measure") or estimated ones ("estimate")."""
    if isinstance(costs, CostTable):
        if costs.placement != tuple(placement):
            raise ZbfxError(f"costs are for the placement {tuple(placement)}; found one for {costs.placement}")
        return costs
    if costs == "measure":
        with undisturbed(device):
            return measured_costs(stages, placement, hardware, device, compiled)
    if costs == "estimate":
        return estimate(stages, placement, hardware)
    raise ZbfxError(f"costs is 'estimate', 'measure' or a CostTable; found {costs!r}")


def device_s(call: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one call, back to back with others."""
    return graph_s(call) if device.type == "cuda" else clock_s(call)


def clock_s(call: Callable[[], Any]) -> float:
    call()
    seconds = []
    for _ in range(TIMINGS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def captured(call: Callable[[], Any], repetitions: int) -> torch.cuda.CUDAGraph:
    """So many calls as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repetitions):
            call()
    return graph


def graph_s(call: Callable[[], Any]) -> float:
    graph = captured(call, REPETITIONS)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMINGS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) / 1e3 / REPETITIONS for a, b in pairwise(marks))


def dummy(value: Any, device: torch.device) -> Any:
    """A real tensor of a fake one's size, strides and dtype: small random floats, zeros otherwise (safe as indices)."""
    if not isinstance(value, Tensor):
        return value
    spans = [(size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True)]
    memory = torch.zeros(1 + sum(spans) if value.numel() else 0, dtype=value.dtype, device=device)
    if value.is_floating_point():
        memory.normal_(std=0.02)
    return memory.as_strided(value.size(), value.stride())  # entries may share memory, as in an expanded tensor


def node_seconds(joint: Joint, hardware: Hardware, device: torch.device) -> dict[str, float]:
    """Measured seconds of every node by name, each different (op, shapes, arguments) once. Ops that cannot run on
    made-up values keep their estimate. Rank 0's numbers on every rank."""
    known: dict[str, float] = {}
    seconds: dict[str, float] = {}
    if not dist.is_initialized() or dist.get_rank() == 0:
        for node in joint.graph.nodes:
            if node.op == "call_function" and not is_view(node) and "val" in node.meta:
                key = signature(node)
                if key not in known:
                    known[key] = one_node_s(node, hardware, device)
                seconds[node.name] = known[key]
    return from_first_rank(seconds)


def signature(node: fx.Node) -> str:
    def describe(source: fx.Node) -> Any:
        values = source.meta["val"] if isinstance(source.meta["val"], tuple | list) else [source.meta["val"]]
        return str([(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v for v in values])

    return f"{node.target}{fx.map_arg((node.args, node.kwargs), describe)}"


@torch.no_grad()
def one_node_s(node: fx.Node, hardware: Hardware, device: torch.device) -> float:
    values = {source: source.meta["val"] for source in node.all_input_nodes}
    if any(not isinstance(value, Tensor) for value in values.values()):
        return node_s(node, hardware)
    made = {source: dummy(value, device) for source, value in values.items()}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: made[n])
    try:
        return device_s(lambda: node.target(*args, **kwargs), device)  # type: ignore[operator]
    except (RuntimeError, ValueError, IndexError):
        return node_s(node, hardware)


def from_first_rank(value: Any) -> Any:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def measured_costs(
    stages: Sequence[Stage],
    placement: Sequence[int],
    hardware: Hardware,
    device: torch.device,
    compiled: Callable[[Phase], Callable[..., Any]],
) -> CostTable:
    """The cost table of these stages: phases timed as `compiled` runs them, each by the rank that will, all at once;
    edges timed as messages between their ranks. Bytes come from the graphs."""
    table = estimate(stages, placement, hardware)
    ranks = max(placement) + 1
    # With several replicas the first `ranks` processes measure for all; the others put the same load on the machine.
    distributed = dist.is_initialized() and dist.get_world_size() % ranks == 0
    own = [s for s in stages if not distributed or placement[s.index] == dist.get_rank() % ranks]
    costs: dict[int, StageCost] = {s.index: measured_stage(s, table.stages[s.index], device, compiled) for s in own}
    if not distributed:
        return replace(table, stages=tuple(costs[s.index] for s in stages))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, costs)
    merged = {index: cost for found in gathered[:ranks] for index, cost in found.items()}
    edges = tuple(measured_edge(edge, stages, placement, device) for edge in table.edges)
    return replace(table, stages=tuple(merged[s.index] for s in stages), edges=edges)


@torch.no_grad()
def measured_stage(
    stage: Stage, estimated: StageCost, device: torch.device, compiled: Callable[[Phase], Callable[..., Any]]
) -> StageCost:
    """The stage's phases, timed in turn as a step runs them, until the device has the clock it keeps under load."""
    calls: dict[Kind, Callable[[], Any]] = {}
    for kind, phase in stage.phases.items():
        if not phase.is_empty:
            inputs = phase.module.graph.find_nodes(op="placeholder")
            args = [dummy(node.meta["val"], device) if "val" in node.meta else 0 for node in inputs]
            calls[kind] = partial(compiled(phase), *args)
    seconds = sustained_s({str(kind): call for kind, call in calls.items()}, device)
    return replace(
        estimated,
        forward_s=seconds.get(Kind.F, 0.0),
        backward_input_s=seconds.get(Kind.B, 0.0),
        backward_weight_s=seconds.get(Kind.W, 0.0),
        beside_s=measured_beside_s(calls, seconds, device),
    )


def measured_beside_s(
    calls: Mapping[Kind, Callable[[], Any]], seconds: Mapping[str, float], device: torch.device
) -> float | None:
    """Seconds of B with W beside it, as much as a step of such pairs and of Fs takes beyond the Fs.

    Timed apart from B and W in turn: a device that does more at once draws more power, and lowers its clock for it.
    What that takes from the Fs is the pairs' doing.
    """
    if device.type != "cuda" or not {Kind.B, Kind.W} <= set(calls):
        return None
    pair = partial(side_by_side, calls[Kind.W], calls[Kind.B], torch.cuda.Stream(device))
    forward = {str(Kind.F): calls[Kind.F]} if Kind.F in calls else {}
    mixed = sustained_s({**forward, BESIDE: pair}, device)
    return sum(mixed.values()) - (seconds[Kind.F] if forward else 0.0)


def side_by_side(one: Callable[[], Any], other: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
    """Both calls at once, the first on `stream`; the results stay alive until both have ended."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = one()
    second = other()
    torch.cuda.current_stream().wait_stream(stream)
    return first, second


def sustained_s(calls: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Median seconds of each call, all of them in turn, the first `WARM_UP_S` left out on a GPU."""
    if device.type != "cuda":
        return {kind: clock_s(call) for kind, call in calls.items()}
    graphs = {kind: captured(call, repetitions=1) for kind, call in calls.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in calls}
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end or min(map(len, seconds.values()), default=TIMINGS) < TIMINGS:
        warm = time.perf_counter() >= end
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        marks[0].record()
        for graph, mark in zip(graphs.values(), marks[1:], strict=True):
            graph.replay()
            mark.record()
        marks[-1].synchronize()
        for kind, (start, stop) in zip(graphs, pairwise(marks), strict=True):
            if warm:
                seconds[kind].append(start.elapsed_time(stop) / 1e3)
    return {kind: median(found) for kind, found in seconds.items()}


def measured_edge(edge: Edge, stages: Sequence[Stage], placement: Sequence[int], device: torch.device) -> Edge:
    """Round trips of the edge's messages between its two ranks; every rank calls this in the same order."""
    low, high = placement[edge.source], placement[edge.target]
    if low == high:
        return edge

    def one_way_s(source: int, target: int, estimated_s: Any) -> float | None:
        if estimated_s is None:
            return None
        sender, receiver = placement[source], placement[target]
        size = message_bytes(stages, source, target)
        return transfer_s(sender, receiver, torch.empty(size, dtype=torch.uint8, device=device))

    forward_s = one_way_s(edge.source, edge.target, edge.forward_s)
    backward_s = one_way_s(edge.target, edge.source, edge.backward_s)
    found = from_rank(high, (forward_s, backward_s))
    return replace(edge, forward_s=found[0], backward_s=found[1])


def measured_link(channels: Channels) -> Link:
    """Sums over the replicas timed on this machine, small and large, all ranks at once: the slowest rank's figures."""
    replicas, device = len(channels.place.replicas), channels.device

    def seconds(size: int) -> float:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        found = []
        for _ in range(TIMINGS + 2):
            channels.barrier()
            start = time.perf_counter()
            channels.sum_over_replicas(payload).wait()
            if payload.is_cuda:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return median(found[2:])

    small_s, large_s = seconds(1), seconds(LINK_BYTES)
    own = (small_s, 2 * (replicas - 1) / replicas * LINK_BYTES / max(large_s - small_s, 1e-9))
    everywhere = channels.gather(own)
    return Link(max(latency for latency, _ in everywhere), min(rate for _, rate in everywhere), replicas)


def message_bytes(stages: Sequence[Stage], source: int, target: int) -> int:
    stage = stages[target]
    names = {name for phase in stage.phases.values() for name in phase.values if stage.origins[name][0] == source}
    return stage.stored_bytes(names)


def transfer_s(sender: int, receiver: int, payload: Tensor) -> float:
    """Half of the median round trip of a payload (the second rank's figure counts); 0 on other ranks."""
    if dist.get_rank() not in (sender, receiver):
        return 0.0
    other = receiver if dist.get_rank() == sender else sender
    seconds = []
    for _ in range(TIMINGS + 2):
        if payload.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        if dist.get_rank() == sender:
            dist.send(payload, dst=other)
            dist.recv(payload, src=other)
        else:
            dist.recv(payload, src=other)
            dist.send(payload, dst=other)
        if payload.is_cuda:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / 2)
    return median(seconds[2:])


def from_rank(rank: int, value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=rank)
    return box[0]
