"""The compiler's passes with those of the user between them, each verified, and printed where the options say so.

Takes   what a pass of the compiler takes, and the options, which have the user's passes.
Gives   what it gives, after the user's passes at that point.
Raises  `BrokenGraph`, naming the pass, where one gives a graph that breaks a rule, or another type, or changes what it
        took. What a pass itself raises is raised with a note that names it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import unified_diff
from itertools import islice
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch import fx

from zbfx.errors import ZbfxError
from zbfx.graphs import Joint, Placed, Split, Stage
from zbfx.options import Options
from zbfx.passes.canonicalize import canonicalize
from zbfx.passes.extract import extract
from zbfx.passes.open_softmax import open_softmax
from zbfx.passes.prologue import prologue
from zbfx.passes.split import split
from zbfx.user_pass import Pass, PassPoint, Tracing
from zbfx.verify import verified, verify

Record = TypeVar("Record", Joint, Split, Stage)
Taken = TypeVar("Taken")
PassedOn = TypeVar("PassedOn")
Settings = ParamSpec("Settings")


def canonical(raw: Joint, options: Options) -> Joint:
    joint = followed(canonicalize, raw, options)
    if options.runs.compiles:
        joint = followed(open_softmax, joint, options)
    for given in of_point(options, PassPoint.JOINT):
        joint = verify(ran(given, joint, options), after=given.name, given=joint)
    return joint


def divided(placed: Placed, options: Options, prologues: bool) -> Split:
    """The phases of all nodes; with `prologues`, what is the same for every microbatch comes once a step."""
    found = followed(split, placed, options)
    for given in of_point(options, PassPoint.SPLIT):
        before, found = found, verify(ran(given, found, options), after=given.name)
        verify(found.placed.joint, after=given.name, given=before.placed.joint)
    return followed(prologue, found, options) if prologues else found


def extracted(whole: Split, options: Options) -> tuple[Stage, ...]:
    stages = followed(extract, whole, options)
    for given in of_point(options, PassPoint.STAGE):
        stages = verify(tuple(ran(given, stage, options) for stage in stages), after=given.name, given=whole)
    return stages


def followed(
    step: Callable[Concatenate[Taken, Settings], PassedOn],
    given: Taken,
    options: Options,
    *args: Settings.args,
    **kwargs: Settings.kwargs,
) -> PassedOn:
    """What a pass of the compiler's makes of `given`, if it keeps every rule."""
    if options.trace_passes is Tracing.NOTHING:
        return verified(step, given, *args, **kwargs)
    before, begun = listing(given), perf_counter()
    found = verified(step, given, *args, **kwargs)
    took_s, after = perf_counter() - begun, listing(found)
    lines = report(step.__name__, before, after, took_s)
    print("\n".join(lines if options.trace_passes is Tracing.ALL else islice(lines, 1)), file=sys.stderr)
    return found


def of_point(options: Options, point: PassPoint) -> Iterator[Pass]:
    return (given for given in options.passes if given.point is point)


def ran(given: Pass, graph: Record, options: Options) -> Record:
    """What a pass makes of a graph, which stays as it was."""
    before, begun = listing(graph), perf_counter()
    try:
        found = given.run(graph)
    except Exception as error:
        error.add_note(f"in {given.name}, a pass at {given.at}")
        raise
    took_s = perf_counter() - begun
    kind = given.point.type
    if not isinstance(found, kind):
        raise ZbfxError(
            f"{given.name} runs at {given.at}: expected a {kind.__name__} of zbfx.graphs; found "
            f"{type(found).__name__}. Return the new graph"
        )
    if listing(graph) != before:
        raise ZbfxError(
            f"{given.name} has changed the {kind.__name__} that it took, which others read. Change a copy, as "
            f"zbfx.graphs.copy_graph makes it, and return a record of that"
        )
    if options.trace_passes is not Tracing.NOTHING:
        print("\n".join(report(f"{given.name}, at {given.at}", before, listing(found), took_s)), file=sys.stderr)
    return cast(Record, found)


def report(name: str, before: list[str], after: list[str], took_s: float) -> Iterator[str]:
    """What a pass did, verification included: time, nodes changed, and the difference, line by line."""
    added, removed = Counter(after) - Counter(before), Counter(before) - Counter(after)
    lines = f"{len(before)} lines to {len(after)}, {added.total()} lines added, {removed.total()} removed"
    yield f"zbfx: {name}: {1e3 * took_s:.1f} ms, {lines}"
    yield from list(unified_diff(before, after, "before", "after", n=1, lineterm=""))[2:]


def listing(graph: Any) -> list[str]:
    """A line for each node."""
    match graph:
        case Joint():
            return [*map(str, (*graph.inputs, *graph.outputs)), *nodes(graph.graph)]
        case Placed():
            return [*nodes(graph.joint.graph, lambda n: f"{graph.stage_of.get(n, '')}: ")]
        case Split():
            phase_of, stage_of = graph.phase_of, graph.placed.stage_of
            return [*nodes(graph.placed.joint.graph, lambda n: f"{phase_of.get(n, '')}{stage_of.get(n, '')}: ")]
        case tuple():
            return [line for part in graph for line in listing(part)]
        case Stage():
            phases = graph.phases.values()
            return [f"{phase.name}{graph.index}: {line}" for phase in phases for line in nodes(phase.module.graph)]
    raise TypeError(f"expected a Joint, Placed, Split or Stages; found {type(graph).__name__}")


def nodes(graph: fx.Graph, place: Callable[[fx.Node], str] = lambda _: "") -> Iterator[str]:
    for node in graph.nodes:
        value = node.meta.get("val")
        kind = f"  # {tuple(value.shape)} {value.dtype}" if hasattr(value, "shape") else ""
        yield f"{place(node)}{node.name} = {node.op} {node.target} {node.args} {node.kwargs or ''}{kind}"
