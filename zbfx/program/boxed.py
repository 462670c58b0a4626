"""Phases as functions that own their arguments, so that each argument dies at its last use.
In: a `Phase`. Out: a function of one list of arguments, which it empties. A plain call would keep all arguments alive
until it returns, since the caller's frame holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen

from zbfx._torch import inductor
from zbfx.graphs import Phase, copy_graph
from zbfx.passes.seal import sealed

Boxed = Callable[[list[Any]], Any]


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
        graph = copy_graph(phase.module.graph)
        graph.set_codegen(TakesBox())
        return fx.GraphModule(torch.nn.Module(), graph, phase.name).forward

    return lambda box: forward()(box)


class Compiler:
    """Makes functions of phases. If it `compiles`, inductor compiles a phase at its first call, and again for tensors
    of another layout. Phases with random numbers run as they are, since compiled code would hold one seed."""

    def __init__(self, compiles: bool) -> None:
        self.compiles = compiles
        self.known: dict[int, tuple[Phase, Boxed]] = {}

    def __call__(self, phase: Phase) -> Boxed:
        if not self.compiles or phase.is_random:
            return boxed(phase)
        if id(phase.module) not in self.known:
            self.known[id(phase.module)] = phase, compiled(phase)
        return self.known[id(phase.module)][1]


def compiled(phase: Phase) -> Boxed:
    """The phase's graph, compiled by inductor."""
    made: dict[tuple[Any, ...], Boxed] = {}

    def run(box: list[Any]) -> Any:
        layouts = tuple(map(compiled_for, box))
        if layouts not in made:
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
