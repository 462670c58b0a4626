"""The rules of stages: of the graph of each phase, of each stage, and of all stages together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from zbfx.errors import listed
from zbfx.graphs import LAST, Phase, Port, Role, Split, Stage
from zbfx.passes.extract import identifier
from zbfx.passes.nodes import expression, storage_owner, tensors
from zbfx.plan import Kind
from zbfx.verify.joint_rules import UNCHANGING, shape, written_by
from zbfx.verify.problems import Problem, Problems, RuleTable, alike, distinct, equal, in_order, outputs_of

PHASES = (Kind.P, Kind.F, Kind.B, Kind.W)


def layout(value: object) -> list[tuple[object, ...]]:
    """Shape, strides and dtype of each tensor of a fake value."""
    return [(shape(tensor), tuple(map(expression, tensor.stride())), tensor.dtype) for tensor in tensors(value)]


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
    """Each value that is read is made once, by the phase that its reader's stage knows as the origin. Each value
    that is made is read."""
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
