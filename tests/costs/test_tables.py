"""Cost tables as JSON, there and back."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest

from zbfx.costs.tables import costs_from_json, costs_to_json
from zbfx.errors import ZbfxError
from zbfx.plan import CostTable, Edge, StageCost
from zbfx.schedule import plan


def test_defaults_of_a_short_table() -> None:
    table = costs_from_json({"stages": [{"t_f": 2, "t_b": 3, "t_w": 5}] * 2})
    assert table == CostTable.chain([StageCost(2, 3, 5, saved_bytes=1, weight_saved_bytes=0)] * 2, 0)


def test_one_communication_time_per_boundary() -> None:
    table = costs_from_json({"stages": [{"t_f": 2, "t_b": 3, "t_w": 5}] * 3, "t_comm": [7, 11]})
    assert table.edges == (Edge(0, 1, 7, 7), Edge(1, 2, 11, 11))


def test_edges_may_skip_stages_and_send_nothing_back() -> None:
    edges = [{"source": 0, "target": 2, "t_f": 7, "t_b": None}]
    table = costs_from_json({"stages": [{"t_f": 2, "t_b": 3, "t_w": 5}] * 3, "edges": edges, "placement": [0, 1, 0]})
    assert table.edges == (Edge(0, 2, 7, None),)
    assert table.placement == (0, 1, 0)


def test_written_tables_read_back() -> None:
    stages = (StageCost(2, 3, 5, 7, 11, 13, backward_s=6), StageCost(0.1, 0.2, 0.3))
    table = CostTable(stages, (Edge(0, 1, 0.5, None),), (0, 0))
    assert costs_from_json(json.loads(json.dumps(costs_to_json(table)))) == table


@pytest.mark.parametrize("kind", [numpy.float64, numpy.float32, numpy.float16, numpy.int64, numpy.uint8])
def test_numbers_of_numpy(kind: Any) -> None:
    """As those of Python: sums of small types would overflow, or lose digits."""
    stages = [StageCost(kind(3), kind(2), kind(1), saved_bytes=kind(200), weight_saved_bytes=kind(100))] * 4
    table = CostTable.chain(stages, kind(1), placement=[*numpy.arange(4)])
    expected = CostTable.chain([StageCost(3, 2, 1, saved_bytes=200, weight_saved_bytes=100)] * 4, 1)
    assert table == expected
    assert {type(value) for value in (table.stages[0].saved_bytes, table.edges[0].forward_s)} <= {int, float}
    assert {type(rank) for rank in table.placement} == {int}
    assert json.loads(json.dumps(costs_to_json(table))) == costs_to_json(expected)
    for schedule, limit in (("zb-h1", None), ("auto", kind(200) * numpy.float32(4))):
        found = plan(table, 6, schedule=schedule, mem_limit=limit, budget_s=0.5)
        wanted = plan(expected, 6, schedule=schedule, mem_limit=None if limit is None else float(limit), budget_s=0.5)
        assert found.ranks == wanted.ranks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t_comm": 1, "edges": []}, "give either t_comm or edges; found both"),
        ({"t_comm": [1, 2]}, "2 stages have 1 boundaries; found 2 communication times"),
        ({"t_comm": -1}, "communication takes a finite number of seconds >= 0; found -1 on edge 0 -> 1"),
        ({"edges": [{"source": 1, "target": 0, "t_f": 1, "t_b": 1}]}, "an edge goes from a stage to a later one"),
        ({"t_comm": True}, "costs.t_comm: expected a number; found True"),
    ],
)
def test_wrong_communication_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ZbfxError, match="^.*" + message.replace("[", r"\[")):
        costs_from_json({"stages": [{"t_f": 2, "t_b": 3, "t_w": 5}] * 2} | change)
