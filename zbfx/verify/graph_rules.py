"""The rules of what passes give: joint graphs, with stages, with phases, and the stages that are extracted."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from zbfx._torch import schema_of
from zbfx.errors import listed
from zbfx.graphs import LAST, Joint, Phase, Placed, Port, Role, Split, Stage
from zbfx.passes.extract import identifier
from zbfx.passes.nodes import expression, is_random, storage_owner, tensors
from zbfx.plan import Kind
from zbfx.verify.problems import Problem, Problems, RuleTable, alike, distinct, each, equal, in_order, outputs_of

PHASES = (Kind.P, Kind.F, Kind.B, Kind.W)
UNCHANGING = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
INPUTS = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT, Role.INPUT, Role.LOSS_GRADIENT)
OUTPUTS = (Role.LOSS, Role.COUNT, Role.METRIC, Role.OUTPUT, Role.GRADIENT, Role.BUFFER_UPDATE)
SOURCES = {Role.GRADIENT: Role.PARAMETER, Role.BUFFER_UPDATE: Role.BUFFER}


def shape(value: Tensor) -> tuple[Any, ...]:
    """A fake tensor's sizes, numbers or expressions."""
    return tuple(map(expression, value.shape))


def layout(value: object) -> list[tuple[object, ...]]:
    """Shape, strides and dtype of each tensor of a fake value."""
    return [(shape(tensor), tuple(map(expression, tensor.stride())), tensor.dtype) for tensor in tensors(value)]


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


# The graph of a phase, and how it is called.


def arguments(phase: Phase) -> list[fx.Node]:
    return phase.module.graph.find_nodes(op="placeholder")


def sums(phase: Phase) -> list[fx.Node]:
    """The arguments that gradients are added into."""
    start = len(phase.ports) + len(phase.values)
    return arguments(phase)[start : start + len(phase.gradients)]


def crossing(phase: Phase) -> Iterator[tuple[str, fx.Node]]:
    """The values that a phase reads and those that it makes, by name."""
    yield from zip(phase.values, arguments(phase)[len(phase.ports) :], strict=False)
    yield from zip(phase.results, outputs_of(phase.module.graph), strict=False)


def phase_is_in_order(phase: Phase) -> Problems:
    """Names differ, nodes come after what they read, and all but arguments and results call functions."""
    return in_order(phase.name, phase.module.graph, "call_function")


def arguments_are_named(phase: Phase) -> Problems:
    """Arguments are ports, values, a sum for each gradient and, if it is random, a seed: each by its name."""
    names = [*(port.name for port in phase.ports), *phase.values, *(f"grad_{name}" for name in phase.gradients)]
    names += ["seed"] * phase.is_random
    found = [str(node.target) for node in arguments(phase)]
    yield from equal(f"how many arguments {phase.name} has", len(names), len(found))
    yield from distinct(f"the arguments of {phase.name}", found)
    for name, target in zip(names, found, strict=True):
        if identifier(name) not in (target, re.sub(r"_\d+$", "", target)):
            yield Problem(f"an argument of {phase.name}", name, target)


def results_are_returned(phase: Phase) -> Problems:
    """It returns its results, each once, and then, if it is an F, what is for the user; the loss is a scalar, or a row
    of several."""
    returned = outputs_of(phase.module.graph)
    yield from equal(f"how many values {phase.name} returns", len(phase.returned), len(returned))
    yield from distinct(f"the results of {phase.name}", phase.returned)
    for port, node in zip(phase.last, returned[len(phase.results) :], strict=False):
        is_loss = port.role is Role.LOSS
        yield from equal(f"the phase that returns the {port}", Kind.F, phase.kind)
        yield from equal(f"the {port} of {phase.name}", True, not is_loss or node.meta["val"].ndim < 2)


def gradients_and_updates_are_written(phase: Phase) -> Problems:
    """It writes into the sums of its gradients and the buffers that it updates, and into nothing else."""
    names = {node: name for name, node in zip(phase.gradients, sums(phase), strict=True)}
    names |= {
        node: port.name for port, node in zip(phase.ports, arguments(phase), strict=False) if port.role is Role.BUFFER
    }
    written = {storage_owner(target) for node in phase.module.graph.nodes for target in written_by(node)}
    return alike(f"what {phase.name} writes", {*phase.gradients, *phase.updates}, {names.get(n, n) for n in written})


def sums_are_like_parameters(phase: Phase) -> Problems:
    """A gradient is summed in a tensor of its parameter's shape."""
    read = dict(zip(phase.ports, arguments(phase), strict=False))
    for name, node in zip(phase.gradients, sums(phase), strict=True):
        parameter = read.get(Port(Role.PARAMETER, name), node)
        expected, found = shape(parameter.meta["val"]), shape(node.meta["val"])
        yield from equal(f"the sum of {name}'s gradient in {phase.name}", expected, found)


def phases_are_four(stage: Stage) -> Problems:
    """A stage has a P, an F, a B and a W."""
    found = [(kind, phase.kind, phase.stage) for kind, phase in stage.phases.items()]
    return alike(f"the phases of stage {stage.index}", [(kind, kind, stage.index) for kind in PHASES], found)


def records_cover_the_values(stage: Stage) -> Problems:
    """A stage knows example, storage and origin of all that its phases read and make, and of nothing else."""
    names = {name for phase in stage.phases.values() for name in (*phase.values, *phase.results)}
    for title, record in (("examples", stage.examples), ("storages", stage.storages), ("origins", stage.origins)):
        yield from alike(f"{title} of stage {stage.index}", names, record)


def values_are_like_their_examples(stage: Stage) -> Problems:
    """What phases read and make has the shape, the strides and the dtype of its example."""
    for phase in stage.phases.values():
        for name, node in crossing(phase):
            yield from equal(f"{name} in {phase.name}", layout(stage.examples[name]), layout(node.meta["val"]))


def values_come_before_their_readers(stage: Stage) -> Problems:
    """A phase reads values of earlier phases of its stage, of Fs of earlier stages, and, if it is a B or W, of Bs of
    later ones and of any F."""
    for kind, phase in stage.phases.items():
        for name in phase.values:
            source, maker = stage.origins[name]
            if source == stage.index:
                there = PHASES.index(maker) < PHASES.index(kind)
            elif kind is Kind.F:
                there = maker is Kind.F and source < stage.index
            else:
                there = maker is Kind.F or (maker is Kind.B and source > stage.index)
            if not there:
                yield Problem(f"{name} in {phase.name}", "a value that is there by then", f"one of {maker}{source}")


def prologues_are_the_same_for_every_microbatch(stage: Stage) -> Problems:
    """A prologue reads parameters, constants, and buffers that no phase of the stage writes; it adds to no gradient,
    draws no random numbers and returns nothing for the user."""
    phase = stage.phases[Kind.P]
    written = {name for other in stage.phases.values() for name in other.updates}
    yield from (
        Problem(f"an argument of {phase.name}", f"a {listed(UNCHANGING)} that is not written", port)
        for port in phase.ports
        if port.role not in UNCHANGING or port.name in written
    )
    yield from alike(f"other arguments of {phase.name}", (), (*phase.values, *phase.gradients))
    yield from alike(f"what {phase.name} returns for the user", (), phase.last)
    yield from equal(f"random numbers in {phase.name}", False, phase.is_random)


# All stages together.

Stages = tuple[Stage, ...]


def phases_of(stages: Stages) -> list[Phase]:
    return [phase for stage in stages for phase in stage.phases.values()]


def stages_are_numbered(stages: Stages) -> Problems:
    """Stages come in their order along the model."""
    yield from equal("the stages", [*range(len(stages))], [stage.index for stage in stages])
    yield from equal("their starts", sorted(stage.start for stage in stages), [stage.start for stage in stages])


def values_are_made_once_and_read(stages: Stages) -> Problems:
    """What a phase reads is made once, by the phase that its stage knows as the origin; what is made is read."""
    read = {(name, *stage.origins[name]) for stage in stages for p in stage.phases.values() for name in p.values}
    return alike("the values", read, [(name, p.stage, p.kind) for p in phases_of(stages) for name in p.results])


def makers_and_readers_agree(stages: Stages) -> Problems:
    """Stages that know a value agree on its shape, its strides, its dtype and its storage."""
    for stage in stages:
        for name, (source, _) in stage.origins.items():
            of_maker, of_reader = ((layout(s.examples[name]), s.storages[name]) for s in (stages[source], stage))
            yield from equal(f"{name} of stage {source} in stage {stage.index}", of_maker, of_reader)


def loss_and_updates_come_once(stages: Stages) -> Problems:
    """One phase has the loss, unless outputs alone are wanted; one at most returns a metric or an output, and one at
    most writes a buffer."""
    losses = sum(phase.has_loss for phase in phases_of(stages))
    if losses or not any(port.role is Role.OUTPUT for phase in phases_of(stages) for port in phase.last):
        yield from equal("phases with the loss", 1, losses)
    yield from distinct("what is for the user", (port for phase in phases_of(stages) for port in phase.last))
    yield from distinct("the updates", (name for phase in phases_of(stages) for name in phase.updates))


def gradients_and_updates_are_all_made(given: Split, stages: Stages) -> Problems:
    """Phases make the gradients and write the buffers that the split puts there: W what B leaves open."""
    due = defaultdict[Role, set[tuple[int, Kind, str]]](set)
    for value, port in zip(given.placed.joint.output_values, given.placed.joint.outputs, strict=True):
        due[port.role].add((given.placed.stage_of.get(value, 0), given.phase_of.get(value, Kind.F), port.name))
    wanted = [port for port in given.placed.joint.outputs if port.role in LAST]
    yield from alike("what is for the user", wanted, (port for phase in phases_of(stages) for port in phase.last))
    gradients = [(phase.stage, phase.kind, name) for phase in phases_of(stages) for name in phase.gradients]
    updates = [(phase.stage, phase.kind, name) for phase in phases_of(stages) for name in phase.updates]
    yield from alike("the gradients", due[Role.GRADIENT], gradients)
    yield from alike("the updates", due[Role.BUFFER_UPDATE], updates)


def sums_have_their_dtypes(given: Split, stages: Stages) -> Problems:
    """A gradient is summed in the dtype that the joint graph names for it, which is its parameter's unless it does."""
    joint = given.placed.joint
    own = {port.name: node.meta["val"].dtype for node, port in joint.input_ports().items()}
    for phase in phases_of(stages):
        for name, value in phase.sums.items():
            expected = joint.grad_dtypes.get(name, own[name])
            yield from equal(f"the sum of {name}'s gradient in {phase.name}", expected, value.dtype)


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
PHASE: RuleTable = (
    phase_is_in_order,
    arguments_are_named,
    results_are_returned,
    gradients_and_updates_are_written,
    sums_are_like_parameters,
)
STAGE: RuleTable = (
    phases_are_four,
    records_cover_the_values,
    values_are_like_their_examples,
    values_come_before_their_readers,
    prologues_are_the_same_for_every_microbatch,
)
STAGES: RuleTable = (
    stages_are_numbered,
    values_are_made_once_and_read,
    makers_and_readers_agree,
    loss_and_updates_come_once,
)
STAGES_OF_SPLIT: RuleTable = (gradients_and_updates_are_all_made, sums_have_their_dtypes)
