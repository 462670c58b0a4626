"""Every rule of programs can be broken: a mutation of a good program, which is refused by name.

Run: pytest tests/verify/test_broken_programs.py (CPU, one process; runs nothing).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zbfx
from tests.support.models import Problem, mixed, numbers, squares
from tests.support.reference import beside, compiled, rescheduled
from zbfx.compiled import Compiled
from zbfx.errors import BrokenGraph
from zbfx.plan import Action, Kind
from zbfx.program import ops
from zbfx.program.calls import PhaseCall
from zbfx.program.chain import order_of_ranks
from zbfx.program.codegen import Program
from zbfx.program.streams import join
from zbfx.replicas import replicated
from zbfx.verify import RULES, program_rules, verify

F, B, W = Kind.F, Kind.B, Kind.W
RANKS = 3


@functools.cache
def pipeline() -> zbfx.Pipeline:
    return compiled(mixed(4), RANKS, 4, check=False)


class Tied(nn.Module):
    """One weight in its first and its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(6, 6)
        self.middle = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.ends(torch.tanh(self.middle(torch.tanh(self.ends(x)))))


@functools.cache
def tied_pipeline() -> Compiled:
    return compiled(Problem(Tied(), squares, (numbers(8, 6),)), 3, 4, schedule="zb-h1", check=False).compiled


def tied() -> Compiled:
    """With programs of its own, which a test may change."""
    return replicated(tied_pipeline(), 2)


def plain() -> Compiled:
    """With programs of its own, which a test may change."""
    return rescheduled(pipeline(), 4, "zb-h1").compiled


@functools.cache
def cast_pipeline() -> zbfx.Pipeline:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return compiled(mixed(4), RANKS, 4, check=False)


def cast() -> Compiled:
    """With prologues."""
    return rescheduled(cast_pipeline(), 4, "zb-h1").compiled


def overlapped() -> Compiled:
    return beside(rescheduled(pipeline(), 4, "gpipe")).compiled


def summed() -> Compiled:
    return replicated(plain(), 2).sharded()


def validated() -> Compiled:
    return plain().validated(order_of_ranks(plain().schedule, plain().loss_rank), 1)


# Mutations get the program of one rank and may change it.


def node_of(program: Program, name: str) -> fx.Node:
    return next(node for node in program.module.graph.nodes if node.name == name)


def uses(program: Program, function: Any, key: str | None = None) -> list[fx.Node]:
    nodes = program.module.graph.find_nodes(op="call_function", target=function)
    return [node for node in nodes if key in (None, node.args[1])]


def erased(program: Program, node: fx.Node) -> None:
    program.module.graph.erase_node(node)


def repeated(program: Program, node: fx.Node) -> None:
    with program.module.graph.inserting_after(node):
        program.module.graph.node_copy(node)


def with_message(program: Program, found: str, **changes: Any) -> Program:
    return replace(program, messages={**program.messages, found: replace(program.messages[found], **changes)})


def keys_swapped(program: Program, function: Any, one: str, other: str) -> None:
    """Two nodes of one kind name each other's message, before and after it alike."""
    (first,), (second,) = uses(program, function, one), uses(program, function, other)
    first.update_arg(1, other)
    second.update_arg(1, one)


def sent_again(program: Program) -> None:
    """The second message holds what the first one does."""
    (first,), (second,) = uses(program, ops.send, "F1.0>2"), uses(program, ops.send, "F1.1>2")
    second.update_arg(2, first.args[2])


def other_microbatch(program: Program) -> None:
    node_of(program, "F1_0").update_arg(0, node_of(program, "microbatch_1"))


def received_before_it_is_posted(program: Program) -> None:
    node_of(program, "receive").append(uses(program, ops.post, "F0.0>1")[0])


def no_module(program: Program) -> None:
    del program.module._modules["F1"]


def other_action(program: Program) -> None:
    node_of(program, "F1_0").meta["action"] = Action(F, 2, 0)


def no_action(program: Program) -> None:
    del node_of(program, "F1_0").meta["action"]


def phase_call(program: Program, name: str) -> PhaseCall:
    module = program.module.get_submodule(name)
    assert isinstance(module, PhaseCall)
    return module


def a_result_is_lost(program: Program) -> None:
    call = phase_call(program, "F1")
    call.returned = (*call.returned[:-1], call.returned[-1][1:])


def a_value_is_not_asked_for(program: Program) -> None:
    call = phase_call(program, "W1")
    call.arguments = call.arguments[1:]
    for node in program.module.graph.find_nodes(op="call_module", target="W1"):
        node.args = (node.args[0], *node.args[2:])


def renamed(program: Program, kinds: dict[str, Kind]) -> None:
    """Phases of other kinds than they were."""
    for name, kind in kinds.items():
        call = phase_call(program, name)
        call.phase = replace(call.phase, kind=kind)
        for node in program.module.graph.find_nodes(op="call_module", target=name):
            node.meta["action"] = replace(node.meta["action"], kind=kind)


def prologue_of_another_microbatch(program: Program) -> None:
    node = node_of(program, "P1_0")
    node.update_arg(0, node_of(program, "microbatch_1"))
    node.meta["action"] = Action(Kind.P, 1, 1)


def joined_without_values(program: Program) -> None:
    node = uses(program, join)[0]
    node.args = node.args[:-1]


def summed_before_a_w(program: Program) -> None:
    begin = uses(program, ops.reduce)[0]
    first = program.module.graph.find_nodes(op="call_module", target="F1")[0]
    first.prepend(begin.args[2])
    first.prepend(begin)


def collected_after_a_phase(program: Program) -> None:
    program.module.graph.output_node().prepend(uses(program, ops.gathered)[0])


def order_turned(program: Program) -> None:
    """The last W, which nothing reads, comes before another one."""
    *_, before, last = (
        node for node in program.module.graph.nodes if node.meta.get("action", Action(F, 0, 0)).kind is W
    )
    before.prepend(last)


def losses_swapped(program: Program) -> None:
    output = program.module.graph.output_node()
    first, second, *rest = list(output.args[0])  # type: ignore[arg-type]
    output.args = ((second, first, *rest),)


def loss_of_the_batch_is_lost(program: Program) -> None:
    output = program.module.graph.output_node()
    output.args = (output.args[0][:-1],)  # type: ignore[index]


def released_too_early(program: Program) -> None:
    release = uses(program, ops.release)[-1]
    uses(program, ops.send, str(release.args[1]))[0].append(release)


def as_the_loss(program: Program, key: str) -> Program:
    (_, layout), *_ = program.chain.summary
    return with_message(program, key, layouts=(layout,))


Mutation = Callable[[Program], Program | None]


def another_transport(program: Program) -> None:
    uses(program, ops.post)[0].update_arg(0, node_of(program, "microbatch_0"))


def no_weights(program: Program) -> None:
    """No microbatch runs its W."""
    for node in program.module.graph.find_nodes(op="call_module", target="W1"):
        erased(program, node)


def two_forwards_turned(program: Program) -> None:
    node_of(program, "F0_0").prepend(node_of(program, "F0_1"))


def sum_before_the_last_w(program: Program) -> None:
    """A stage's sum of a shared gradient is known, and sent, while a call adds to it."""
    node_of(program, "W0p0_3").prepend(node_of(program, "sum_0_0"))


def total_before_it_is_summed(program: Program) -> None:
    total = next(node for node in program.module.graph.nodes if str(node.target).startswith("total_"))
    uses(program, ops.reduced)[0].prepend(total)


def summary_turned(program: Program) -> None:
    node = next(node for node in program.module.graph.nodes if node.target == "summary")
    node.args = node.args[::-1]


def another_tensor_is_summed(program: Program) -> None:
    module = program.module.get_submodule("gradients_0")
    module.name = "another"  # type: ignore[assignment]


def another_loss_is_passed_on(program: Program) -> None:
    node = uses(program, ops.send, "loss>1")[0]
    node.update_arg(2, (node_of(program, "F2_0").next,))


def of_no_microbatch(program: Program) -> None:
    node_of(program, "F1_3").meta["action"] = Action(F, 1, 4)


BROKEN: list[tuple[Callable[..., Any], Callable[[], Compiled], int, Mutation]] = [
    (program_rules.program_is_in_order, plain, 1, no_module),
    (program_rules.program_is_in_order, plain, 1, lambda p: node_of(p, "receive").prepend(node_of(p, "F1_0"))),
    (program_rules.calls_are_actions, plain, 1, other_action),
    (program_rules.calls_are_actions, plain, 1, no_action),
    (program_rules.calls_are_actions, plain, 1, of_no_microbatch),
    (program_rules.transports_are_passed, plain, 1, another_transport),
    (program_rules.messages_are_the_ranks, plain, 1, lambda p: replace(p, rank=2)),
    (program_rules.messages_are_the_ranks, plain, 1, lambda p: with_message(p, "F0.0>1", key="F0.1>1")),
    (program_rules.messages_are_the_ranks, plain, 1, lambda p: with_message(p, "F0.0>1", target=0)),
    (program_rules.messages_are_the_ranks, plain, 1, lambda p: with_message(p, "F0.0>1", names=())),
    (program_rules.messages_are_the_ranks, plain, 1, lambda p: replace(p, messages={})),
    (program_rules.messages_are_handled_once, plain, 1, lambda p: erased(p, uses(p, ops.post)[0])),
    (program_rules.messages_are_handled_once, plain, 1, lambda p: repeated(p, uses(p, ops.post)[0])),
    (program_rules.messages_are_handled_once, plain, 1, lambda p: repeated(p, uses(p, ops.receive)[0])),
    (program_rules.messages_are_handled_once, plain, 1, lambda p: repeated(p, uses(p, ops.send)[0])),
    (program_rules.messages_are_handled_once, plain, 1, lambda p: repeated(p, uses(p, ops.release)[0])),
    (program_rules.messages_are_handled_once, plain, 1, received_before_it_is_posted),
    (program_rules.messages_hold_their_values, plain, 1, sent_again),
    (program_rules.messages_hold_their_values, plain, 2, another_loss_is_passed_on),
    (program_rules.messages_fit_their_phases, plain, 1, lambda p: as_the_loss(p, "F0.0>1")),
    (program_rules.messages_fit_their_phases, plain, 1, lambda p: as_the_loss(p, "B1.0>0")),
    (
        program_rules.calls_get_their_arguments,
        plain,
        1,
        lambda p: keys_swapped(p, ops.receive, "F0.0>1", "F0.1>1"),
    ),
    (program_rules.calls_get_their_arguments, plain, 1, other_microbatch),
    (program_rules.calls_pack_their_phase, plain, 1, a_result_is_lost),
    (program_rules.calls_pack_their_phase, plain, 1, a_value_is_not_asked_for),
    (program_rules.what_is_made_is_read, plain, 1, no_weights),
    (program_rules.buffers_are_written_in_turn, plain, 0, two_forwards_turned),
    (program_rules.sums_are_whole, tied, 0, sum_before_the_last_w),
    (program_rules.sums_are_whole, tied, 0, total_before_it_is_summed),
    (program_rules.summaries_are_of_all_microbatches, plain, 2, summary_turned),
    (program_rules.buckets_are_awaited, summed, 1, another_tensor_is_summed),
    (program_rules.actions_come_in_turn, plain, 1, lambda p: renamed(p, {"B1": W, "W1": B})),
    (program_rules.prologues_run_once, cast, 1, lambda p: repeated(p, node_of(p, "P1_0"))),
    (program_rules.prologues_run_once, cast, 1, prologue_of_another_microbatch),
    (program_rules.microbatches_are_alike, plain, 1, lambda p: erased(p, node_of(p, "W1_3"))),
    (program_rules.microbatches_are_alike, plain, 1, lambda p: repeated(p, node_of(p, "W1_3"))),
    (program_rules.calls_beside_are_joined, overlapped, 1, lambda p: erased(p, uses(p, join)[0])),
    (program_rules.calls_beside_are_joined, overlapped, 1, joined_without_values),
    (program_rules.buckets_are_awaited, summed, 1, lambda p: erased(p, uses(p, ops.reduced)[0])),
    (program_rules.buckets_are_awaited, summed, 1, lambda p: repeated(p, uses(p, ops.reduce)[0])),
    (
        program_rules.buckets_are_awaited,
        summed,
        1,
        lambda p: replace(p, buckets=(*p.buckets, replace(p.buckets[0], key="lost"))),
    ),
    (program_rules.buckets_are_whole, summed, 1, summed_before_a_w),
    (program_rules.buckets_are_whole, summed, 1, collected_after_a_phase),
    (program_rules.verdict_ends_the_prefix, validated, 1, lambda p: replace(p, verdict=(0, 0))),
    (
        program_rules.verdict_ends_the_prefix,
        validated,
        1,
        lambda p: replace(p, verdict=(p.verdict[0], len(p.module.graph.nodes))),
    ),
    (program_rules.program_returns_its_results, plain, 2, losses_swapped),
    (program_rules.program_returns_its_results, plain, 1, loss_of_the_batch_is_lost),
    (program_rules.actions_are_the_schedules, plain, 1, order_turned),
    (program_rules.messages_are_released_as_planned, plain, 1, lambda p: erased(p, uses(p, ops.release)[0])),
    (program_rules.messages_are_released_as_planned, plain, 1, released_too_early),
]


@pytest.mark.parametrize(("rule", "make", "rank", "mutation"), BROKEN)
def test_broken_programs_are_refused(
    rule: Callable[..., Any], make: Callable[[], Compiled], rank: int, mutation: Mutation
) -> None:
    pipe = make()
    program = pipe.programs[rank]
    verify(program, after="generate", given=pipe.schedule)
    broken = mutation(program) or program
    with pytest.raises(BrokenGraph, match="a pass of mine gave a graph that breaks") as caught:
        verify((broken,), after="a pass of mine", given=pipe.schedule)
    assert (caught.value.after, caught.value.rule) == ("a pass of mine", rule.__name__)
    assert str(rule.__doc__).rstrip(".") in str(caught.value)


def test_another_schedule_is_missed() -> None:
    other = rescheduled(pipeline(), 4, "gpipe").schedule
    with pytest.raises(BrokenGraph, match=r"generate gave .* actions_are_the_schedules .*expected F0\.3; found B0\.0"):
        verify(plain().programs, after="generate", given=other)


def test_every_rule_is_broken() -> None:
    tables = (RULES["a program"], RULES["a program beside its schedule"])
    assert {rule for rule, *_ in BROKEN} == {rule for rules in tables for rule in rules}
