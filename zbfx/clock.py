"""How long calls take on a device, in the state in which they will run: many repetitions back to back, as captured CUDA
graphs where there is a GPU, so that neither launches nor cold clocks enter."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from zbfx.streams import second_stream

REPETITIONS = 8  # calls per timing, back to back
TIMINGS = 5  # of which the median counts
WARM_S = 4.5  # under full load a GPU gets hot and lowers its clock, by 3 % within this time and little after it
SHORT_WARM_S = 0.25  # enough on one that was under load a moment ago
COUNTED_S = 0.75  # under load, after that

Call = Callable[[], Any]


def call_s(call: Call, device: torch.device) -> float:
    """Median seconds of one call, back to back with others."""
    return graph_s(call) if device.type == "cuda" else process_s(call)


def process_s(call: Call) -> float:
    call()
    seconds = []
    for _ in range(TIMINGS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def captured(call: Call, repetitions: int) -> torch.cuda.CUDAGraph:
    """So many calls as a CUDA graph, warmed up on the stream that captures: every stream that multiplies matrices keeps
    a workspace for good."""
    graph = torch.cuda.CUDAGraph()
    capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
    side = capture.capture_stream
    assert side is not None, "the one for all captures"
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    with capture:
        for _ in range(repetitions):
            call()
    return graph


def graph_s(call: Call) -> float:
    graph = captured(call, REPETITIONS)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMINGS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) / 1e3 / REPETITIONS for a, b in pairwise(marks))


def sustained_s(calls: Mapping[str, Call], device: torch.device, warm_s: float) -> dict[str, float]:
    """Median seconds of each call, all of them in turn; on a GPU after `warm_s` of the same load."""
    if device.type != "cuda":
        return {kind: process_s(call) for kind, call in calls.items()}
    return in_turn_s({kind: captured(call, repetitions=1) for kind, call in calls.items()}, warm_s)


def in_turn_s(graphs: Mapping[str, torch.cuda.CUDAGraph], warm_s: float) -> dict[str, float]:
    """Median seconds of each graph, as `sustained_s` says. Waits for nothing else that the device does."""
    seconds: dict[str, list[float]] = {kind: [] for kind in graphs}
    counts_from = time.perf_counter() + warm_s
    end = counts_from + COUNTED_S
    while time.perf_counter() < end or min(map(len, seconds.values()), default=TIMINGS) < TIMINGS:
        warm = time.perf_counter() >= counts_from
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


def side_by_side(one: Call, other: Call, device: torch.device) -> Any:
    """Both calls at once, the first on the second stream; the results stay alive until both have ended."""
    stream = second_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        first = one()
    second = other()
    torch.cuda.current_stream(device).wait_stream(stream)
    return first, second


def most_bytes(call: Call, device: torch.device) -> int:
    """The most that a call holds on a GPU beside what was held before it, by PyTorch's allocator; its statistics of the
    peak start anew."""
    call()  # what is set up once is no part of it
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
