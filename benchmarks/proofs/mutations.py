"""Mutations of good programs: each is refused by `zbfx.verify`, or shown to be harmless by running it.

python benchmarks/proofs/mutations.py --count 5000 --seed 0

Prints a table by kind of mutation: refused, harmless (the mutated programs leave the results of the good ones), and
wrong (they leave others, or fail). Exits 1 if any is wrong, or if one of the kinds in `STATIC` is not refused.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

import zbfx
from zbfx._torch.compiling import graph_module
from zbfx.checked_runs import Data, Values, emitted_results, random_data
from zbfx.compiled import Compiled
from zbfx.errors import BrokenGraph
from zbfx.graphs import copy_graph
from zbfx.modes import Modes
from zbfx.plan import Action
from zbfx.program import ops
from zbfx.program.calls import ParameterBucket
from zbfx.program.codegen import Program
from zbfx.program.streams import join
from zbfx.replicas import replicated
from zbfx.schedule import plan
from zbfx.schedule.beside import run_beside
from zbfx.verify import verify

Mutate = Callable[[fx.Graph, random.Random], bool]  # changes a graph; whether there was anything to change
DRAWS = 500  # of programs, until one has something to change
WAITS = (ops.receive, ops.reduced, ops.gathered, ops.release, join)


def calls_of(graph: fx.Graph, *functions: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in functions]


def middle(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def picked(nodes: Sequence[fx.Node], draw: random.Random) -> fx.Node | None:
    return draw.choice(nodes) if nodes else None


def drop(*functions: Any) -> Mutate:
    """Erase a node that nothing reads."""

    def mutate(graph: fx.Graph, draw: random.Random) -> bool:
        found = [node for node in (calls_of(graph, *functions) if functions else middle(graph)) if not node.users]
        node = picked(found, draw)
        if node is not None:
            graph.erase_node(node)
        return node is not None

    return mutate


def drop_phase(graph: fx.Graph, draw: random.Random) -> bool:
    """Erase the calls of a phase for all microbatches, with all that hangs on them."""
    calls = [node for node in graph.nodes if "action" in node.meta]
    if not calls:
        return False
    target = draw.choice(calls).target
    doomed = [node for node in calls if node.target == target]
    while doomed:
        node = doomed[-1]
        readers = [user for user in node.users if user.op != "output"]
        if node.users and not readers:
            return False
        if readers:
            doomed.append(readers[0])
        else:
            graph.erase_node(doomed.pop())
            doomed = [left for left in doomed if left in graph.nodes]
    return True


def swap_keys(*functions: Any) -> Mutate:
    """Two nodes of one kind name each other's message or bucket."""

    def mutate(graph: fx.Graph, draw: random.Random) -> bool:
        function = draw.choice(functions)
        found = calls_of(graph, function)
        if len(found) < 2:
            return False
        one, other = draw.sample(found, 2)
        first, second = one.args[1], other.args[1]
        one.update_arg(1, second)
        other.update_arg(1, first)
        return True

    return mutate


def move(up: bool, *functions: Any) -> Mutate:
    """Move a node to another place, up or down, as far as its readers and what it reads allow."""

    def mutate(graph: fx.Graph, draw: random.Random) -> bool:
        node = picked(calls_of(graph, *functions) if functions else middle(graph), draw)
        if node is None:
            return False
        order = list(graph.nodes)
        place = {other: k for k, other in enumerate(order)}
        here = place[node]
        least = max(
            [place[source] for source in node.all_input_nodes]
            + [k for k, n in enumerate(order) if n.op == "placeholder"]
        )
        most = min([place[user] for user in node.users] + [len(order) - 1])
        places = range(least + 1, here) if up else range(here + 2, most + 1)
        if not places:
            return False
        order[draw.choice(places)].prepend(node)
        return True

    return mutate


def move_sum(graph: fx.Graph, draw: random.Random) -> bool:
    """A sum over replicas begins earlier, with the node that makes its tensor known."""
    node = picked(calls_of(graph, ops.reduce), draw)
    if node is None:
        return False
    order = list(graph.nodes)
    first = next(k for k, other in enumerate(order) if other.op != "placeholder")
    bucket: Any = node.args[2]
    target = order[draw.randrange(first, order.index(bucket))]
    target.prepend(bucket)
    target.prepend(node)
    return True


def swap_places(graph: fx.Graph, draw: random.Random) -> bool:
    """Two calls of phases change places, each with the other's neighbours."""
    found = [node for node in graph.nodes if "action" in node.meta]
    if len(found) < 2:
        return False
    one, other = draw.sample(found, 2)
    mark = one.next
    other.append(one)
    mark.prepend(other)
    return True


def other_argument(graph: fx.Graph, draw: random.Random) -> bool:
    """A node reads another value."""
    node = picked([node for node in graph.nodes if node.all_input_nodes], draw)
    nodes = list(graph.nodes)
    before = [other for other in nodes[: nodes.index(node)] if other.op != "output"] if node is not None else []
    if node is None or not before:
        return False
    old, new = draw.choice(node.all_input_nodes), draw.choice(before)
    node.replace_input_with(old, new)
    return old is not new


def has_several(node: fx.Node) -> bool:
    several = any(isinstance(argument, tuple) and len(argument) > 1 for argument in node.args)
    return several or node.target is join or (node.op == "call_module" and len(node.args) > 1)


def fewer_arguments(graph: fx.Graph, draw: random.Random) -> bool:
    """A call, a send or a result has one value less."""
    node = picked([node for node in graph.nodes if has_several(node)], draw)
    if node is None:
        return False
    lists = [k for k, argument in enumerate(node.args) if isinstance(argument, tuple)]
    entries: list[Any] = list(node.args[lists[0]] if lists else node.args)  # type: ignore[arg-type]
    entries.pop(draw.randrange(node.op == "call_module", len(entries)))
    node.args = (*node.args[: lists[0]], tuple(entries), *node.args[lists[0] + 1 :]) if lists else tuple(entries)
    return True


def turned_arguments(graph: fx.Graph, draw: random.Random) -> bool:
    """Two arguments of a call, a send or the output change places."""
    found = [node for node in graph.nodes if len(set(node.all_input_nodes)) > 2]
    node = picked(found, draw)
    if node is None:
        return False
    one, other = draw.sample(list(node.all_input_nodes), 2)
    node.args = fx.map_arg(node.args, lambda n: other if n is one else one if n is other else n)
    return True


def repeat(graph: fx.Graph, draw: random.Random) -> bool:
    """A node runs twice."""
    node = picked(middle(graph), draw)
    if node is None:
        return False
    with graph.inserting_after(node):
        graph.node_copy(node)
    return True


def other_entry(graph: fx.Graph, draw: random.Random) -> bool:
    """A value is another one of those that a call returns."""
    found = [n for n in graph.nodes if n.op == "call_function" and len(n.args) == 2 and isinstance(n.args[1], int)]
    node = picked(found, draw)
    if node is None:
        return False
    entry: Any = node.args[1]
    node.update_arg(1, entry + draw.choice((-1, 1)))
    return True


def other_action(graph: fx.Graph, draw: random.Random) -> bool:
    """A call is said to be of another microbatch."""
    node = picked([node for node in graph.nodes if "action" in node.meta], draw)
    if node is None:
        return False
    action: Action = node.meta["action"]
    node.meta["action"] = replace(action, microbatch=action.microbatch + draw.choice((-1, 1)))
    return True


KINDS: dict[str, Mutate] = {
    "a send is dropped": drop(ops.send),
    "a receive is posted no more": drop(ops.post),
    "a release is dropped": drop(ops.release),
    "a join is removed": drop(join),
    "a sum over replicas is dropped": drop(ops.reduce),
    "a wait for a sum is removed": drop(ops.reduced, ops.gathered),
    "a call is dropped": drop(),
    "a phase is dropped": drop_phase,
    "two receives are swapped": swap_keys(ops.receive),
    "two sends are swapped": swap_keys(ops.send),
    "two posts are swapped": swap_keys(ops.post),
    "two releases are swapped": swap_keys(ops.release),
    "two sums are swapped": swap_keys(ops.reduce, ops.gather),
    "two waits for sums are swapped": swap_keys(ops.reduced, ops.gathered),
    "a free is moved up": move(True, ops.release, join),
    "a wait is moved down": move(False, *WAITS),
    "a wait is moved up": move(True, *WAITS),
    "a post is moved": move(True, ops.post),
    "a post is moved down": move(False, ops.post),
    "a send is moved down": move(False, ops.send),
    "a sum is moved up": move_sum,
    "anything is moved up": move(True),
    "anything is moved down": move(False),
    "two calls change places": swap_places,
    "another value is read": other_argument,
    "a value is read no more": fewer_arguments,
    "two values change places": turned_arguments,
    "a node runs twice": repeat,
    "another result is taken": other_entry,
    "a call is of another microbatch": other_action,
}
STATIC = (  # refused in every case
    "a send is dropped",
    "a receive is posted no more",
    "a join is removed",
    "a sum over replicas is dropped",
    "a wait for a sum is removed",
    "a phase is dropped",
    "two receives are swapped",
    "two sends are swapped",
    "two sums are swapped",
)


class Block(nn.Module):
    """One weight in its first and its last layer, a buffer that every microbatch writes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(6, 6)
        self.middle = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.BatchNorm1d(6), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.ends(torch.tanh(self.middle(torch.tanh(self.ends(x)))))


def compiled(schedule: str, microbatches: int = 4, ranks: int = 3, **options: Any) -> zbfx.Pipeline:
    torch.manual_seed(0)
    model, x = Block().double(), torch.randn(3, 6, dtype=torch.float64)
    return zbfx.compile(
        model,
        stages=ranks,
        microbatches=microbatches,
        example_inputs=(x,),
        example_targets=x,
        loss_fn=nn.functional.mse_loss,
        schedule=schedule,
        check=False,
        **options,
    )


def overlapped(pipe: zbfx.Pipeline) -> Compiled:
    """As many Ws beside Bs as would pay if they cost nothing there."""
    planned = plan(pipe.schedule.costs, pipe.schedule.microbatches, schedule="gpipe")
    free = [replace(stage, beside_s=stage.backward_input_s) for stage in planned.costs.stages]
    planned = replace(planned, costs=replace(planned.costs, stages=tuple(free)))
    schedule = run_beside(planned, frozenset(stage.index for stage in pipe.stages if stage.runs_beside))
    assert schedule.beside, "some Ws run beside Bs"
    return replace(pipe.compiled, schedule=schedule)


@functools.cache
def subjects() -> dict[str, tuple[zbfx.Pipeline, Compiled]]:
    """Pipelines by name: the one that was compiled, and what its programs are generated from."""
    plain, folded = compiled("zb-h1"), compiled("zb-v-order", ranks=2)
    return {
        "zb-h1": (plain, plain.compiled),
        "zb-v-order": (folded, folded.compiled),
        "Ws beside Bs": (plain, overlapped(plain)),
        "replicas": (plain, replicated(plain.compiled, 2)),
        "ZeRO-1": (plain, replicated(plain.compiled, 2).sharded()),
    }


def with_graph(program: Program, mutate: Mutate, draw: random.Random) -> Program | None:
    """A copy of a program with another graph; None if there was nothing to change."""
    graph = copy_graph(program.module.graph)
    if not mutate(graph, draw):
        return None
    modules = dict(program.module.named_children())
    return replace(program, module=graph_module(modules, graph, type(program.module).__name__))


@dataclass
class Subject:
    """A pipeline, its good programs, and what they leave."""

    pipe: zbfx.Pipeline
    made: Compiled
    data: Data
    good: list[dict[str, Tensor]]

    @classmethod
    def of(cls, pipe: zbfx.Pipeline, made: Compiled) -> Subject:
        data = random_data(made, pipe.source, Values.RANDOM, 0, 2)
        return cls(pipe, made, data, left_by(made, data, made.programs))

    def is_refused(self, programs: Sequence[Program]) -> bool:
        try:
            verify(tuple(programs), after="a mutation", given=self.made.schedule)
        except BrokenGraph:
            return True
        return False

    def is_harmless(self, programs: Sequence[Program]) -> bool:
        try:
            found = left_by(self.made, self.data, programs)
        except Exception:
            return False
        return all(
            one.keys() == other.keys() and all(torch.allclose(one[k], other[k], rtol=1e-12, atol=1e-15) for k in one)
            for one, other in zip(found, self.good, strict=True)
        )


def left_by(made: Compiled, data: Data, programs: Sequence[Program]) -> list[dict[str, Tensor]]:
    run = replace(made)
    vars(run)["programs"] = tuple(copy_modules(program) for program in programs)
    return [dict(results.values) for results in emitted_results(run, data)]


def copy_modules(program: Program) -> Program:
    """A program whose modules no other program shares: running binds tensors to them. In one process, which holds all
    parameters, nothing is collected."""
    modules = {name: copy.copy(module) for name, module in program.module.named_children()}
    graph = copy_graph(program.module.graph)
    for node in reversed(calls_of(graph, ops.gather, ops.gathered)):
        graph.erase_node(node)
    for node in [n for n in graph.nodes if n.op == "call_module" and isinstance(modules[n.target], ParameterBucket)]:
        graph.erase_node(node)
    return replace(program, module=graph_module(modules, graph, type(program.module).__name__))


def mutations(count: int, seed: int) -> Iterator[tuple[str, str, int, Program]]:
    """So many of them, each with its kind, the name of its subject and its rank. The kinds take turns."""
    draw = random.Random(seed)
    for number in range(count):
        kind = [*KINDS][number % len(KINDS)]
        for _ in range(DRAWS):
            name = draw.choice([*subjects()])
            programs = subjects()[name][1].programs
            rank = draw.randrange(len(programs))
            program = with_graph(programs[rank], KINDS[kind], draw)
            if program is not None:
                yield kind, name, rank, program
                break
        else:
            raise AssertionError(f"no program has anything that '{kind}' could change")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print what is not refused")
    options = parser.parse_args(arguments)
    with Modes.now().fixed():
        return judge(options.count, options.seed, options.verbose)


def judge(count: int, seed: int, verbose: bool) -> int:
    judged = {name: Subject.of(*parts) for name, parts in subjects().items()}
    table: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for kind, name, rank, program in mutations(count, seed):
        subject = judged[name]
        programs = list(subject.made.programs)
        programs[rank] = program
        if subject.is_refused(programs):
            verdict = "refused"
        else:
            verdict = "harmless" if subject.is_harmless(programs) else "wrong"
            if verbose or verdict == "wrong":
                print(f"{verdict}: {kind}, {name}, rank {rank}\n{difference(subject.made.programs[rank], program)}")
        table[kind][verdict] += 1
    print(f"{'mutation':34}{'refused':>9}{'harmless':>9}{'wrong':>9}")
    for kind, counts in table.items():
        print(f"{kind:34}" + "".join(f"{counts[verdict]:9}" for verdict in ("refused", "harmless", "wrong")))
    total = sum(table.values(), Counter[str]())
    print(
        f"{total.total()} mutations, seed {seed}: "
        + ", ".join(f"{n} {verdict}" for verdict, n in sorted(total.items()))
    )
    passed = [kind for kind in STATIC if table[kind]["harmless"] or table[kind]["wrong"]]
    for kind in passed:
        print(f"not refused in every case: {kind}")
    return 1 if total["wrong"] or passed else 0


def difference(before: Program, after: Program) -> str:
    good, mutated = ([f"{node.format_node()}" for node in p.module.graph.nodes] for p in (before, after))
    return "\n".join(difflib.unified_diff(good, mutated, "good", "mutated", lineterm="", n=1))


if __name__ == "__main__":
    sys.exit(main())
