"""Phases as functions that own their arguments, so that each argument dies at its last use.
In: a `Phase`. Out: a function of one list of arguments, which it empties. A plain call would keep all arguments alive
until it returns, since the caller's frame holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen

from zbfx._torch.compiling import inductor
from zbfx.graphs import Phase
from zbfx.passes.seal import ASSERTS, sealed, with_operators
from zbfx.progress import announce

Boxed = Callable[[list[Any]], Any]
Code = tuple[Any, ...]


class TakesBox(CodeGen):
    """The usual code of a graph, with one argument: a list of the placeholders' values, which it empties."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [name.partition(":")[0].strip() for name in free_vars if name != "self"]
        unpack = f"    {', '.join(names)}, = box\n    box.clear()" if names else "    pass"
        return f"def forward(self, box){maybe_return_annotation}:\n{unpack}"


def boxed(phase: Phase) -> Boxed:
    """The phase's graph as a function of a list, which it empties. Its code is made at the first call, since only one
    of the programs that a search compares will run."""

    @cache
    def forward() -> Boxed:
        graph = with_operators(phase.module.graph, ASSERTS)
        graph.set_codegen(TakesBox())
        return fx.GraphModule(torch.nn.Module(), graph, phase.name).forward

    return lambda box: forward()(box)


class Compiler:
    """Makes functions of phases. If it `compiles`, inductor compiles a phase at its first call, and again for tensors
    of another layout. Phases that compute the same, like those of stages of equal layers, share one function. Phases
    with random numbers run as they are, since compiled code would hold one seed."""

    def __init__(self, compiles: bool) -> None:
        self.compiles = compiles
        self.known: dict[int, tuple[Phase, Boxed]] = {}
        self.shared: dict[Code, Boxed] = {}

    def __call__(self, phase: Phase) -> Boxed:
        if not self.compiles or phase.is_random:
            return boxed(phase)
        if id(phase.module) not in self.known:
            code = code_of(phase)
            if code not in self.shared:
                self.shared[code] = compiled(phase)
            self.known[id(phase.module)] = phase, self.shared[code]
        return self.known[id(phase.module)][1]


class NumberedNode(NamedTuple):
    """A node, by its place in its graph."""

    number: int


def code_of(phase: Phase) -> Code:
    """What a phase computes, up to names: its operators, on which values and constants, and the layouts of what it
    reads. Phases with equal codes make equal results of equal arguments, and take as long."""
    places = {node: NumberedNode(index) for index, node in enumerate(phase.module.graph.nodes)}
    return tuple(
        (node.op, compiled_for(node.meta.get("val")))
        if node.op == "placeholder"
        else (node.op, node.target, repr(fx.map_arg((node.args, node.kwargs), places.__getitem__)))
        for node in places
    )


def compiled(phase: Phase) -> Boxed:
    """The phase's graph, compiled by inductor."""
    made: dict[tuple[Any, ...], Boxed] = {}

    def run(box: list[Any]) -> Any:
        layouts = tuple(map(compiled_for, box))
        if layouts not in made:
            announce(f"compiling {phase.name}")
            made[layouts] = inductor(fx.GraphModule(torch.nn.Module(), sealed(phase.module.graph), phase.name), box)
        return made[layouts](box)

    return run


def compiled_for(value: Any) -> tuple[Any, ...] | None:
    """What code is compiled for of a tensor; None for a number, which is an argument of the code."""
    if not isinstance(value, Tensor):
        return None
    return value.dtype, value.shape, value.stride(), value.device


def dying_values(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """For each node, the values that nothing after it reads."""
    last_use = {source: index for index, node in enumerate(nodes) for source in (node, *node.all_input_nodes)}
    dying: list[list[fx.Node]] = [[] for _ in nodes]
    for node, index in last_use.items():
        if node.op != "output":
            dying[index].append(node)
    return dying
