"""The rules of the graph of a whole model: as it was traced, with a stage for each node, and with a phase for each."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from zbfx._torch.operators import schema_of
from zbfx.errors import listed
from zbfx.graphs import Joint, Placed, Port, Role, Split
from zbfx.passes.nodes import expression, is_random
from zbfx.plan import Kind
from zbfx.verify.problems import Problem, Problems, RuleTable, alike, distinct, each, equal, in_order

UNCHANGING = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
INPUTS = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT, Role.INPUT, Role.LOSS_GRADIENT)
OUTPUTS = (Role.LOSS, Role.COUNT, Role.METRIC, Role.OUTPUT, Role.GRADIENT, Role.BUFFER_UPDATE)
SOURCES = {Role.GRADIENT: Role.PARAMETER, Role.BUFFER_UPDATE: Role.BUFFER}


def shape(value: Tensor) -> tuple[Any, ...]:
    """A fake tensor's sizes, numbers or expressions."""
    return tuple(map(expression, value.shape))


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes into."""
    schema = schema_of(node.target)
    if schema is None or not schema.is_mutable:
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    written = (given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [value for value in written if isinstance(value, fx.Node)]


# One graph of forward, loss and backward.


def nodes_are_in_order(joint: Joint) -> Problems:
    """Names differ, nodes come after what they read, and all but inputs and outputs call functions."""
    return in_order("the joint graph", joint.graph, "call_function")


def ports_are_complete(joint: Joint) -> Problems:
    """There is a port for each input and for each output."""
    yield from equal("how many inputs there are", len(joint.inputs), len(joint.placeholders))
    yield from equal("how many outputs there are", len(joint.outputs), len(joint.output_values))


def ports_have_their_roles(joint: Joint) -> Problems:
    """Inputs and outputs have roles of theirs. There is one loss, but in a graph that only makes outputs, one gradient
    that a backward begins with, and one update of a buffer."""
    for ports, roles in ((joint.inputs, INPUTS), (joint.outputs, OUTPUTS)):
        yield from (Problem(port, f"a {listed(roles)}", port.role) for port in ports if port.role not in roles)
    forward_only = joint.returned is not None and not any(port.role is Role.LOSS for port in joint.outputs)
    if not forward_only:
        yield from equal("loss gradients", 1, sum(port.role is Role.LOSS_GRADIENT for port in joint.inputs))
        yield from equal("losses", 1, sum(port.role is Role.LOSS for port in joint.outputs))
    yield from distinct("the outputs", (port for port in joint.outputs if port.role is Role.BUFFER_UPDATE))


def outputs_belong_to_inputs(joint: Joint) -> Problems:
    """A gradient is that of a parameter, and an update that of a buffer, which are inputs."""
    due = {Port(SOURCES[port.role], port.name) for port in joint.outputs if port.role in SOURCES}
    return alike("the inputs", due - {*joint.inputs}, ())


def constants_are_held(joint: Joint) -> Problems:
    """A tensor is held for each input that is a constant, and for no other."""
    return alike("the constants", (p.name for p in joint.inputs if p.role is Role.CONSTANT), joint.constants)


def nodes_are_described(joint: Joint) -> Problems:
    """Each input and each value that is read has a fake value, and each call says whether it is backward."""
    for node in joint.graph.nodes:
        if (node.users or node.op == "placeholder") and node.meta.get("val") is None:
            yield Problem(node, "meta['val']", None)
        if node.op == "call_function" and not isinstance(node.meta.get("is_backward"), bool):
            yield Problem(node, "meta['is_backward'], True or False", node.meta.get("is_backward"))


def nothing_is_written(joint: Joint) -> Problems:
    """The graph is functional."""
    return (Problem(n, "an op that writes into no argument", n.target) for n in joint.graph.nodes if written_by(n))


def outputs_fit(joint: Joint) -> Problems:
    """The loss has the shape of what its backward begins with, a gradient has its parameter's shape, and an update has
    its buffer's dtype."""
    inputs = {port: node.meta["val"] for node, port in joint.input_ports().items()}
    for value, port in zip(joint.output_values, joint.outputs, strict=True):
        found = value.meta["val"]
        if port.role is Role.LOSS:
            first = next(value for port, value in inputs.items() if port.role is Role.LOSS_GRADIENT)
            yield from equal(port, shape(first), shape(found))
        elif port.role is Role.GRADIENT:
            yield from equal(port, shape(inputs[Port(Role.PARAMETER, port.name)]), shape(found))
        if port.role in SOURCES:
            yield from equal(port, inputs[Port(SOURCES[port.role], port.name)].dtype, found.dtype)


def ports_are_kept(given: Joint, joint: Joint) -> Problems:
    """Inputs stay in their order, and no output is lost or new."""
    yield from equal("the inputs", given.inputs, joint.inputs)
    yield from alike("the outputs", set(given.outputs), set(joint.outputs))


# With stages.


def outputs_are_computed(placed: Placed) -> Problems:
    """Each output is the result of a call, and none is a count."""
    for value, port in zip(placed.joint.output_values, placed.joint.outputs, strict=True):
        yield from equal(port, "call_function", value.op)
        yield from equal(port, False, port.role is Role.COUNT)


def line_is_in_order(placed: Placed) -> Problems:
    """Positions count the forward nodes in graph order, and what has a position has a stage."""
    order = {node: k for k, node in enumerate(placed.joint.graph.nodes) if node.op == "call_function"}
    forward, position = placed.line.forward, placed.line.position
    yield from alike("nodes with a position", (), (node for node in position if node not in order))
    yield from each(equal(f"the position of {node}", k, position.get(node)) for k, node in enumerate(forward))
    yield from (Problem(b, f"a place after {a}", "one before") for a, b in pairwise(forward) if order[a] > order[b])
    yield from alike("nodes with a stage", position, placed.stage_of)


def gradients_follow_from_the_loss(placed: Placed) -> Problems:
    """Gradients are what depends on the loss gradient, and no part of the forward."""
    found = {node for node, port in placed.joint.input_ports().items() if port.role is Role.LOSS_GRADIENT}
    for node in placed.joint.graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    yield from alike("the gradients", found, placed.line.gradients)
    yield from alike("the forward's gradients", (), found.intersection(placed.line.forward))


def stages_lie_along_the_model(placed: Placed) -> Problems:
    """Stages count up along the forward, and a backward node is in the stage of what it differentiates."""
    forward, stage_of = placed.line.forward, placed.stage_of
    for node, stage in stage_of.items():
        yield from equal(f"the stage of {node}", stage_of[forward[placed.line.position[node]]], stage)
        if not 0 <= stage < placed.stage_count:
            yield Problem(f"the stage of {node}", f"one of {placed.stage_count}", stage)
    for before, node in pairwise(forward):
        if stage_of[before] > stage_of[node]:
            yield Problem(f"the stage of {node}", f"{stage_of[before]} or more, as of {before}", stage_of[node])


def values_reach_their_readers(placed: Placed) -> Problems:
    """Forward reads forward of no later stage; the backward reads no gradient of an earlier one."""
    forward, stage_of = set(placed.line.forward), placed.stage_of
    for node, here in stage_of.items():
        for source in node.all_input_nodes:
            there = stage_of.get(source, here)
            if source in forward:
                arrives = there <= here or node not in forward
            else:
                arrives = (there >= here and node not in forward) or source not in stage_of
            if not arrives:
                found = f"{source} of stage {there}, at {node.meta.get('stack_trace') or 'an unknown line'}"
                yield Problem(f"{node} of stage {here}", "values that come to it", found)


def stageless_nodes_need_no_stage(placed: Placed) -> Problems:
    """What has no stage is made of inputs alone, and not at random."""
    for node in placed.joint.graph.nodes:
        if node.op == "call_function" and node not in placed.stage_of:
            yield from alike(f"what {node} reads", (), (n for n in node.all_input_nodes if n in placed.stage_of))
            yield from equal(f"random numbers in {node}", False, is_random(node))


# With phases.


def phases_cover_the_stages(split: Split) -> Problems:
    """What has a stage has a phase: P or F if it is forward, else B or W."""
    forward = set(split.placed.line.forward)
    yield from alike("nodes with a phase", split.placed.stage_of, split.phase_of)
    for node, kind in split.phase_of.items():
        if kind not in ((Kind.P, Kind.F) if node in forward else (Kind.B, Kind.W)):
            yield Problem(node, "P or F" if node in forward else "B or W", kind)


def prologues_read_no_microbatch(split: Split) -> Problems:
    """What prologues make depends on inputs that no microbatch changes, and on nothing else; it is not random."""
    joint = split.placed.joint
    ports, written = joint.input_ports(), {p.name for p in joint.outputs if p.role is Role.BUFFER_UPDATE}
    pending = [*split.kept, *(node for node, kind in split.phase_of.items() if kind is Kind.P)]
    seen = set(pending)
    for node in pending:  # grows
        if node in ports and (ports[node].role not in UNCHANGING or ports[node].name in written):
            yield Problem("what prologues read", f"a {listed(UNCHANGING)} that is not written", ports[node])
        if split.phase_of.get(node, Kind.P) is not Kind.P or is_random(node):
            yield Problem(
                f"{node}, in a prologue", "no stage's own, and not random", split.phase_of.get(node, "random")
            )
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(new)
        pending += new


def weights_come_last(split: Split) -> Problems:
    """What a W makes is read by the W of its stage alone."""
    stage_of = split.placed.stage_of
    for node, kind in split.phase_of.items():
        for source in node.all_input_nodes:
            if split.phase_of.get(source) is Kind.W:
                yield from equal(f"{node}, which reads {source}", f"W{stage_of[source]}", f"{kind}{stage_of[node]}")


def buffers_are_written_in_order(split: Split) -> Problems:
    """No W writes a buffer: Fs and Bs alone run microbatch after microbatch."""
    placed = split.placed
    for value, port in zip(placed.joint.output_values, placed.joint.outputs, strict=True):
        if port.role is Role.BUFFER_UPDATE and split.phase_of.get(value) is Kind.W:
            yield Problem(port, "an F or a B", Kind.W)


def nothing_moves(given: Split, split: Split) -> Problems:
    """Recomputation adds copies, prologues take what is forward: everything else stays in its stage and its phase."""
    before, after = (
        {node.name: (one.placed.stage_of[node], kind) for node, kind in one.phase_of.items()} for one in (given, split)
    )
    for name, (stage, kind) in before.items():
        allowed = [(stage, kind), (stage, Kind.P)] if kind is Kind.F else [(stage, kind)]
        if after.get(name) not in allowed:
            yield Problem(name, f"{kind}{stage}", after.get(name))


JOINT: RuleTable = (
    nodes_are_in_order,
    ports_are_complete,
    ports_have_their_roles,
    outputs_belong_to_inputs,
    constants_are_held,
    nodes_are_described,
    nothing_is_written,
    outputs_fit,
)
JOINT_KEPT: RuleTable = (ports_are_kept,)
PLACED: RuleTable = (
    outputs_are_computed,
    line_is_in_order,
    gradients_follow_from_the_loss,
    stages_lie_along_the_model,
    values_reach_their_readers,
    stageless_nodes_need_no_stage,
)
SPLIT: RuleTable = (
    phases_cover_the_stages,
    prologues_read_no_microbatch,
    weights_come_last,
    buffers_are_written_in_order,
)
SPLIT_KEPT: RuleTable = (nothing_moves,)
