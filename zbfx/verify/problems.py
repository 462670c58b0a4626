"""How rules say what is broken, and the comparisons that many of them make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from torch import fx

from zbfx.errors import first_line, listed


class Problem(NamedTuple):
    """A place that breaks a rule, what was expected there, and what was found."""

    where: object
    expected: object
    found: object


Problems = Iterable[Problem]
RuleTable = tuple[Callable[..., Problems], ...]
each = chain.from_iterable


def equal(where: object, expected: object, found: object) -> Problems:
    return () if expected == found else (Problem(where, expected, found),)


def alike(where: object, expected: Iterable[Hashable], found: Iterable[Hashable]) -> Problems:
    """Both hold equal things, each as often, in any order."""
    due, there = Counter(iter(expected)), Counter(iter(found))  # of a mapping, its keys
    missing, more = due - there, there - due
    return (Problem(where, listed(missing) or "no more", listed(more) or "none"),) if missing or more else ()


def distinct(where: object, found: Iterable[Hashable]) -> Problems:
    return (Problem(where, f"{one} once", f"{count} times") for one, count in Counter(found).items() if count > 1)


def in_order(where: str, graph: fx.Graph, *ops: str) -> Iterator[Problem]:
    """What fx asks of a graph; nodes of these ops alone, beside arguments and the output; a flat tuple as output."""
    try:
        graph.lint()
    except (RuntimeError, ValueError) as error:
        yield Problem(where, "names that differ, and each node after what it reads", first_line(error))
    ops = ("placeholder", *ops, "output")
    yield from (Problem(f"{where}, {node}", listed(ops), node.op) for node in graph.nodes if node.op not in ops)
    yield from (
        Problem(f"the output of {where}", "nodes in a flat tuple", value)
        for value in outputs_of(graph)
        if not isinstance(value, fx.Node)
    )


def outputs_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    return tuple(graph.output_node().args[0])  # type: ignore[arg-type]
