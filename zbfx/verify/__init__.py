"""What holds for a graph after every pass: small rules with names.

In: what a pass gave, its name, and, where both are compared, what it took. Out: the graph, or `BrokenGraph`, which
names the pass, the rule and the place. Called between passes by the compiler; knows nothing of memory, costs or runs.

A rule is a function whose docstring is the invariant. It gives a `Problem` for each place that breaks it. Tables list
the rules of each type, in an order in which each may rely on those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from zbfx.errors import BrokenGraph
from zbfx.graphs import Joint, Placed, Split, Stage
from zbfx.program.codegen import Program
from zbfx.schedule.schedule import Schedule
from zbfx.verify.flow import Flow
from zbfx.verify.joint_rules import JOINT, JOINT_KEPT, PLACED, SPLIT, SPLIT_KEPT
from zbfx.verify.problems import RuleTable
from zbfx.verify.program_rules import FLOW, ORDERED, PROGRAM
from zbfx.verify.rank_rules import ALL_RANKS
from zbfx.verify.stage_rules import PHASE, STAGE, STAGES, STAGES_OF_SPLIT

Graph = TypeVar("Graph")
Given = TypeVar("Given")
Further = ParamSpec("Further")


def verify(graph: Graph, *, after: str, given: Any = None) -> Graph:
    """The graph, if it keeps every rule: a Joint, Placed, Split, Stage or Program, or a tuple of stages or programs.
    The programs of all ranks are verified together.

    `after` names the pass that gave it. `given` is what that pass took, for rules that compare both: a Joint for a
    Joint or Placed, a Split for a Split or stages, a Schedule for programs.
    """
    for rules, *arguments in rule_tables(graph, given):
        for rule in rules:
            for where, expected, found in rule(*arguments):
                raise BrokenGraph(after, rule.__name__, str(rule.__doc__), where, expected, found)
    return graph


def verified(
    step: Callable[Concatenate[Given, Further], Graph], given: Given, *args: Further.args, **kwargs: Further.kwargs
) -> Graph:
    """What a pass makes of `given`, if it keeps every rule."""
    name = getattr(step, "__name__", str(step))
    return verify(step(given, *args, **kwargs), after=name, given=given)


def rule_tables(graph: Any, given: Any = None) -> Iterator[tuple[Any, ...]]:
    """The tables of a graph, after those of its parts, each with the arguments of its rules."""
    match graph:
        case Joint():
            yield JOINT, graph
        case Placed():
            yield from rule_tables(graph.joint)
            yield PLACED, graph
        case Split():
            yield from rule_tables(graph.placed)
            yield SPLIT, graph
        case Stage():
            yield from ((PHASE, phase) for phase in graph.phases.values())
            yield STAGE, graph
        case (Stage(), *_):
            for stage in graph:
                yield from rule_tables(stage)
            yield STAGES, graph
        case Program():
            yield from rule_tables((graph,), given)
        case (Program(), *_):
            flows = list[Flow]()
            for program in graph:
                yield PROGRAM, program
                flows.append(Flow.of(program))  # which relies on these rules
                yield FLOW, flows[-1]
                if isinstance(given, Schedule):
                    yield ORDERED, given, flows[-1]
            if len(graph) == len(graph[0].chain.chain.ranks):
                yield ALL_RANKS, flows
        case _:
            raise TypeError(f"expected a graph of zbfx.graphs, stages or programs; found {type(graph).__name__}")
    match given, graph:
        case Joint(), Joint():
            yield JOINT_KEPT, given, graph
        case Joint(), Placed():
            yield JOINT_KEPT, given, graph.joint
        case Split(), Split():
            yield SPLIT_KEPT, given, graph
        case Split(), (Stage(), *_):
            yield STAGES_OF_SPLIT, given, graph


RULES: dict[str, RuleTable] = {
    "a joint graph": JOINT,
    "a placed graph": PLACED,
    "a split graph": SPLIT,
    "a phase": PHASE,
    "a stage": STAGE,
    "all stages": STAGES,
    "a program": PROGRAM + FLOW,
    "a joint graph beside the one before": JOINT_KEPT,
    "a split graph beside the one before": SPLIT_KEPT,
    "stages beside their split graph": STAGES_OF_SPLIT,
    "a program beside its schedule": ORDERED,
    "the programs of all ranks": ALL_RANKS,
}
