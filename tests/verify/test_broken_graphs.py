"""Every rule of joint graphs, splits and stages can be broken: a mutation of a good graph, which is refused by name.

Run: pytest tests/verify/test_broken_graphs.py (CPU, one process; runs nothing).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tests.support.models import mixed
from tests.support.reference import placed
from zbfx.errors import BrokenGraph, ZbfxError
from zbfx.graphs import Joint, Phase, Port, Role, Split, Stage, copy_graph
from zbfx.passes.extract import extract
from zbfx.passes.recompute import copy_split
from zbfx.passes.split import split
from zbfx.plan import Kind
from zbfx.verify import RULES, joint_rules, stage_rules, verified, verify

aten = torch.ops.aten
P, F, B, W = Kind.P, Kind.F, Kind.B, Kind.W

Broken = tuple[Any, Any]  # what a pass gave, and what it took


@functools.cache
def division() -> Split:
    return split(placed(mixed(1), 3))


@functools.cache
def extracted() -> tuple[Stage, ...]:
    return extract(division())


def node_of(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def in_double(node: fx.Node) -> None:
    node.meta["val"] = node.meta["val"].double()


def flat(node: fx.Node) -> None:
    node.meta["val"] = node.meta["val"].flatten()[None]


# Joint graphs. Each mutation gets a copy and may change it.


def a_node_before_what_it_reads(joint: Joint) -> Joint:
    node_of(joint.graph, "addmm").append(node_of(joint.graph, "tanh_1"))
    return joint


def a_method_is_called(joint: Joint) -> Joint:
    with joint.graph.inserting_before(joint.graph.output_node()):
        joint.graph.call_method("tanh", (joint.placeholders[0],))
    return joint


def with_outputs(joint: Joint, values: Sequence[Any]) -> Joint:
    joint.graph.output_node().args = (tuple(values),)
    return joint


def with_port(joint: Joint, role: Role, port: Port) -> Joint:
    """The last output of the role has another port."""
    place = max(k for k, other in enumerate(joint.outputs) if other.role is role)
    return replace(joint, outputs=(*joint.outputs[:place], port, *joint.outputs[place + 1 :]))


def with_value(joint: Joint, role: Role, change: Callable[[Any], Any]) -> Joint:
    """The last output of the role has another fake value."""
    value = [v for v, port in zip(joint.output_values, joint.outputs, strict=True) if port.role is role][-1]
    value.meta["val"] = change(value.meta["val"])
    return joint


def without_meta(joint: Joint, key: str) -> Joint:
    del node_of(joint.graph, "tanh").meta[key]
    return joint


def with_target(joint: Joint, name: str, target: Any) -> Joint:
    node_of(joint.graph, name).target = target
    return joint


def with_inputs_swapped(joint: Joint, one: str, other: str) -> Joint:
    names = {one: other, other: one}
    return replace(joint, inputs=tuple(Port(port.role, names.get(port.name, port.name)) for port in joint.inputs))


OF_JOINTS: list[tuple[Callable[..., Any], Callable[[Joint], Joint]]] = [
    (joint_rules.nodes_are_in_order, a_node_before_what_it_reads),
    (joint_rules.nodes_are_in_order, a_method_is_called),
    (joint_rules.nodes_are_in_order, lambda joint: with_outputs(joint, [*joint.output_values[1:], None])),
    (joint_rules.ports_are_complete, lambda joint: with_outputs(joint, joint.output_values[1:])),
    (joint_rules.ports_have_their_roles, lambda joint: with_port(joint, Role.LOSS, Port(Role.INPUT, "loss"))),
    (joint_rules.ports_have_their_roles, lambda joint: with_port(joint, Role.GRADIENT, Port(Role.LOSS, "loss"))),
    (joint_rules.ports_have_their_roles, lambda joint: with_port(joint, Role.BUFFER_UPDATE, joint.outputs[0])),
    (
        joint_rules.outputs_belong_to_inputs,
        lambda joint: with_port(joint, Role.GRADIENT, Port(Role.GRADIENT, "9.bias")),
    ),
    (joint_rules.constants_are_held, lambda joint: replace(joint, constants={"mask": torch.ones(3)})),
    (joint_rules.nodes_are_described, lambda joint: without_meta(joint, "val")),
    (joint_rules.nodes_are_described, lambda joint: without_meta(joint, "is_backward")),
    (joint_rules.nothing_is_written, lambda joint: with_target(joint, "tanh", aten.tanh_.default)),
    (joint_rules.outputs_fit, lambda joint: with_value(joint, Role.LOSS, lambda loss: loss[None])),
    (joint_rules.outputs_fit, lambda joint: with_value(joint, Role.GRADIENT, torch.Tensor.double)),
    (joint_rules.outputs_fit, lambda joint: with_value(joint, Role.BUFFER_UPDATE, torch.Tensor.double)),
    (joint_rules.outputs_fit, lambda joint: with_inputs_swapped(joint, "3.weight", "3.bias")),
    (joint_rules.ports_are_kept, lambda joint: with_inputs_swapped(joint, "3.bias", "6.bias")),
    (joint_rules.ports_are_kept, lambda joint: with_port(joint, Role.GRADIENT, Port(Role.GRADIENT, "3.bias"))),
]


# Stages and phases of nodes.


def output_that_is_an_input(split: Split) -> Split:
    joint = split.placed.joint
    parameter = next(node for node, port in joint.input_ports().items() if port == Port(Role.PARAMETER, "6.bias"))
    place = joint.outputs.index(Port(Role.GRADIENT, "6.bias"))
    with_outputs(joint, [*joint.output_values[:place], parameter, *joint.output_values[place + 1 :]])
    return split


def with_placed(split: Split, **changes: Any) -> Split:
    return replace(split, placed=replace(split.placed, **changes))


def with_line(split: Split, **changes: Any) -> Split:
    return with_placed(split, line=replace(split.placed.line, **changes))


def without_stage(split: Split, name: str) -> Split:
    node, line = node_of(split.placed.joint.graph, name), split.placed.line
    position = {other: k for other, k in line.position.items() if other is not node}
    stage_of = {other: k for other, k in split.placed.stage_of.items() if other is not node}
    return with_placed(split, line=replace(line, position=position), stage_of=stage_of)


def in_stage(split: Split, name: str, stage: int) -> Split:
    node = node_of(split.placed.joint.graph, name)
    return with_placed(split, stage_of={**split.placed.stage_of, node: stage})


def at_the_position_of(split: Split, name: str, other: str) -> Split:
    """A backward node moves, with its stage, to where another node is."""
    node, there = (node_of(split.placed.joint.graph, one) for one in (name, other))
    position = {**split.placed.line.position, node: split.placed.line.position[there]}
    return in_stage(with_line(split, position=position), name, split.placed.stage_of[there])


def in_phase(split: Split, name: str, kind: Kind) -> Split:
    return replace(split, phase_of={**split.phase_of, node_of(split.placed.joint.graph, name): kind})


def kept(split: Split, name: str) -> Split:
    """A value that each microbatch makes goes to the prologue, with all that it is made of."""
    pending = [node_of(split.placed.joint.graph, name)]
    for node in pending:
        pending += [source for source in node.all_input_nodes if source in split.phase_of]
    return replace(split, kept=frozenset(pending[:1]), phase_of={**split.phase_of, **dict.fromkeys(pending, P)})


def written_in_a_w(split: Split) -> Split:
    joint = split.placed.joint
    value = node_of(joint.graph, "view_1")
    roles = [port.role is Role.BUFFER_UPDATE and "mean" in port.name for port in joint.outputs]
    with_outputs(joint, [value if ours else v for v, ours in zip(joint.output_values, roles, strict=True)])
    return split


def swapped(forward: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    return (forward[1], forward[0], *forward[2:])


OF_SPLITS: list[tuple[Callable[..., Any], Callable[[Split], Split]]] = [
    (joint_rules.outputs_are_computed, output_that_is_an_input),
    (joint_rules.line_is_in_order, lambda split: with_line(split, forward=swapped(split.placed.line.forward))),
    (joint_rules.line_is_in_order, lambda split: with_line(split, position={})),
    (joint_rules.line_is_in_order, lambda split: with_placed(split, stage_of={})),
    (joint_rules.gradients_follow_from_the_loss, lambda split: with_line(split, gradients=frozenset())),
    (joint_rules.stages_lie_along_the_model, lambda split: in_stage(split, "mm_2", 0)),
    (joint_rules.stages_lie_along_the_model, lambda split: in_stage(split, "tanh", 2)),
    (joint_rules.stages_lie_along_the_model, lambda split: with_placed(split, stage_count=2)),
    (
        joint_rules.values_reach_their_readers,
        lambda split: at_the_position_of(split, "native_batch_norm_backward", "mse_loss"),
    ),
    (joint_rules.stageless_nodes_need_no_stage, lambda split: without_stage(split, "mm_2")),
    (joint_rules.phases_cover_the_stages, lambda split: replace(split, phase_of={})),
    (joint_rules.phases_cover_the_stages, lambda split: in_phase(split, "tanh", B)),
    (joint_rules.phases_cover_the_stages, lambda split: in_phase(split, "mm_2", Kind.BW)),
    (joint_rules.prologues_read_no_microbatch, lambda split: in_phase(split, "addmm", P)),
    (joint_rules.prologues_read_no_microbatch, lambda split: kept(split, "tanh")),
    (joint_rules.prologues_read_no_microbatch, lambda split: kept(split, "clone_default_1")),
    (joint_rules.weights_come_last, lambda split: in_phase(split, "mm_2", W)),
    (joint_rules.buffers_are_written_in_order, written_in_a_w),
    (joint_rules.nothing_moves, lambda split: in_phase(split, "sum_2", B)),
]


# Stages.


def with_phase(stages: tuple[Stage, ...], phase: Phase) -> tuple[Stage, ...]:
    stage = stages[phase.stage]
    changed = replace(stage, phases={**stage.phases, phase.kind: phase})
    return (*stages[: phase.stage], changed, *stages[phase.stage + 1 :])


def rewritten(kind: Kind, index: int, change: Callable[[fx.Graph], object]) -> tuple[Stage, ...]:
    """All stages, with another graph for one phase."""
    phase = extracted()[index].phases[kind]
    graph = copy_graph(phase.module.graph)
    change(graph)
    return with_phase(extracted(), replace(phase, module=fx.GraphModule({}, graph, phase.name)))


def changed(kind: Kind, index: int, **changes: Any) -> tuple[Stage, ...]:
    return with_phase(extracted(), replace(extracted()[index].phases[kind], **changes))


def with_record(index: int, **changes: Any) -> tuple[Stage, ...]:
    stages = extracted()
    return (*stages[:index], replace(stages[index], **changes), *stages[index + 1 :])


def with_origin(index: int, name: str, origin: tuple[int, Kind]) -> tuple[Stage, ...]:
    return with_record(index, origins={**extracted()[index].origins, name: origin})


def first_argument_last(graph: fx.Graph) -> None:
    first, *_, last = graph.find_nodes(op="placeholder")
    last.append(first)


def last_result_is_lost(graph: fx.Graph) -> None:
    graph.output_node().args = (graph.output_node().args[0][:-1],)  # type: ignore[index]


def last_write_is_lost(graph: fx.Graph) -> None:
    graph.erase_node([node for node in graph.nodes if joint_rules.written_by(node)][-1])


def a_value_is_written(graph: fx.Graph) -> None:
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.tanh_.default, (node_of(graph, "tanh"),))


def a_node_is_moved_up(graph: fx.Graph) -> None:
    node_of(graph, "addmm").prepend(node_of(graph, "getitem"))


def a_value_of_another_dtype() -> tuple[Stage, ...]:
    stages = rewritten(F, 2, lambda graph: in_double(node_of(graph, "getitem_5")))
    examples = {**stages[2].examples, "getitem_5": stages[2].examples["getitem_5"].double()}
    return (*stages[:2], replace(stages[2], examples=examples))


OF_STAGES: list[tuple[Callable[..., Any], Callable[[], tuple[Stage, ...]]]] = [
    (stage_rules.phase_is_in_order, lambda: rewritten(F, 0, a_node_is_moved_up)),
    (stage_rules.arguments_are_named, lambda: rewritten(F, 1, first_argument_last)),
    (stage_rules.arguments_are_named, lambda: changed(B, 1, values=extracted()[1].phases[B].values[1:])),
    (stage_rules.arguments_are_named, lambda: changed(F, 1, is_random=False)),
    (stage_rules.results_are_returned, lambda: rewritten(F, 1, last_result_is_lost)),
    (stage_rules.results_are_returned, lambda: changed(F, 2, last=())),
    (stage_rules.gradients_and_updates_are_written, lambda: rewritten(F, 0, last_write_is_lost)),
    (stage_rules.gradients_and_updates_are_written, lambda: rewritten(W, 1, last_write_is_lost)),
    (stage_rules.gradients_and_updates_are_written, lambda: rewritten(W, 1, a_value_is_written)),
    (stage_rules.sums_are_like_parameters, lambda: rewritten(B, 0, lambda g: flat(node_of(g, "grad_1_weight")))),
    (stage_rules.phases_are_four, lambda: with_record(1, phases={F: extracted()[1].phases[F]})),
    (stage_rules.phases_are_four, lambda: with_record(1, phases=extracted()[2].phases)),
    (stage_rules.records_cover_the_values, lambda: with_record(1, origins={})),
    (stage_rules.values_are_like_their_examples, lambda: rewritten(B, 1, lambda g: in_double(node_of(g, "tanh")))),
    (stage_rules.values_come_before_their_readers, lambda: with_origin(1, "tanh", (1, W))),
    (stage_rules.values_come_before_their_readers, lambda: with_origin(1, "getitem", (2, F))),
    (stage_rules.values_come_before_their_readers, lambda: with_origin(1, "tanh_backward", (0, B))),
    (stage_rules.prologues_are_the_same_for_every_microbatch, lambda: extract(kept(copy_split(division()), "addmm"))),
    (
        stage_rules.prologues_are_the_same_for_every_microbatch,
        lambda: extract(kept(copy_split(division()), "clone_default_1")),
    ),
    (stage_rules.stages_are_numbered, lambda: extracted()[::-1]),
    (stage_rules.values_are_made_once_and_read, lambda: with_origin(2, "tanh_1", (0, F))),
    (stage_rules.makers_and_readers_agree, a_value_of_another_dtype),
    (
        stage_rules.makers_and_readers_agree,
        lambda: with_record(1, storages=dict.fromkeys(extracted()[1].storages, ("", 0))),
    ),
    (
        stage_rules.loss_and_updates_come_once,
        lambda: with_phase(
            rewritten(F, 2, last_result_is_lost),
            replace(rewritten(F, 2, last_result_is_lost)[2].phases[F], last=()),
        ),
    ),
]


def refused(graph: Any, given: Any, rule: Callable[..., Any]) -> None:
    with pytest.raises(BrokenGraph, match="a pass of mine gave a graph that breaks") as caught:
        verify(graph, after="a pass of mine", given=given)
    assert (caught.value.after, caught.value.rule) == ("a pass of mine", rule.__name__)
    assert str(rule.__doc__).rstrip(".") in str(caught.value)


@pytest.mark.parametrize(("rule", "mutation"), OF_JOINTS)
def test_broken_joint_graphs_are_refused(rule: Callable[..., Any], mutation: Callable[[Joint], Joint]) -> None:
    refused(mutation(copy_split(division()).placed.joint), division().placed.joint, rule)


@pytest.mark.parametrize(("rule", "mutation"), OF_SPLITS)
def test_broken_splits_are_refused(rule: Callable[..., Any], mutation: Callable[[Split], Split]) -> None:
    broken = mutation(copy_split(division()))
    refused(broken, division(), rule)
    if rule in RULES["a placed graph"]:
        refused(broken.placed, division().placed.joint, rule)


@pytest.mark.parametrize(("rule", "mutation"), OF_STAGES)
def test_broken_stages_are_refused(rule: Callable[..., Any], mutation: Callable[[], tuple[Stage, ...]]) -> None:
    refused(mutation(), division(), rule)


def test_a_gradient_that_no_phase_makes_is_missed() -> None:
    due = in_phase(copy_split(division()), "view_1", B)
    refused(extracted(), due, stage_rules.gradients_and_updates_are_all_made)


def test_a_sum_of_another_dtype_than_the_joint_graph_names_is_refused() -> None:
    stages = rewritten(B, 0, lambda graph: in_double(node_of(graph, "grad_1_weight")))
    refused(stages, division(), stage_rules.sums_have_their_dtypes)


def test_a_pass_of_the_users_is_named() -> None:
    def halve_the_loss(joint: Joint) -> Joint:
        return with_value(joint, Role.LOSS, torch.Tensor.half)

    def lose_the_loss(joint: Joint) -> Joint:
        return with_outputs(joint, [value for value in joint.output_values if value.name != "clone_default"])

    verified(halve_the_loss, copy_split(division()).placed.joint)
    with pytest.raises(
        ZbfxError, match=r"^lose_the_loss gave a graph that breaks ports_are_complete .* expected 11; found 10"
    ):
        verified(lose_the_loss, copy_split(division()).placed.joint)


def test_what_they_are_made_from_is_good() -> None:
    verify(division(), after="split", given=copy_split(division()))
    verify(extracted(), after="extract", given=division())


def test_every_rule_is_broken() -> None:
    graphs = (joint_rules.__name__, stage_rules.__name__)
    broken = {rule for rule, _ in (*OF_JOINTS, *OF_SPLITS, *OF_STAGES)} | {
        stage_rules.gradients_and_updates_are_all_made,
        stage_rules.sums_have_their_dtypes,
    }
    assert broken == {rule for rules in RULES.values() for rule in rules if rule.__module__ in graphs}
