"""Records, graphs and tensors <-> plain data, which JSON can hold. Nothing of it is executed.

Takes   what the fields of a `Compiled` lead to, new fields of its records included; or the data.
Gives   the data, or equal records. A record is written as its class's name and its fields, a graph as a list of nodes.
Raises  `ZbfxError` for what cannot be written, naming the field, and for data that no record was written as.

    null, true, 1, 0.5, "text"    themselves          [1, 2]                  a tuple
    {"list": [1, 2]}              a list              {"map": [["a", 1]]}     a dict
    {"record": ["Port", {...}]}   a record            {"enum": ["Kind", "F"]} one of an enumeration
    {"fake": [...]}               a fake tensor       {"tensor": [...]}       a tensor, whose bytes are kept apart
    {"graph": [...]}              a graph             {"node": 3}             its node 3, in its later nodes
    {"op": "aten.add.Tensor"}     an operator         {"module": ["F0", {}]}  a graph module
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from zbfx._torch.compiling import graph_module
from zbfx._torch.fakes import FakeTensorMode, fake_strided, is_fake
from zbfx._torch.operators import Operator
from zbfx._torch.tensors import TreeSpec, pytree
from zbfx.errors import ZbfxError
from zbfx.passes.positions import IS_PLACED
from zbfx.plan import Action, Kind
from zbfx.plans.conforming import conforms, fields_of, is_named_tuple, is_record
from zbfx.plans.operators import name_of, target_of
from zbfx.timing.views import View

NODE_KINDS = ("placeholder", "call_function", "output")
KEPT_META = ("val", "is_backward", "seq_nr", "stack_trace", IS_PLACED)  # what passes read
ENUMERATED = torch.dtype | torch.layout | torch.memory_format
TORCH_VALUES = {str(value): value for value in vars(torch).values() if isinstance(value, ENUMERATED)}


@dataclass
class RecordWriter:
    """Writes values as data. `device` is the pipeline's, `namespaces` are those of further operators, `kinds` the
    records and enumerations that there are, by name. `tensors` gathers the tensors with data that it meets."""

    device: torch.device
    namespaces: Collection[str]
    kinds: Mapping[str, type]
    tensors: list[Tensor] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    nodes: dict[fx.Node, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)

    def data(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if abs(value) < float("inf") else {"float": repr(value)}
        if type(value) is tuple:
            return [self.data(entry) for entry in value]
        if isinstance(value, Action):
            return {"action": [value.kind.value, value.stage, value.microbatch]}
        if self.kinds.get(type(value).__name__) is type(value):
            return {"enum": [type(value).__name__, value.name]} if isinstance(value, Enum) else self.record(value)
        for kind, write in WRITTEN.items():
            if isinstance(value, kind) and not is_named_tuple(type(value)):
                return write(self, value)
        raise self.refusal(value)

    def refusal(self, value: Any) -> ZbfxError:
        text, kind = f"{value!r}"[:200], f"{type(value).__module__}.{type(value).__qualname__}"
        return ZbfxError(
            f"{'.'.join(self.path) or 'the pipeline'} is {text}, a {kind}, which a plan on disk cannot hold: it has "
            f"numbers, texts, tensors, and tuples, lists and dicts of these"
        )

    def record(self, record: Any) -> Any:
        kind: Any = type(record)
        found = {name: self.inside(name, getattr(record, name)) for name in fields_of(kind)}
        return {"record": [kind.__name__, found]}

    def inside(self, name: str, value: Any) -> Any:
        """The data of a part, whose name is told where it cannot be written."""
        self.path.append(name)
        found = self.data(value)
        self.path.pop()
        return found

    def mapping(self, value: Mapping[Any, Any]) -> Any:
        if type(value) not in (dict, fx.immutable_collections.immutable_dict):
            raise self.refusal(value)
        return {"map": [[self.data(key), self.inside(str(key), entry)] for key, entry in value.items()]}

    def device_of(self, device: torch.device) -> Any:
        """A device, or that of the pipeline, which may have another number where the plan is loaded."""
        return {"device": None if device.type == self.device.type else device.type}

    def tensor(self, value: Tensor) -> Any:
        layout = [str(value.dtype), list(value.shape), list(value.stride()), self.device_of(value.device)["device"]]
        if is_fake(value):
            return {"fake": [*layout, value.storage_offset()]}
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            raise self.refusal(value)
        if value.is_meta:
            return {"meta": layout}
        if id(value) not in self.known:
            self.known[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return {"tensor": [*layout, self.known[id(value)]]}

    def graph(self, graph: fx.Graph) -> Any:
        outside, self.nodes = self.nodes, {}
        try:
            return {"graph": [self.node(node) for node in graph.nodes]}
        finally:
            self.nodes = outside

    def node(self, node: fx.Node) -> list[Any]:
        target = node.target
        if node.op not in NODE_KINDS:
            raise ZbfxError(f"the graph has the node {node.format_node()}, which a plan on disk cannot hold")
        name = target if isinstance(target, str) else name_of(target, self.namespaces)
        meta = {key: self.inside(key, node.meta[key]) for key in KEPT_META if key in node.meta}
        found = [NODE_KINDS.index(node.op), node.name, name, self.data(node.args), self.data(node.kwargs), meta]
        self.nodes[node] = len(self.nodes)
        return found


WRITTEN: Mapping[Any, Callable[[RecordWriter, Any], Any]] = {
    fx.Node: lambda writer, value: {"node": writer.nodes[value]},
    fx.Graph: lambda writer, value: writer.graph(value),
    fx.GraphModule: lambda writer, value: {"module": [type(value).__name__, writer.graph(value.graph)]},
    Operator: lambda writer, value: {"op": name_of(value, writer.namespaces)},
    TreeSpec: lambda writer, value: {"structure": writer.inside("arguments", nested(value))},
    Tensor: RecordWriter.tensor,
    torch.device: RecordWriter.device_of,
    ENUMERATED: lambda writer, value: {"torch": str(value)},
    torch.Size: lambda writer, value: {"size": list(value)},
    Fraction: lambda writer, value: {"fraction": [value.numerator, value.denominator]},
    complex: lambda writer, value: {"complex": [writer.data(value.real), writer.data(value.imag)]},
    slice: lambda writer, value: {"slice": [*map(writer.data, (value.start, value.stop, value.step))]},
    type(...): lambda writer, value: {"ellipsis": None},
    Mapping: RecordWriter.mapping,
    list: lambda writer, value: {"list": [writer.data(entry) for entry in value]},
    View: lambda writer, value: [writer.data(entry) for entry in value],
    frozenset: lambda writer, value: {"set": sorted(map(writer.data, value), key=repr)},
}


def nested(structure: Any) -> Any:
    """Arguments of a call that have this structure: in the place of each leaf its number."""
    return pytree.tree_unflatten(range(structure.num_leaves), structure)


@dataclass
class RecordReader:
    """Reads what a `RecordWriter` wrote, for a pipeline on `device`. `kinds` are the records and enumerations that
    there may be, by name. `tensors` gives the tensor of a number and layout. Raises `ZbfxError`, and what Python and
    torch raise for wrong values: no file that was written raises either."""

    device: torch.device
    namespaces: Collection[str]
    kinds: Mapping[str, type]
    tensors: Callable[[int, torch.dtype, tuple[int, ...], tuple[int, ...]], Tensor]
    mode: Any = field(default_factory=FakeTensorMode)
    nodes: list[fx.Node] = field(default_factory=list)

    def value(self, data: Any) -> Any:
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if isinstance(data, list):
            return tuple(map(self.value, data))
        ((tag, content),) = data.items()
        return READ[tag](self, content)

    def record(self, content: Any) -> Any:
        name, given = content
        kind = self.kinds[name]
        expected = fields_of(kind)
        if not is_record(kind) or given.keys() != expected.keys():
            raise ZbfxError(f"a {name} has the fields {', '.join(expected)}; found {', '.join(given)}"[:500])
        values = {field_name: self.value(data) for field_name, data in given.items()}
        for field_name, hint in expected.items():
            if not conforms(values[field_name], hint):
                found = f"{values[field_name]!r}"[:100]
                raise ZbfxError(f"{name}.{field_name} is a {hint}; found {found}")
        return kind(**values)

    def device_of(self, device: str | None) -> torch.device:
        return self.device if device is None else torch.device(device)

    def layout(self, content: Sequence[Any]) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device, Any]:
        dtype, shape, stride, device, last = content
        sizes = [size for sizes in (shape, stride) for size in sizes]
        if not all(type(size) is int and size >= 0 for size in sizes) or len(shape) != len(stride):
            raise ZbfxError(f"a tensor has a size and a stride in each dimension; found {shape}, {stride}"[:300])
        found = TORCH_VALUES[dtype]
        if not isinstance(found, torch.dtype):
            raise ZbfxError(f"a tensor has a dtype; found {dtype}")
        return found, tuple(shape), tuple(stride), self.device_of(device), last

    def fake(self, content: Any) -> Tensor:
        dtype, shape, stride, device, offset = self.layout(content)
        return fake_strided(self.mode, shape, stride, offset, dtype, device)

    def meta(self, content: Any) -> Tensor:
        dtype, shape, stride, _, _ = self.layout([*content, 0])
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def tensor(self, content: Any) -> Tensor:
        dtype, shape, stride, device, number = self.layout(content)
        return self.tensors(number, dtype, shape, stride).to(device)

    def graph(self, rows: Any) -> fx.Graph:
        outside, self.nodes = self.nodes, []
        try:
            graph = fx.Graph()
            for row in rows:
                self.nodes.append(self.node(graph, row))
            return graph
        finally:
            self.nodes = outside

    def node(self, graph: fx.Graph, row: Any) -> fx.Node:
        """Names of nodes, inputs and arguments become names in Python code, and texts may come to stand in comments."""
        number, name, text, *rest = row
        args, kwargs, meta = map(self.value, rest[:2]), None, rest[2]
        args, kwargs = args
        kind = NODE_KINDS[number]
        target = target_of(text, self.namespaces) if number == CALL else text
        for word in (name, *kwargs, *([] if number == CALL else [text])):
            if not (isinstance(word, str) and word.isidentifier() and not keyword.iskeyword(word)):
                raise ZbfxError(f"nodes and arguments of a graph have names of Python; found {word!r}"[:300])
        refuse_unprintable((args, kwargs))
        if number == OUTPUT and self.nodes and self.nodes[-1].op == NODE_KINDS[OUTPUT]:
            raise ZbfxError("a graph ends with its output; found two")
        node = graph.create_node(kind, target, name=name)
        if node.name != name:
            raise ZbfxError(f"nodes of a graph have names that differ; found {name!r} again"[:300])
        node.args, node.kwargs = args, kwargs
        if not set(meta) <= {*KEPT_META}:
            raise ZbfxError(f"a node's record has {', '.join(KEPT_META)}; found {', '.join(meta)}"[:300])
        node.meta = {key: self.value(data) for key, data in meta.items()}
        return node

    def module(self, content: Any) -> fx.GraphModule:
        name, data = content
        if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)):
            raise ZbfxError(f"a graph's module has a name of Python; found {name!r}"[:300])
        graph = self.value(data)
        if not isinstance(graph, fx.Graph):
            raise ZbfxError(f"a module has a graph; found {type(graph).__name__}")
        return graph_module(torch.nn.Module(), graph, name)

    def enum(self, content: Any) -> Enum:
        name, member = content
        kind = self.kinds[name]
        if not issubclass(kind, Enum):
            raise ZbfxError(f"{name} is no enumeration")
        return kind[member]


PLACEHOLDER, CALL, OUTPUT = range(3)


def action_of(kind: Any, stage: Any, microbatch: Any) -> Action:
    if not (isinstance(stage, int) and isinstance(microbatch, int) and stage >= 0 and microbatch >= 0):
        raise ZbfxError(f"an action has a stage and a microbatch; found {stage!r}, {microbatch!r}"[:200])
    return Action(Kind(kind), stage, microbatch)


def refuse_unprintable(value: Any) -> None:
    """Compilers write texts of graphs into comments of code, where a line break would end the comment."""
    if isinstance(value, str) and not value.isprintable():
        raise ZbfxError(f"texts of a graph have one line and no control characters; found {value!r}"[:300])
    if isinstance(value, Mapping):
        value = (*value, *value.values())
    for entry in value if isinstance(value, tuple | list) else ():
        refuse_unprintable(entry)


READ: Mapping[str, Callable[[RecordReader, Any], Any]] = {
    "record": RecordReader.record,
    "enum": RecordReader.enum,
    "action": lambda reader, data: action_of(*data),
    "node": lambda reader, data: reader.nodes[data],
    "graph": RecordReader.graph,
    "module": RecordReader.module,
    "op": lambda reader, data: target_of(data, reader.namespaces),
    "structure": lambda reader, data: pytree.tree_structure(reader.value(data)),
    "fake": RecordReader.fake,
    "meta": RecordReader.meta,
    "tensor": RecordReader.tensor,
    "device": lambda reader, data: reader.device_of(data),
    "torch": lambda reader, data: TORCH_VALUES[data],
    "size": lambda reader, data: torch.Size(data),
    "fraction": lambda reader, data: Fraction(*data),
    "complex": lambda reader, data: complex(*map(reader.value, data)),
    "float": lambda reader, data: float(data),
    "slice": lambda reader, data: slice(*map(reader.value, data)),
    "ellipsis": lambda reader, data: ...,
    "list": lambda reader, data: [*map(reader.value, data)],
    "map": lambda reader, data: {reader.value(key): reader.value(entry) for key, entry in data},
    "set": lambda reader, data: frozenset(map(reader.value, data)),
}
