"""Every rule of all ranks together can be broken: a mutation of good programs, each good alone, is refused by name.

Run: pytest tests/verify/test_broken_ranks.py (CPU, one process; runs nothing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from tests.support.reference import rescheduled
from tests.verify.test_broken_programs import (
    keys_swapped,
    overlapped,
    phase_call,
    pipeline,
    plain,
    tied,
    uses,
    with_message,
)
from zbfx.compiled import Compiled
from zbfx.errors import BrokenGraph
from zbfx.program import ops
from zbfx.program.calls import AddToGradient, PartialSum
from zbfx.program.codegen import Program
from zbfx.verify import RULES, rank_rules, verify

Mutation = Callable[[Program], Program | None]


def forwards_first() -> Compiled:
    return rescheduled(pipeline(), 4, "gpipe").compiled


def sent_after_what_answers_it(program: Program) -> None:
    for release in uses(program, ops.release, "F1.3>2"):
        program.module.graph.erase_node(release)
    (send,), (receive,) = uses(program, ops.send, "F1.3>2"), uses(program, ops.receive, "B2.3>1")
    receive.append(send)


def module_of(program: Program, kind: type[Any]) -> Any:
    return next(module for module in program.module.children() if isinstance(module, kind))


def another_stages_sum(program: Program) -> None:
    module_of(program, PartialSum).stage = 1


def sum_left_out(program: Program) -> None:
    node = addition(program)
    node.args = node.args[:1]


def sums_turned(program: Program) -> None:
    node = addition(program)
    node.args = node.args[::-1]


def addition(program: Program) -> fx.Node:
    return next(n for n in program.module.graph.nodes if str(n.target).startswith("add_"))


def another_value_added(name: str) -> Mutation:
    def mutation(program: Program) -> None:
        node = addition(program)
        node.args = (*node.args, next(n for n in program.module.graph.nodes if n.name == name))

    return mutation


def another_entry_added(entry: int) -> Mutation:
    def mutation(program: Program) -> None:
        value: Any = addition(program).args[1]
        value.update_arg(1, entry)

    return mutation


def added_elsewhere(program: Program) -> None:
    module_of(program, AddToGradient).name = "another"


def gradients_meet(program: Program) -> None:
    for name in ("B1", "W1"):
        call = phase_call(program, name)
        call.phase = replace(call.phase, gradients=(*call.phase.gradients, "shared"))


def buffers_meet(program: Program) -> None:
    for name in ("B1", "W1"):
        call = phase_call(program, name)
        call.phase = replace(call.phase, updates=(*call.phase.updates, "calls"))


BROKEN: list[tuple[Callable[..., Any], Callable[[], Compiled], int, Mutation]] = [
    (rank_rules.messages_pair_up, plain, 1, lambda p: with_message(p, "F0.0>1", consumer=None)),
    (rank_rules.messages_pair_up, plain, 0, lambda p: with_message(p, "F0.0>1", target=2)),
    (rank_rules.channels_are_in_order, forwards_first, 2, lambda p: keys_swapped(p, ops.post, "F1.0>2", "F1.1>2")),
    (rank_rules.no_rank_waits_in_a_circle, plain, 1, sent_after_what_answers_it),
    (rank_rules.shared_gradients_are_whole, tied, 0, another_stages_sum),
    (rank_rules.shared_gradients_are_whole, tied, 0, sum_left_out),
    (rank_rules.shared_gradients_are_whole, tied, 0, sums_turned),
    (rank_rules.shared_gradients_are_whole, tied, 0, added_elsewhere),
    *(
        (rank_rules.shared_gradients_are_whole, tied, 0, another_value_added(name))
        for name in ("microbatch_0", "F0_3_for_W", "mm_6_m3", "getitem", "W0_0")
    ),
    *((rank_rules.shared_gradients_are_whole, tied, 0, another_entry_added(entry)) for entry in (-1, 1)),
    (rank_rules.calls_beside_do_not_meet, overlapped, 1, gradients_meet),
    (rank_rules.calls_beside_do_not_meet, overlapped, 1, buffers_meet),
]


@pytest.mark.parametrize(("rule", "make", "rank", "mutation"), BROKEN)
def test_broken_ranks_are_refused(
    rule: Callable[..., Any], make: Callable[[], Compiled], rank: int, mutation: Mutation
) -> None:
    programs = list(make().programs)
    verify(tuple(programs), after="generate")
    programs[rank] = mutation(programs[rank]) or programs[rank]
    verify((programs[rank],), after="generate")  # alone it is as good as before
    with pytest.raises(BrokenGraph) as caught:
        verify(tuple(programs), after="a pass of mine")
    assert (caught.value.after, caught.value.rule) == ("a pass of mine", rule.__name__)
    assert str(rule.__doc__).rstrip(".") in str(caught.value)


def test_a_circle_is_told_by_where_its_ranks_wait() -> None:
    programs = plain().programs
    sent_after_what_answers_it(programs[1])
    with pytest.raises(BrokenGraph, match=r"ranks that wait for each other, this one in receive"):
        verify(programs, after="a pass of mine")


def test_every_rule_is_broken() -> None:
    assert {rule for rule, *_ in BROKEN} == {*RULES["the programs of all ranks"]}
