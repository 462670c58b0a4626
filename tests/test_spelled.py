"""Texts of values are those of every process: no addresses, orders of dicts and sets, hashes, indices of devices."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from tests.support.pool import Launch
from zbfx._torch.operators import waited
from zbfx.plan import Kind
from zbfx.runtime.digest import lines
from zbfx.spelled import spelled


class Plain:
    pass


@dataclass(frozen=True)
class Record:
    values: dict[str, Any]


VALUES: dict[str, tuple[Any, Any, Any]] = {  # made twice, with whatever processes differ in; and another one
    "functions": (lambda: waited, lambda: waited, lambda: operator.add),
    "partials": (lambda: partial(print, 1), lambda: partial(print, 1), lambda: partial(print, 2)),
    "operators": (lambda: torch.ops.aten.add.Tensor, lambda: torch.ops.aten.add.Tensor, lambda: torch.ops.aten.add.out),
    "instances": (Plain, Plain, lambda: Kind.F),
    "dicts": (lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}, lambda: {"a": 2, "b": 1}),
    "sets": (lambda: {"a", "b", "c"}, lambda: {"c", "b", "a"}, lambda: {"a", "b"}),
    "records": (lambda: Record({"a": 1, "b": 2}), lambda: Record({"b": 2, "a": 1}), lambda: Record({"a": 1})),
    "devices": (lambda: torch.device("cuda:0"), lambda: torch.device("cuda:1"), lambda: torch.device("cpu")),
    "tensors": (lambda: torch.zeros(2), lambda: torch.ones(2), lambda: torch.zeros(2, dtype=torch.int64)),
    "nested": (lambda: [({"f": Plain},)], lambda: [({"f": Plain},)], lambda: [({"f": Record},)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_equal_values_have_one_text(name: str) -> None:
    first, again, other = (make() for make in VALUES[name])
    assert spelled(first) == spelled(again) != spelled(other)
    assert "0x" not in spelled(first)


def texts(rank: int) -> list[str]:
    return [spelled(make()) for made in VALUES.values() for make in made]


def hash_of_a_text(rank: int) -> int:
    return hash("text")


def test_texts_are_those_of_a_process_with_other_addresses_and_hashes(launch: Launch) -> None:
    """Each rank of the pool has hashes of its own."""
    assert len(set(launch(3, hash_of_a_text).values())) == 3
    assert launch(3, texts) == dict.fromkeys(range(3), texts(0))


@pytest.mark.parametrize("waits", [False, True])
def test_lines_leave_out_the_groups_of_collectives_alone(waits: bool) -> None:
    def told(size: int, group: str, **named: Any) -> list[str]:
        graph, gather = fx.Graph(), torch.ops._c10d_functional.all_gather_into_tensor.default
        args: Any = (graph.placeholder("x"), size, *([] if named else [group]))
        graph.call_function(waited if waits else gather, (gather, *args) if waits else args, named)
        return list(lines(graph))

    assert told(2, "13") == told(2, "0xab")
    assert told(2, "13") != told(4, "13")
    assert told(2, "", group_name="13") == told(2, "", group_name="14")
