"""Seconds of messages between ranks, and of sums over replicas, taken on the machine. All ranks measure together.
In: the edges of a cost table with their stages, or `Channels`. Out: measured edges, or a `Link`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.comm.channels import Channels
from zbfx.comm.copies import Lines, close_lines, open_lines, room
from zbfx.comm.overdue import Overdue
from zbfx.comm.place import Place
from zbfx.comm.together import from_rank, waiting
from zbfx.costs.clock import TIMINGS, graph_s
from zbfx.costs.estimate import Link
from zbfx.graphs import Stage
from zbfx.plan import Edge

MESSAGES = "compile (seconds of messages)"
LARGE_BYTES = 2**24  # of the large sum that a link is timed with
LIMIT = timedelta(minutes=5)  # for all messages of all edges


def measured_edges(
    edges: Sequence[Edge], stages: Sequence[Stage], placement: Sequence[int], device: torch.device
) -> tuple[Edge, ...]:
    """The edges with the seconds of their messages, sent as a step sends them."""
    place = Place(((tuple(range(max(placement) + 1)),),), 0, 0, dist.get_rank())  # further processes only call along
    between = {(placement[edge.source], placement[edge.target]) for edge in edges}
    pairs = {pair for one, other in between if one != other for pair in ((one, other), (other, one))}
    if device.type != "cuda":
        return tuple(measured_edge(edge, stages, placement, device, {}) for edge in edges)
    lines, _ = open_lines(sorted(pairs), place, device, "compile", room())
    overdue = Overdue(f"rank {dist.get_rank()}", LIMIT, f"compile allows {LIMIT} for messages", done=lambda: 0)
    overdue.begin()
    measured = tuple(measured_edge(edge, stages, placement, device, lines) for edge in edges)
    overdue.close()
    close_lines(list(lines.values()), "compile")
    return measured


def measured_edge(
    edge: Edge, stages: Sequence[Stage], placement: Sequence[int], device: torch.device, lines: Lines
) -> Edge:
    """The edge with the seconds of its messages, from round trips. All ranks call this, for all edges in one order."""
    low, high = placement[edge.source], placement[edge.target]
    if low == high:
        return edge

    def one_way_s(source: int, target: int, estimated_s: Any) -> float | None:
        if estimated_s is None:
            return None
        sender, receiver = placement[source], placement[target]
        if dist.get_rank() not in (sender, receiver):
            return 0.0
        payload = torch.empty(message_bytes(stages, source, target), dtype=torch.uint8, device=device)
        with waiting(f"rank {dist.get_rank()}, {MESSAGES}", f"rank {sender} or {receiver}, which"):
            return transfer_s(sender, receiver, payload, lines)

    forward_s = one_way_s(edge.source, edge.target, edge.forward_s)
    backward_s = one_way_s(edge.target, edge.source, edge.backward_s)
    found = from_rank(high, MESSAGES, (forward_s, backward_s))
    return replace(edge, forward_s=found[0], backward_s=found[1])


def message_bytes(stages: Sequence[Stage], source: int, target: int) -> int:
    stage = stages[target]
    names = {name for phase in stage.phases.values() for name in phase.values if stage.origins[name][0] == source}
    return stage.stored_bytes(names)


def transfer_s(sender: int, receiver: int, payload: Tensor, lines: Lines) -> float:
    """Half of the median round trip of a payload between two ranks, one of them this process's."""
    own, other = (sender, receiver) if dist.get_rank() == sender else (receiver, sender)
    lined = (own, other) in lines

    def send() -> None:
        lines[own, other].transfer(payload).wait() if lined else dist.send(payload, dst=other)

    def receive() -> None:
        lines[other, own].transfer(payload).wait() if lined else dist.recv(payload, src=other)

    def round_trip() -> None:
        for part in (send, receive) if own == sender else (receive, send):
            part()

    return (graph_s(round_trip) if lined else on_host_s(round_trip, payload.device)) / 2


def on_host_s(call: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None) -> float:
    """Median seconds of a call in which other processes take part; `before` is called before each, untimed."""
    seconds = []
    for _ in range(TIMINGS + 2):
        before()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_link(channels: Channels) -> Link:
    """Sums over the replicas timed on this machine, small and large, all ranks at once: the slowest rank's figures."""
    replicas, device = len(channels.place.replicas), channels.device

    def seconds(size: int) -> float:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        return on_host_s(lambda: channels.sum_over_replicas(payload).wait(), device, channels.barrier)

    small_s, large_s = seconds(1), seconds(LARGE_BYTES)
    own = (small_s, 2 * (replicas - 1) / replicas * LARGE_BYTES / max(large_s - small_s, 1e-9))
    everywhere = channels.gather(own)
    return Link(max(latency for latency, _ in everywhere), min(rate for _, rate in everywhere), replicas)
