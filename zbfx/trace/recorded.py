"""What the layers of a model run in one forward, operator by operator, and which of them run the same.

In: the modules that may be alike. Out: a `LayerCall` for each time that one of them ran. Calls with equal keys ran the
same operators with the same arguments, up to which parameters they read, and left equal graphs of autograd behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbfx import _torch
from zbfx.passes.nodes import draws

PLAIN_VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
)


class Unknown(Exception):
    """A call does something that no record can hold."""


def plain_value(value: Any) -> tuple[Any, Any, str]:
    """A value that is equal to others by its type and itself."""
    if not isinstance(value, PLAIN_VALUES):
        raise Unknown(f"an argument of {type(value).__name__}")
    return type(value), value, repr(value)  # 0.0 and -0.0 are equal


class LeafPlace(NamedTuple):
    """A tensor among arguments or results, by its place among those of a kind."""

    number: int
    is_made: bool = False  # in the call, or else one of its arguments


@dataclass(frozen=True)
class LayerArguments:
    """The arguments of a call: the tensors among them, each once, and all leaves, each a place or a plain value."""

    inputs: list[Tensor]
    leaves: list[Any]
    spec: Any
    doubt: str = ""

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> LayerArguments:
        flat, spec = _torch.pytree.tree_flatten((args, kwargs))
        inputs = {id(value): value for value in flat if isinstance(value, Tensor)}
        place = {key: LeafPlace(number) for number, key in enumerate(inputs)}
        leaves, doubt = list[Any](), ""
        for value in flat:
            try:
                leaves.append(place[id(value)] if isinstance(value, Tensor) else plain_value(value))
            except Unknown as why:
                doubt = str(why)
        return cls(list(inputs.values()), leaves, spec, doubt)


@dataclass(eq=False)
class LayerCall:
    """One call of a layer. `results` are the leaves of its output, each a place or a plain value, and `made` the
    tensors among them that are no inputs. `tensors` are the layer's parameters and buffers, `operators` what it ran,
    `doubt` why that says too little."""

    name: str
    layer: nn.Module
    given: LayerArguments
    tensors: dict[str, Tensor]
    operators: list[Any] = field(default_factory=list)
    numbers: dict[int, Any] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    result_spec: Any = None
    autograd: Any = None
    doubt: str = ""

    @property
    def inputs(self) -> list[Tensor]:
        return self.given.inputs

    @property
    def key(self) -> tuple[Any, ...]:
        """What calls that run the same have in common."""
        given = [tensor_layout(tensor) for tensor in self.inputs]
        held = [(name, tensor_layout(tensor)) for name, tensor in self.tensors.items()]
        made = [tensor_layout(tensor) for tensor in self.made]
        known = (type(self.layer), self.given.leaves, self.given.spec, given, held, self.operators)
        return (*known, self.results, self.result_spec, made, self.autograd)


def tensor_layout(tensor: Tensor) -> tuple[Any, ...]:
    placed = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return (*placed, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor), isinstance(tensor, nn.Parameter))


class LayerRecorder(_torch.TorchDispatchMode):
    """Records a forward: the calls of `layers`, and what runs between them (`between`)."""

    supports_higher_order_operators = True  # else none runs under a mode

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = layers
        self.calls: list[LayerCall] = []
        self.current: LayerCall | None = None
        self.between: list[Any] = []
        self.numbers: dict[int, Any] = {}
        self.alive: list[Tensor] = []
        self.owner: dict[int, LayerCall] = {}  # of what was made in a layer and is no result of it
        self.readers: Counter[int] = Counter()  # of tensors outside of layers
        self.doubt = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.doubt:
            return result
        try:
            self.note(func, args, kwargs or {}, result)
        except Unknown as why:
            self.doubts(str(why))
        return result

    def doubts(self, why: str) -> None:
        if self.current is None:
            self.doubt = self.doubt or why
        else:
            self.current.doubt = self.current.doubt or why

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        call = self.current
        if call is not None and call.doubt:
            return
        operators, numbers = (self.between, self.numbers) if call is None else (call.operators, call.numbers)
        if call is not None:
            if _torch.schema_of(func) is None or draws(func, args, kwargs):
                raise Unknown(f"{func}")
            if _torch.keeps_saved_tensors_otherwise():
                raise Unknown("hooks on what the backward reads")
        number = self.number_outside if call is None else self.number_inside
        operators.append((func, torch.is_grad_enabled(), self.spelled((args, kwargs), number)))
        for tensor in _torch.pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in numbers:
                numbers[id(tensor)] = len(numbers)
                (self.alive if call is None else call.alive).append(tensor)
                if call is not None:
                    self.owner[id(tensor)] = call

    def spelled(self, value: Any, number: Callable[[Tensor], Any]) -> Any:
        if isinstance(value, Tensor):
            return number(value)
        if isinstance(value, tuple | list):
            return tuple([self.spelled(entry, number) for entry in value])
        if isinstance(value, dict):
            return tuple([(key, self.spelled(entry, number)) for key, entry in value.items()])
        return plain_value(value)

    def number_inside(self, tensor: Tensor) -> Any:
        assert self.current is not None
        if id(tensor) not in self.current.numbers:
            if id(tensor) in self.owner:
                self.owner[id(tensor)].doubt = "another layer reads what it made"
            raise Unknown("a tensor that is no argument, parameter or buffer")
        return "tensor", self.current.numbers[id(tensor)]

    def number_outside(self, tensor: Tensor) -> Any:
        if id(tensor) in self.owner:
            self.owner[id(tensor)].doubt = "other code reads what it made"
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = len(self.numbers)
            self.alive.append(tensor)
        self.readers[id(tensor)] += 1
        return "tensor", self.numbers[id(tensor)]

    def run(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward of a layer, and record it."""
        if self.current is not None:  # within another layer
            return forward(*args, **kwargs)
        layer = self.layers[name]
        call = self.begun(name, layer, args, kwargs)
        self.calls.append(call)
        before, self.current = layer_state(layer), call
        try:
            output = forward(*args, **kwargs)
        finally:
            self.current = None
        if layer_state(layer) != before:
            call.doubt = call.doubt or "its attributes change"
        self.ended(call, output)
        return output

    def begun(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> LayerCall:
        call = LayerCall(name, layer, LayerArguments.of(args, kwargs), held_by(layer))
        if call.given.doubt:
            call.doubt = call.given.doubt
        self.between.append((name, tuple(self.number_outside(tensor) for tensor in call.inputs)))
        for tensor in (*call.inputs, *call.tensors.values()):
            call.numbers.setdefault(id(tensor), len(call.numbers))
        return call

    def ended(self, call: LayerCall, output: Any) -> None:
        flat, call.result_spec = _torch.pytree.tree_flatten(output)
        place = {id(tensor): LeafPlace(number) for number, tensor in enumerate(call.inputs)}
        try:
            for value in flat:
                if not isinstance(value, Tensor):
                    call.results.append(plain_value(value))
                elif id(value) in place:
                    call.results.append(place[id(value)])
                else:
                    if id(value) not in self.owner:
                        raise Unknown("a result that it did not make")
                    place[id(value)] = LeafPlace(len(call.made), is_made=True)
                    call.made.append(value)
                    call.results.append(place[id(value)])
            call.autograd = autograd_of(call)
        except Unknown as why:
            call.doubt = call.doubt or str(why)
        if any(_torch.has_hooks(tensor) for tensor in (*call.alive, *call.inputs, *call.tensors.values())):
            call.doubt = call.doubt or "hooks on gradients"
        for tensor in call.made:
            self.owner.pop(id(tensor), None)
            self.numbers.setdefault(id(tensor), len(self.numbers))

    def alike(self) -> list[list[LayerCall]]:
        """The calls that can stand for each other, in groups."""
        if self.doubt:
            return []
        times = Counter(call.name for call in self.calls)
        used = Counter(id(tensor) for call in self.calls for tensor in call.tensors.values())
        groups: list[tuple[Any, list[LayerCall]]] = []
        for call in self.calls:
            # The gradient of what others read too is a sum, whose order could be another.
            shared = any(t.requires_grad and self.readers[id(t)] > 1 for t in call.inputs)
            shared |= any(
                t.requires_grad and (used[id(t)] > 1 or self.readers[id(t)] > 0) for t in call.tensors.values()
            )
            trains = any(tensor.requires_grad for tensor in call.made)
            if call.doubt or times[call.name] > 1 or shared or not trains:
                continue
            key = call.key
            group = next((group for known, group in groups if known == key), None)
            if group is None:
                groups.append((key, group := []))
            group.append(call)
        return [group for _, group in groups]


def held_by(layer: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a layer."""
    return dict(layer.named_parameters(remove_duplicate=False)) | dict(layer.named_buffers(remove_duplicate=False))


def layer_state(layer: nn.Module) -> list[Any]:
    """The attributes of a layer and its submodules: plain values, and which objects the others are."""
    return [(name, key, shallow(value)) for name, part in layer.named_modules() for key, value in vars(part).items()]


def shallow(value: Any) -> Any:
    if isinstance(value, PLAIN_VALUES):
        return value
    if isinstance(value, dict):
        return id(value), [(key, id(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple | set):
        return id(value), [id(entry) for entry in value]
    return id(value)


def autograd_of(call: LayerCall) -> list[Any]:
    """The graph of autograd between results and inputs of a call. Raises `Unknown` for a custom Function, and where the
    graph leads to what is neither an input nor a parameter of the layer."""
    ends: dict[Any, tuple[str, Any]] = {
        gradient_edge(t): ("input", k) for k, t in enumerate(call.inputs) if t.requires_grad
    }
    ends |= {gradient_edge(t): ("held", name) for name, t in call.tensors.items() if t.requires_grad}
    roots = [gradient_edge(tensor) for tensor in call.made if tensor.requires_grad]
    numbers: dict[Any, int] = {}
    found: list[Any] = [[]]
    waiting = list[Any]()

    def told(edge: Any) -> Any:
        node, number = edge
        if node is None:
            return None
        if hasattr(node, "variable"):
            edge = id(node.variable), 0
        if edge in ends:
            return ends[edge]
        if node not in numbers:
            if not node.next_functions or isinstance(node, torch.autograd.function.BackwardCFunction):
                raise Unknown(f"{node.name()} in its backward")
            numbers[node] = len(numbers)
            waiting.append(node)
        return numbers[node], number

    found[0] = [told(edge) for edge in roots]
    while waiting:
        node = waiting.pop()
        found.append((numbers[node], node.name(), [told(edge) for edge in node.next_functions]))
        if len(found) > MOST_NODES:
            raise Unknown("a backward that leads out of it")
    return found


MOST_NODES = 20_000


def gradient_edge(tensor: Tensor) -> tuple[Any, int]:
    """The node of autograd that makes the gradient of a tensor, and which of its gradients that is; for a leaf, which
    has none, the tensor's number in memory."""
    return (tensor.grad_fn, tensor.output_nr) if tensor.grad_fn is not None else (id(tensor), 0)


def repeated(model: nn.Module, least: int) -> dict[str, nn.Module]:
    """The modules that may be alike, by name: at least `least` of one class in one list. None lies in another, and none
    has parts that others have."""
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    times = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for prefix, parent in model.named_modules():
        if not isinstance(parent, nn.ModuleList | nn.Sequential) or parent in inside:
            continue
        children = [(name, child) for name, child in parent.named_children() if stands_alone(child, times)]
        classes = Counter(type(child) for _, child in children)
        for name, child in children:
            if classes[type(child)] >= least:
                found[f"{prefix}.{name}".removeprefix(".")] = child
                inside |= {*child.modules()}
    return found


def stands_alone(module: nn.Module, times: Mapping[nn.Module, int]) -> bool:
    """Whether a module has parts, and `times` says of each that it has one name."""
    parts = list(module.modules())
    return len(parts) > 1 and all(times[part] == 1 for part in parts)
