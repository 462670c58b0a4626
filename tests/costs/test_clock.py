"""Timing under load: a device that always has more to do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from zbfx.costs.clock import COUNTED_S, TIMINGS, in_turn_s, sustained_s
from zbfx.costs.measure import BESIDE, beside_s

CPU = torch.device("cpu")


@dataclass
class Device:
    """Does one thing after another. The host learns of the end of each, and needs no time of its own."""

    queued_s: float = 0.0  # when it will have done all that it has to do
    host_s: float = 0.0
    pauses: int = 0

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


@dataclass
class Event:
    device: Device
    at_s: float = -1.0

    def record(self) -> None:
        self.at_s = self.device.queued_s

    def synchronize(self) -> None:
        self.device.pauses += self.at_s == self.device.queued_s
        self.device.host_s = max(self.device.host_s, self.at_s)

    def elapsed_time(self, other: Event) -> float:
        return (other.at_s - self.at_s) * 1e3


@dataclass
class Graph:
    """Takes longer until the device has run for a while."""

    device: Device
    cold_s: float
    hot_s: float

    def replay(self) -> None:
        self.device.queued_s += self.cold_s if self.device.queued_s < 3.0 else self.hot_s


def test_the_device_never_waits_while_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr("zbfx.costs.clock.time.perf_counter", lambda: device.host_s)
    graphs: dict[str, torch.cuda.CUDAGraph] = {
        kind: Graph(device, cold, hot)  # type: ignore[misc]
        for kind, cold, hot in (("F", 0.01, 0.02), ("B", 0.02, 0.03), ("W", 0.03, 0.05))
    }
    found = in_turn_s(graphs, warm_s=4.0)
    assert found == pytest.approx({"F": 0.02, "B": 0.03, "W": 0.05})
    assert device.pauses == 1  # at the end
    assert 4.0 + COUNTED_S <= device.queued_s < 4.0 + COUNTED_S + 0.3


def test_long_calls_are_timed_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr("zbfx.costs.clock.time.perf_counter", lambda: device.host_s)
    found = in_turn_s({"F": Graph(device, 7.0, 7.0)}, warm_s=1.0)  # type: ignore[dict-item]
    assert found == pytest.approx({"F": 7.0})
    assert device.queued_s == pytest.approx(7.0 * (TIMINGS + 2))  # one before it is warm, and one behind the last


def test_rounds_without_a_gpu() -> None:
    counts = {"F": 0, "B": 0}

    def call(kind: str) -> None:
        counts[kind] += 1

    found = sustained_s([{"F": lambda: call("F"), "B": lambda: call("B")}, {"F": lambda: call("F")}], CPU, warm_s=9.0)
    assert [set(one) for one in found] == [{"F", "B"}, {"F"}]
    assert counts == {"F": 2 * (1 + TIMINGS), "B": 1 + TIMINGS}


def test_seconds_of_a_pair_are_what_it_adds_to_forwards() -> None:
    alone = {(3, "F"): 2.0, (3, "B"): 3.0, (3, "W"): 5.0}
    assert beside_s(3, alone, {(3, "F"): 2.5, (3, BESIDE): 7.0}) == 7.5
    assert beside_s(4, {(4, "B"): 3.0}, {(4, BESIDE): 7.0}) == 7.0
