"""A call of a layer in one forward: what it is given, runs operator by operator, returns, and leaves to autograd.

In: what `LayerRecorder` sees of the call. Out: a `LayerCall`, whose `key` is that of other calls which run the same, up
to which parameters they read, or whose `doubt` says why its record holds too little.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbfx._torch.tensors import has_hooks, pytree, storage_of

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
MOST_NODES = 20_000  # of autograd, in the backward of a layer


class Unknown(Exception):
    """A call does something that no record can hold."""


def plain_value(value: Any) -> tuple[Any, Any, str]:
    """A value that is equal to others by its type and itself."""
    if not isinstance(value, PLAIN_VALUES):
        raise Unknown(f"an argument is of {type(value).__name__}")
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
        flat, spec = pytree.tree_flatten((args, kwargs))
        inputs = {id(value): value for value in flat if isinstance(value, Tensor)}
        place = {key: LeafPlace(number) for number, key in enumerate(inputs)}
        leaves, doubt = list[Any](), ""
        for value in flat:
            try:
                leaves.append(place[id(value)] if isinstance(value, Tensor) else plain_value(value))
            except Unknown as why:
                doubt = str(why)
        return cls(list(inputs.values()), leaves, spec, doubt)

    def are(self, others: LayerArguments) -> bool:
        """Whether these are the very tensors and values of others."""
        tensors = [list(map(id, given.inputs)) for given in (self, others)]
        return tensors[0] == tensors[1] and (self.leaves, self.spec) == (others.leaves, others.spec)


@dataclass(eq=False)
class LayerCall:
    """One call of a layer. `results` are the leaves of its output, each a place or a plain value, and `made` the
    tensors among them that are no inputs. `tensors` are the layer's parameters and buffers, `operators` what it ran,
    `attributes` how many a tensor has had as it came up, and `doubt` why all this says too little."""

    name: str
    layer: nn.Module
    given: LayerArguments
    tensors: dict[str, Tensor]
    operators: list[Any] = field(default_factory=list)
    numbers: dict[int, Any] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)
    attributes: dict[int, int] = field(default_factory=dict)
    made: list[Tensor] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    result_spec: Any = None
    autograd: Any = None
    doubt: str = ""

    def doubts(self, why: str) -> None:
        self.doubt = self.doubt or why

    @property
    def inputs(self) -> list[Tensor]:
        return self.given.inputs

    @property
    def trail(self) -> tuple[Any, ...]:
        """What it did with tensors."""
        layouts = [list(map(tensor_layout, tensors)) for tensors in (self.inputs, self.made)]
        given = self.given.leaves, self.given.spec
        return (*given, *layouts, self.operators, self.results, self.result_spec, self.autograd)

    @property
    def key(self) -> tuple[Any, ...]:
        """What calls that run the same have in common."""
        held = [(name, tensor_layout(tensor)) for name, tensor in self.tensors.items()]
        return (type(self.layer), held, *self.trail)

    def add(self, tensor: Tensor) -> None:
        """Number a tensor that comes up in the call."""
        self.numbers[id(tensor)] = len(self.numbers)
        self.attributes[id(tensor)] = len(vars(tensor))
        self.alive.append(tensor)

    def end(self, output: Any) -> None:
        """Note what the call returns. Raises `Unknown` for what cannot be given back in another way."""
        flat, self.result_spec = pytree.tree_flatten(output)
        place = {id(tensor): LeafPlace(number) for number, tensor in enumerate(self.inputs)}
        outside = {id(tensor) for tensor in (*self.inputs, *self.tensors.values())}
        memory = {storage_of(tensor) for tensor in (*self.inputs, *self.tensors.values())}
        for value in flat:
            if isinstance(value, Tensor) and id(value) not in place:
                if id(value) in outside or id(value) not in self.numbers:
                    raise Unknown("it returns a tensor that it did not make")
                if storage_of(value) in memory:
                    raise Unknown("a result shares memory with an argument, a tensor of the layer or another result")
                memory.add(storage_of(value))
                place[id(value)] = LeafPlace(len(self.made), is_made=True)
                self.made.append(value)
            self.results.append(place[id(value)] if isinstance(value, Tensor) else plain_value(value))
        if any(len(vars(tensor)) != self.attributes[id(tensor)] for tensor in self.alive):
            raise Unknown("it sets attributes of tensors")
        if any(map(has_hooks, (*self.alive, *self.inputs, *self.tensors.values()))):
            raise Unknown("there are hooks on gradients")
        self.autograd = autograd_of(self)


def tensor_layout(tensor: Tensor) -> tuple[Any, ...]:
    placed = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return (*placed, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor), isinstance(tensor, nn.Parameter))


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
        if isinstance(node, int):
            raise Unknown("a result is a leaf of autograd")
        if node not in numbers:
            if not node.next_functions or isinstance(node, torch.autograd.function.BackwardCFunction):
                raise Unknown(f"{node.name()} is in its backward")
            numbers[node] = len(numbers)
            waiting.append(node)
        return numbers[node], number

    found[0] = [told(edge) for edge in roots]
    while waiting:
        node = waiting.pop()
        found.append((numbers[node], node.name(), [told(edge) for edge in node.next_functions]))
        if len(found) > MOST_NODES:
            raise Unknown("its backward leads out of it")
    return found


def gradient_edge(tensor: Tensor) -> tuple[Any, int]:
    """The node of autograd that makes the gradient of a tensor, and which of its gradients that is; for a leaf, which
    has none, the tensor's number in memory."""
    return (tensor.grad_fn, tensor.output_nr) if tensor.grad_fn is not None else (id(tensor), 0)


def held_by(layer: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a layer."""
    return dict(layer.named_parameters(remove_duplicate=False)) | dict(layer.named_buffers(remove_duplicate=False))
