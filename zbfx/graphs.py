"""Frozen types that hold fx graphs, in the order in which they arise.

    Joint       one graph: forward, loss and backward of one microbatch
    Line        where each of its nodes sits along the model
    Placed      the stage of each node
    Split       the phase, F, B or W, of each node, and what prologues make
    Stage       the P, F, B and W graphs of one stage and their calling convention

A value keeps the name of its node in the joint graph all the way down to the rank programs. Records that hold graphs
are equal to themselves alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx

from zbfx.metrics import MetricKind
from zbfx.plan import Action, Kind


class Role(StrEnum):
    """What an input or output of a joint graph is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # a tensor that the model holds outside its parameters and buffers
    INPUT = "input"  # a tensor of the microbatch: input or target
    LOSS_GRADIENT = "loss gradient"
    LOSS = "loss"
    COUNT = "count"  # by which the sum of all losses is divided
    METRIC = "metric"  # what a loss function returns beside the loss
    OUTPUT = "output"  # what a user asks a forward for
    GRADIENT = "gradient"
    BUFFER_UPDATE = "buffer update"

    def __str__(self) -> str:
        return self.value


LOSS = "loss"  # the name of the port of a loss, and of the loss as a value of programs


@dataclass(frozen=True, slots=True)
class Port:
    """The role of an input or output, and its name: a parameter's or buffer's qualified name, an input's path. Tied
    tensors go by one name. Several GRADIENT outputs may carry one parameter's name: its gradient is their sum."""

    role: Role
    name: str

    def __str__(self) -> str:
        return LOSS if self.role is Role.LOSS else f"{self.role} {self.name}"


LAST = (Role.LOSS, Role.METRIC, Role.OUTPUT)  # what a phase returns for the user, after what other phases read


@dataclass(frozen=True)
class TokenCount:
    """The graph of a microbatch's count, a scalar or one for each loss, from the tensors named by `inputs`."""

    module: fx.GraphModule
    inputs: tuple[str, ...]

    def __call__(self, row: Mapping[str, Tensor]) -> Tensor:
        count: Tensor = self.module(*(row[name] for name in self.inputs))
        return count


@dataclass(frozen=True)
class Returned:
    """The structure of what a forward returns: a pytree spec, and its leaves. A leaf is an OUTPUT port, or a value that
    is no tensor."""

    structure: Any
    leaves: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Joint:
    """One functional aten graph of forward, loss and backward of one microbatch. `inputs` matches the placeholders,
    `outputs` the flat output arguments. Node meta: `val` (a fake tensor), `is_backward`, `seq_nr` (ties a backward node
    to its forward op), `stack_trace` (the user's line). `constants` holds the tensors of CONSTANT inputs; `replaced`
    names the buffers in whose place the forward puts new tensors, like `self.count = self.count + 1`, which the graph
    writes like those that change in place. `grad_dtypes` has the parameters whose gradients are summed over the
    microbatches in another dtype than their own. `notes` say what was traced otherwise than the model asks for.
    `metrics` are those of the loss; `returned`, where a user asked for it, is the structure of the OUTPUT outputs."""

    graph: fx.Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: Mapping[str, Tensor]
    count: TokenCount | None = None
    replaced: frozenset[str] = frozenset()
    grad_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    metrics: tuple[MetricKind, ...] = ()
    returned: Returned | None = None

    def __post_init__(self) -> None:
        assert len(self.placeholders) == len(self.inputs), "a port per placeholder"
        assert len(self.output_values) == len(self.outputs), "a port per output"

    @property
    def placeholders(self) -> list[fx.Node]:
        return self.graph.find_nodes(op="placeholder")

    @property
    def output_values(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def outputs_of(self, role: Role) -> list[fx.Node]:
        return [value for value, port in zip(self.output_values, self.outputs, strict=True) if port.role is role]

    def input_ports(self) -> dict[fx.Node, Port]:
        return dict(zip(self.placeholders, self.inputs, strict=True))


@dataclass(frozen=True, eq=False)
class Line:
    """The nodes of a joint graph along the model. `forward[k]` is the forward node at position k; `position` covers the
    backward nodes too. `gradients` are the nodes that depend on the loss gradient. `original` ties a node that
    recomputes to the forward node that it repeats."""

    forward: tuple[fx.Node, ...]
    position: Mapping[fx.Node, int]
    gradients: frozenset[fx.Node]
    original: Mapping[fx.Node, fx.Node]

    def moved(self, copies: Mapping[fx.Node, fx.Node]) -> Line:
        """The line of a copy of the graph. `copies` gives the copy of each node but of backward nodes that it lacks."""
        return Line(
            tuple(copies[node] for node in self.forward),
            {copies[node]: k for node, k in self.position.items() if node in copies},
            frozenset(copies[node] for node in self.gradients if node in copies),
            {copies[node]: copies[first] for node, first in self.original.items() if node in copies},
        )


@dataclass(frozen=True, eq=False)
class Placed:
    """A joint graph with a stage for each node that belongs to one. Nodes that every stage computes for itself where it
    needs them (views of parameters, masks and positions made from inputs alone) have no entry in `stage_of`."""

    joint: Joint
    line: Line
    stage_of: Mapping[fx.Node, int]
    stage_count: int


@dataclass(frozen=True, eq=False)
class Split:
    """A placed joint graph with a phase (F, B or W) for each node that has a stage, or P, where the prologue of each
    stage that needs its value makes it. `kept` are the values that prologues make for other phases, once a step."""

    placed: Placed
    phase_of: Mapping[fx.Node, Kind]
    kept: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True, slots=True)
class CallBytes:
    """What a call of a phase was measured to hold at its worst, above what was held before it. Where its arguments live
    on: `hidden` beside the values of its graph (workspaces of kernels, what a compiler keeps longer), and `most` in
    all. Where it owns what no later phase reads, as in a step: `usual`, for which the graph says `expected`."""

    hidden: int
    most: int
    expected: int | None = None
    usual: int = 0


@dataclass(frozen=True, eq=False)
class Phase:
    """The prologue, F, B or W of one stage as a graph. The placeholders of `module` are, in this order: `ports` (by
    role: parameters, buffers, constants, microbatch inputs, the loss gradient), `values` (names of values that other
    phases or stages made), an accumulator for each of `gradients` (parameter names) and, if `is_random`, a seed. It
    returns `results` (names of values), then what is for the user, its `last` ports: the loss, metrics, outputs.
    Gradients are added into their accumulators; buffers in `updates` are written in place."""

    stage: int
    kind: Kind
    module: fx.GraphModule
    ports: tuple[Port, ...]
    values: tuple[str, ...]
    gradients: tuple[str, ...]
    updates: tuple[str, ...]
    results: tuple[str, ...]
    last: tuple[Port, ...]
    is_random: bool
    part: int | None = None  # a W of some of the stage's parameters
    measured: CallBytes | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}{self.stage}" + ("" if self.part is None else f"p{self.part}")

    @property
    def has_loss(self) -> bool:
        return any(port.role is Role.LOSS for port in self.last)

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of all that it returns, in order."""
        return (*self.results, *map(str, self.last))

    @property
    def is_empty(self) -> bool:
        """Nothing to compute or check: a frozen stage's B, or the W of a stage without parameters."""
        if self.results or self.gradients or self.updates or self.last:
            return False
        return not any(node.is_impure() for node in self.module.graph.nodes if node.op == "call_function")

    def most_bytes(self, peak: int) -> int:
        """What a call holds at its worst above what was held before it, where the values of its graph take `peak`. A
        compiler may make less of them."""
        if self.measured is None:
            return peak
        if peak == self.measured.expected:
            return self.measured.usual
        return min(peak + self.measured.hidden, self.measured.most)

    def port_names(self, role: Role) -> tuple[str, ...]:
        return tuple(port.name for port in self.ports if port.role is role)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that the phase reads or gives a gradient to."""
        return tuple(dict.fromkeys((*self.port_names(Role.PARAMETER), *self.gradients)))

    @property
    def sums(self) -> dict[str, Tensor]:
        """The fake value of the sum of each gradient, by parameter."""
        accumulators = self.module.graph.find_nodes(op="placeholder")[len(self.ports) + len(self.values) :]
        return {name: node.meta["val"] for name, node in zip(self.gradients, accumulators, strict=False)}


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage's phases, and about each name in their `values` and `results`: its fake value (`examples`), the
    storage behind it and that storage's bytes (`storages`; an expression where sizes are symbols), and the stage and
    phase that make it (`origins`). `start` is the position along the model at which the stage begins."""

    index: int
    start: int
    phases: Mapping[Kind, Phase]
    examples: Mapping[str, Tensor]
    storages: Mapping[str, tuple[str, Any]]
    origins: Mapping[str, tuple[int, Kind]]

    def stored_bytes(self, names: Iterable[str]) -> Any:
        """Bytes behind these values, each storage once."""
        return sum(dict(self.storages[name] for name in names).values())

    @property
    def saved_bytes(self) -> int:
        """The paper's M_B: bytes held from F until B or W."""
        return self.stored_bytes(self.saved)

    @property
    def weight_saved_bytes(self) -> int:
        """The paper's M_W: bytes held from B until W."""
        return self.stored_bytes(name for name in self.phases[Kind.W].values if name not in self.kept)

    @property
    def kept(self) -> frozenset[str]:
        """The values that the prologue makes, once a step, for all other phases."""
        return frozenset(self.phases[Kind.P].results)

    @property
    def kept_bytes(self) -> int:
        """Bytes held from the prologue to the end of the step."""
        return self.stored_bytes(self.kept)

    def is_sent(self, name: str) -> bool:
        """Whether this stage makes a value that it does not read itself: for others alone."""
        inside = any(name in phase.values for phase in self.phases.values())
        return self.origins[name][0] == self.index and not inside

    @property
    def saved(self) -> frozenset[str]:
        """The values held from F until B or W: made or received in F, read later."""
        later = {*self.phases[Kind.B].values, *self.phases[Kind.W].values}
        return frozenset(
            name for name in later if self.origins[name][1] is Kind.F and self.origins[name][0] <= self.index
        )

    @property
    def runs_beside(self) -> bool:
        """Whether W may run at the same time as a B of another microbatch: neither writes what the other uses."""
        first, last = [self.phases[kind] for kind in (Kind.F, Kind.B)], self.phases[Kind.W]
        written = {name for phase in first for name in (*phase.gradients, *phase.updates)}
        used = {*last.gradients, *last.port_names(Role.BUFFER)}
        return not (last.is_empty or last.is_random or last.updates or written & used)


@dataclass(frozen=True, eq=False)
class Forms:
    """The stages of a step's microbatches: one list of stages for each shape, and for each microbatch the place of its
    own list among `stages`."""

    stages: tuple[Sequence[Stage], ...]
    of: tuple[int, ...]

    @classmethod
    def alike(cls, stages: Sequence[Stage], microbatches: int) -> Forms:
        """All microbatches have one shape."""
        return cls((stages,), (0,) * microbatches)

    def phase(self, action: Action) -> Phase:
        return self.stages[self.of[action.microbatch]][action.stage].phases[action.kind]

    def prologue(self, form: int, stage: int) -> int:
        """The first of the forms that share the prologue of a stage with this one: it runs once for all of them."""
        own = self.stages[form][stage].phases[Kind.P]
        return next(k for k, stages in enumerate(self.stages) if stages[stage].phases[Kind.P] is own)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, with the names and metadata of its nodes."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copy_node(copy, node, nodes)
    return copy


def copy_node(graph: fx.Graph, node: fx.Node, nodes: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node of another graph, on the copies of its arguments that `nodes` gives."""
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    copy.args = fx.map_arg(node.args, nodes.__getitem__)
    if node.kwargs:
        copy.kwargs = fx.map_arg(node.kwargs, nodes.__getitem__)
    copy.meta.update(node.meta)
    return copy


def add_node(graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], name: str | None = None) -> fx.Node:
    """A new node. Its arguments come after it, for `Graph.create_node` looks for symbols in each of them, which takes
    it longer than all else."""
    node = graph.create_node(op, target, name=name)
    node.args = args
    return node
