"""How long calls take on a device, in the state in which a step will run them.
In: functions without arguments. Out: seconds. Calls follow each other without a pause, on a GPU as captured CUDA
graphs, so that neither launches nor a cold clock enter."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch

from zbfx.program.streams import second_stream

REPETITIONS = 8  # calls per timing, back to back
TIMINGS = 5  # of which the median counts
WARM_S = 4.5  # under full load a GPU gets hot and lowers its clock, by 3 % within this time and little after it
SHORT_WARM_S = 0.25  # enough on a GPU that was under the same load a moment ago
OTHER_WARM_S = 2.0  # enough on one that was under another load: this one may draw more power, and cost 2 % of the clock
COUNTED_S = 0.75  # how long calls are timed after that

Label = TypeVar("Label", bound=Hashable)
Argument = TypeVar("Argument")


def call_s(call: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one call, back to back with others."""
    return graph_s(call) if device.type == "cuda" else process_s(call)


def process_s(call: Callable[[], Any]) -> float:
    call()
    seconds = []
    for _ in range(TIMINGS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def captured(call: Callable[[], Any], repetitions: int, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of so many calls. They are warmed up on the stream that captures, since every other stream that
    multiplies matrices would keep a workspace for good. Graphs with one `pool` write over each other's results."""
    graph = torch.cuda.CUDAGraph()
    capture = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
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


def graph_s(call: Callable[[], Any]) -> float:
    graph = captured(call, REPETITIONS)
    graph.replay()
    marks = turn(dict.fromkeys(range(TIMINGS), graph))
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) / 1e3 / REPETITIONS for a, b in pairwise(marks))


def sustained_s(
    rounds: Sequence[Mapping[Label, Callable[[], Any]]], device: torch.device, warm_s: float
) -> list[dict[Label, float]]:
    """Median seconds of each call. The calls of a round run in turn. On a GPU the first round is timed after `warm_s`
    of its load, and the others right after it. All are captured before, because a device that waits cools down."""
    if device.type != "cuda":
        return [{key: process_s(call) for key, call in calls.items()} for calls in rounds]
    pool = torch.cuda.graph_pool_handle()
    graphs = [{key: captured(call, repetitions=1, pool=pool) for key, call in calls.items()} for calls in rounds]
    return [in_turn_s(one, OTHER_WARM_S if index else warm_s) for index, one in enumerate(graphs)]


def in_turn_s(graphs: Mapping[Label, torch.cuda.CUDAGraph], warm_s: float) -> dict[Label, float]:
    """Median seconds of each graph, run in turn under load. The device always has the next turn before it ends one: a
    pause of a moment, in which it draws less power, makes it faster by 1 to 2 % than it is in a step."""
    seconds: dict[Label, list[float]] = {key: [] for key in graphs}
    counts_from = time.perf_counter() + warm_s
    end = counts_from + COUNTED_S
    begun = turn(graphs)
    while time.perf_counter() < end or min(map(len, seconds.values()), default=TIMINGS) < TIMINGS:
        warm = time.perf_counter() >= counts_from
        marks, begun = begun, turn(graphs)
        marks[-1].synchronize()
        for key, (start, stop) in zip(graphs, pairwise(marks), strict=True):
            if warm:
                seconds[key].append(start.elapsed_time(stop) / 1e3)
    begun[-1].synchronize()
    return {key: median(found) for key, found in seconds.items()}


def turn(graphs: Mapping[Label, torch.cuda.CUDAGraph]) -> list[torch.cuda.Event]:
    """Start each graph once; the marks before the first and behind each."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
    marks[0].record()
    for graph, mark in zip(graphs.values(), marks[1:], strict=True):
        graph.replay()
        mark.record()
    return marks


def side_by_side(one: Callable[[], Any], other: Callable[[], Any], device: torch.device) -> Any:
    """Both calls at once, the first on the second stream; the results stay alive until both have ended."""
    stream = second_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        first = one()
    second = other()
    torch.cuda.current_stream(device).wait_stream(stream)
    return first, second


def most_bytes(run: Callable[[Argument], Any], make: Callable[[], Argument], device: torch.device) -> int:
    """The most bytes that `run` holds on a GPU beside what was held before it, its argument included. Resets the peak
    that PyTorch's allocator reports."""
    most = 0
    for _ in range(2):  # the first call also sets things up, and does not count
        argument = make()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = run(argument)
        torch.cuda.synchronize(device)
        most = torch.cuda.max_memory_allocated(device) - before
        del argument, result
    return most
