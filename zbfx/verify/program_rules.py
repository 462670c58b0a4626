"""The rules of what one rank does."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from zbfx.graphs import Role
from zbfx.plan import Kind, parts
from zbfx.program import ops
from zbfx.program.calls import (
    AddToGradient,
    Gradient,
    Item,
    PartialSum,
    PhaseCall,
    Summary,
)
from zbfx.program.codegen import Program
from zbfx.program.messages import TensorLayout, layout_of
from zbfx.program.streams import Beside, join
from zbfx.schedule.schedule import Schedule
from zbfx.verify.flow import (
    COLLECTED,
    INCOMING,
    OUTGOING,
    SUMMED,
    CallNode,
    Flow,
    called_by,
    carried,
    names_in,
    nodes_that,
    sent,
)
from zbfx.verify.problems import Problem, Problems, RuleTable, alike, distinct, each, equal, in_order, outputs_of
from zbfx.verify.stage_rules import PHASES, crossing


def program_is_in_order(program: Program) -> Problems:
    """Names differ, nodes come after what they read, and what they call is there."""
    return in_order(f"rank {program.rank}", program.module.graph, "call_function", "call_module")


def calls_are_actions(program: Program) -> Problems:
    """A call of a phase is an action of its stage and kind, and of a microbatch that there is; no other call is one."""
    microbatches = range(len(program.module.graph.find_nodes(op="placeholder")) - 1)
    for node in program.module.graph.find_nodes(op="call_module"):
        module, action = called_by(node), node.meta.get("action")
        expected = (module.phase.kind, module.phase.stage) if isinstance(module, PhaseCall) else None
        yield from equal(f"the action of {node}", expected, action and (action.kind, action.stage))
        if action and action.microbatch not in microbatches:
            yield Problem(f"the microbatch of {node}", f"one of {len(microbatches)}", action.microbatch)


def messages_are_the_ranks(flow: Flow) -> Problems:
    """A program sends messages from its rank and receives messages to it: all that it knows, by their keys."""
    yield from alike("the messages", flow.program.messages, flow.messages)
    for key, message in flow.program.messages.items():
        end = message.target if flow.messages[key][0].target in INCOMING else message.source
        yield from equal(f"message {key}", (key, flow.program.rank), (message.key, end))
        yield from equal(f"how many layouts {key} has", len(message.names), len(message.layouts))


def messages_are_handled_once(flow: Flow) -> Problems:
    """A message is posted, then received; or it is sent, then released, or left to the end of the step."""
    for key, nodes in flow.messages.items():
        if [node.target for node in nodes] not in (INCOMING, OUTGOING, OUTGOING[:1]):
            found = ", ".join(node.target.__name__ for node in nodes)  # type: ignore[union-attr]
            yield Problem(f"message {key}", "post, receive or send, release", found)


def transports_are_passed(flow: Flow) -> Problems:
    """What moves messages or buckets gets the program's transport."""
    for node in each((*flow.messages.values(), *flow.buckets.values())):
        yield from equal(f"the transport of {node}", flow.transport, node.args[0])


def messages_hold_their_values(flow: Flow) -> Problems:
    """An action sends the values that its message names, of its own microbatch. A message along the chain has values of
    the message before, or values that arise here."""
    for key, (node, *_) in flow.messages.items():
        message = flow.program.messages[key]
        if node.target is ops.send and message.producer:
            expected = [(name, message.producer.microbatch) for name in message.names]
            yield from equal(f"what {key} sends", expected, [flow.holds.get(value) for value in sent(node)])
        elif node.target is ops.send:
            yield from equal(f"what {key} sends", [*message.names], [carried(flow, value) for value in sent(node)])


def messages_fit_their_phases(flow: Flow) -> Problems:
    """Values have the same layout in a message, in the phase that makes them, and in phases that read them."""
    ends = defaultdict[str, list[tuple[str, TensorLayout]]](list)
    for phase in {call.phase.name: call.phase for call in flow.calls}.values():
        for name, node in crossing(phase):
            ends[name].append((phase.name, layout_of(node.meta["val"])))
    for message in (message for message in flow.program.messages.values() if message.producer):
        for name, layout in zip(message.names, message.layouts, strict=True):
            yield from each(equal(f"{name} of {at} in message {message.key}", end, layout) for at, end in ends[name])


def calls_pack_their_phase(flow: Flow) -> Problems:
    """A call asks for all that its phase reads, and gives each result of its phase once, the loss included."""
    for call in {call.phase.name: call for call in flow.calls}.values():
        missing = set(call.phase.values) - set(unpacked(call.module.arguments))
        yield from alike(f"what {call.phase.name} reads", missing, ())
        yield from alike(f"what {call.phase.name} gives", call.phase.returned, unpacked(call.module.returned))


def unpacked(items: Iterable[Item]) -> Iterable[str]:
    return each((item,) if isinstance(item, str) else item for item in items)


def calls_get_their_arguments(flow: Flow) -> Problems:
    """A call gets its microbatch, and the values and bundles that its module asks for. Those that its stage keeps are
    of no microbatch, all others are of the same one."""
    kept = {stage: flow.kept(stage) for stage in {call.action.stage for call in flow.calls}}
    for call in flow.calls:
        k, once = call.action.microbatch, kept[call.action.stage]
        expected = [flow.microbatches[k], *((item, None if item in once else k) for item in call.module.arguments)]
        yield from equal(f"arguments of {call.node}", expected, [flow.holds.get(v, v) for v in call.node.args])


def what_is_made_is_read(flow: Flow) -> Problems:
    """What calls make and messages bring is read: by a call, a message, a sum, or as a result."""
    for node in flow.holds:
        if not node.users:
            yield Problem(node, "a reader", "none")
    for node in flow.place:
        made = isinstance(called_by(node), PartialSum | Gradient) if node.op == "call_module" else False
        if (made or node.target is ops.receive) and not node.users:
            yield Problem(node, "a reader", "none")


def actions_come_in_turn(flow: Flow) -> Problems:
    """Of a stage and a microbatch, F comes before B and B before W; a prologue comes before the first F."""
    last: dict[tuple[int, int], CallNode] = {}
    for call in flow.calls:
        before = last.get((call.action.stage, call.action.microbatch), call)
        if before.end > call.start or PHASES.index(before.action.kind) > PHASES.index(call.action.kind):
            yield Problem(call.node, f"a call before {before.node}", "one after it")
        last[call.action.stage, call.action.microbatch] = call


def prologues_run_once(flow: Flow) -> Problems:
    """The prologue of a stage runs once, for no microbatch but the first, and before all else that the stage does."""
    runs = [call for call in flow.calls if call.action.kind is Kind.P]
    yield from distinct("prologues", (call.action.stage for call in runs))
    first = {call.action.stage: call for call in reversed(flow.calls)}
    for call in runs:
        yield from equal(f"the first call of stage {call.action.stage}", call.node, first[call.action.stage].node)
        yield from equal(f"the microbatch of {call.node}", 0, call.action.microbatch)


def microbatches_are_alike(flow: Flow) -> Problems:
    """What is made of one microbatch is made of each, once: results, gradients, updates and the loss."""
    phases, runs = {call.phase.name: call.phase for call in flow.calls}, [list[str]() for _ in flow.microbatches]
    for call in flow.ordered:
        runs[call.action.microbatch].append(call.phase.name)
    made = {  # by one microbatch of those that run the same phases
        k: [
            (phase.kind, phase.stage, name)
            for phase in map(phases.__getitem__, run)
            for name in (*phase.returned, *phase.gradients, *phase.updates)
        ]
        for run, k in {tuple(sorted(run)): k for k, run in enumerate(runs)}.items()
    }
    everything = set(each(made.values()))
    return each(alike(f"what is made of microbatch {k}", everything, found) for k, found in made.items())


def buffers_are_written_in_turn(flow: Flow) -> Problems:
    """A buffer is written by one microbatch after the other, in their order."""
    for name in {call.phase.name: None for call in flow.calls if call.phase.updates}:
        found = [call.action.microbatch for call in flow.calls if call.phase.name == name]
        yield from equal(f"the order of microbatches in {name}, which writes a buffer", sorted(found), found)


def calls_beside_are_joined(flow: Flow) -> Problems:
    """A call beside others is joined once, by a node that keeps alive what the call reads."""
    module = flow.program.module
    beside = [c.node for c in flow.calls if isinstance(module.get_submodule(str(c.node.target)), Beside)]
    found = [node.args for node in flow.place if node.target is join]
    return alike("the joins", ((node, *node.args) for node in beside), found)


def buckets_are_awaited(flow: Flow) -> Problems:
    """A bucket's sum and its collection begin once and are awaited; each bucket of a stage's own is summed."""
    for key, nodes in flow.buckets.items():
        for pair in (SUMMED, COLLECTED):
            found = [node.target for node in nodes if node.target in pair]
            if found not in ([], pair):
                names = [[f.__name__ for f in functions] for functions in (pair, found)]
                yield Problem(key, *map(", ".join, names))
        for begin in (node for node in nodes if node.target in (ops.reduce, ops.gather)):
            yield from equal(f"the tensor of {begin}", key, carried(flow, begin.args[2]))  # type: ignore[arg-type]
    due = {bucket.key for bucket in flow.program.buckets if not bucket.shared}
    yield from alike("the sums", {key for key in due if not nodes_that(flow, ops.reduce, key)}, ())


def sums_are_whole(flow: Flow) -> Problems:
    """A stage's sum of a gradient is read once all calls that add to it have ended, the gradient itself once it is
    added up and summed over the replicas."""
    for node, module in ((node, called_by(node)) for node in flow.place if node.op == "call_module"):
        if isinstance(module, PartialSum):
            adds = (c for c in flow.calls if c.phase.stage == module.stage and module.name in c.phase.gradients)
            yield from alike(f"what adds to {node} later", (), (c.node for c in adds if c.end > flow.place[node]))
        elif isinstance(module, Gradient):
            sums = (n for nodes in flow.buckets.values() for n in nodes if n.target in SUMMED)
            late = (n for n in sums if n.args[1] == module.name and flow.place[n] > flow.place[node])
            yield from alike(f"what sums {node} later", (), late)


def buckets_are_whole(flow: Flow) -> Problems:
    """A bucket is summed after all that adds to its gradients, and collected before a phase reads its parameters."""
    last = {call.phase.name: call for call in flow.calls}
    first = {call.phase.name: call for call in reversed(flow.calls)}
    adds = [(name, call.end, call.node) for call in last.values() for name in call.phase.gradients]
    adds += [
        (module.name, k, node)
        for node, k in flow.place.items()
        if node.op == "call_module" and isinstance(module := called_by(node), AddToGradient)
    ]
    reads = [(name, call.start, call.node) for call in first.values() for name in call.phase.parameters]
    for key in flow.buckets:
        for begin in nodes_that(flow, ops.reduce, key):
            late = (node for name, k, node in adds if name in names_in(begin) and k > flow.place[begin])
            yield from alike(f"what adds to {key} after its sum", (), late)
        for begin, end in zip(*(nodes_that(flow, function, key) for function in COLLECTED), strict=True):
            early = (node for name, k, node in reads if name in names_in(begin) and k < flow.place[end])
            yield from alike(f"what reads {key} before it is there", (), early)


def verdict_ends_the_prefix(flow: Flow) -> Problems:
    """Where an optimizer step is validated, all before its verdict are forwards, and no more than the prefix."""
    begin, end = flow.program.verdict
    early = [call for call in flow.calls if call.start < end]
    yield from equal("the verdict", bool(flow.calls) and flow.program.chain.validates, end > 0)
    yield from (
        Problem(c.node, "an F before the verdict", c.action)
        for c in early
        if c.action.kind not in (Kind.P, Kind.F) or c.start > begin
    )
    ordered = [call for call in early if call.action.kind is not Kind.P]
    yield from equal("the prefix", min(len(ordered), flow.program.chain.prefix), len(ordered))


def program_returns_its_results(flow: Flow) -> Problems:
    """A rank returns the losses and outputs that it computes, in the order of microbatches, and each rank the loss of
    the batch and its metrics."""
    made = [(p, call.action.microbatch) for call in flow.calls for p in call.phase.last if p.role is not Role.METRIC]
    summary = [(name, None) for name, _ in flow.program.chain.summary if flow.microbatches]
    found = [flow.holds.get(node, (carried(flow, node), None)) for node in outputs_of(flow.program.module.graph)]
    yield from alike("the results", [*((str(port), k) for port, k in made), *summary], flow.program.results)
    yield from equal("what is returned", [*flow.program.results], found)
    for name in dict.fromkeys(str(port) for port, _ in made):
        order = [result.microbatch for result in flow.program.results if result.name == name]
        of_each = [k for k in order if k is not None]
        yield from equal(f"the order of {name}", sorted(of_each), of_each)


def summaries_are_of_all_microbatches(flow: Flow) -> Problems:
    """The loss and the metrics of the batch are made of those of its microbatches, in their order."""
    ports = dict.fromkeys(port for call in flow.calls for port in call.phase.last if port.role is not Role.OUTPUT)
    for node in (node for node in flow.place if node.op == "call_module" and isinstance(called_by(node), Summary)):
        expected = [(str(port), k) for port in ports for k in range(len(flow.microbatches))]
        yield from equal(f"what {node} is made of", expected, [flow.holds.get(value) for value in node.args])


# Beside the schedule.


def in_turn(schedule: Schedule, flow: Flow) -> list[CallNode]:
    """The calls of whole phases that run one after the other."""
    beside = {guest for guest, _ in schedule.beside}
    return [call for call in flow.ordered if call.phase.part is None and call.action not in beside]


def actions_are_the_schedules(schedule: Schedule, flow: Flow) -> Problems:
    """Actions come in the rank's order, but for Ws that run beside others and for the last ones where they are cut."""
    order = [part for action in schedule.ranks[flow.program.rank] for part in parts(action)]
    found = [call.action for call in in_turn(schedule, flow)]
    known, whole = {call.action for call in flow.ordered}, {*found}
    yield from alike("the actions", known & {*order}, known)
    for due, action in zip((action for action in order if action in whole), found, strict=True):
        yield from equal(f"the order of rank {flow.program.rank}", due, action)


def messages_are_released_as_planned(schedule: Schedule, flow: Flow) -> Problems:
    """What is sent is released once its reader has started by the plan, if the rank has an action from then on."""
    ranks = {flow.program.rank, *(message.target for message in flow.program.messages.values())}
    start_s = {part: span.start_s for rank in ranks for span in schedule.spans[rank] for part in parts(span.action)}
    calls = in_turn(schedule, flow)
    starts = [start_s[call.action] for call in reversed(calls)]
    first, last = ([*accumulate(starts, of)][::-1] for of in (min, max))  # start of what comes from each call on
    for key, nodes in flow.messages.items():
        consumer = flow.program.messages[key].consumer
        after = bisect_right(calls, flow.place[nodes[-1]], key=lambda call: call.start)
        if nodes[0].target is ops.send and consumer is not None and after < len(calls):
            if len(nodes) == 2 and first[after] < start_s[consumer]:
                yield Problem(f"the release of {key}", f"none before {consumer} starts", "one")
            if len(nodes) == 1 and last[after] >= start_s[consumer]:
                yield Problem(f"the release of {key}", f"one after {consumer} starts", "none")


PROGRAM: RuleTable = (program_is_in_order, calls_are_actions)
FLOW: RuleTable = (
    transports_are_passed,
    messages_are_the_ranks,
    messages_are_handled_once,
    messages_hold_their_values,
    messages_fit_their_phases,
    calls_pack_their_phase,
    calls_get_their_arguments,
    actions_come_in_turn,
    prologues_run_once,
    buffers_are_written_in_turn,
    microbatches_are_alike,
    what_is_made_is_read,
    calls_beside_are_joined,
    buckets_are_awaited,
    buckets_are_whole,
    sums_are_whole,
    verdict_ends_the_prefix,
    program_returns_its_results,
    summaries_are_of_all_microbatches,
)
ORDERED: RuleTable = (actions_are_the_schedules, messages_are_released_as_planned)
