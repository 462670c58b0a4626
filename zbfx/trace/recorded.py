"""What the layers of a model run in one forward, operator by operator, and which of them run the same.

In: the modules that may be alike. Out: a `LayerCall` for each time that one of them ran. Calls with equal keys ran the
same operators with the same arguments, up to which parameters they read, and left equal graphs of autograd behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbfx._torch import under_tracer
from zbfx._torch.fakes import is_constant
from zbfx._torch.modules import hooks_of_all_modules
from zbfx._torch.operators import schema_of, written_tensors
from zbfx._torch.switches import TorchDispatchMode, without_modes
from zbfx._torch.tensors import pytree, storage_of
from zbfx.trace.layer_calls import LayerArguments, LayerCall, Unknown, held_by, plain_value
from zbfx.trace.python_state import PythonState, Unseen

MOST_OF_LAYER = 20_000  # that Python code reaches from a layer
MOST_COMPARED = 4096  # numbers of a constant that is compared by value


class LayerRecorder(TorchDispatchMode):
    """Records a forward: the calls of `layers`, and what runs between them (`between`). `doubt` says why the record
    holds too little; that of a call, why no other one can stand for it."""

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
        self.readers: Counter[int] = Counter()  # of tensors outside of the layers that made them or are given them
        self.readers_of_memory: dict[int, list[LayerCall]] = {}  # what has a tensor there, or has returned one
        self.nested: set[str] = set()  # layers that others call
        self.doubt = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.doubt:
            with self.noting():
                self.note(func, args, kwargs or {}, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        call, schema = self.current, schema_of(func)
        if schema is None:
            raise Unknown(f"{func} is no plain operator")
        if call is not None and under_tracer.keeps_saved_tensors_otherwise():
            call.doubts("there are hooks on what its backward reads")
        operators = self.between if call is None else call.operators
        number = self.number_outside if call is None else self.number_inside
        operators.append((func, torch.is_grad_enabled(), self.spelled((args, kwargs), number)))
        if schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs):
                for reader in self.readers_of_memory.get(storage_of(tensor), ()):
                    reader.doubts("something writes into memory of a tensor that it reads or returns")
        for tensor in pytree.tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            if call is None:
                self.add(tensor)
            elif id(tensor) not in call.numbers and id(tensor) not in self.numbers:
                call.add(tensor)
                self.owner[id(tensor)] = call

    def add(self, tensor: Tensor) -> None:
        """Number a tensor that comes up between layers."""
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = len(self.numbers)
            self.alive.append(tensor)

    def spelled(self, value: Any, number: Callable[[Tensor], Any]) -> Any:
        if isinstance(value, Tensor):
            return number(value)
        if isinstance(value, tuple | list):
            return tuple([self.spelled(entry, number) for entry in value])
        if isinstance(value, dict):
            return tuple([(key, self.spelled(entry, number)) for key, entry in value.items()])
        return plain_value(value)

    def number_inside(self, tensor: Tensor) -> Any:
        call = self.current
        assert call is not None
        if id(tensor) in call.numbers:
            return "tensor", call.numbers[id(tensor)]
        call.doubts("it reads a tensor that is no argument, parameter or buffer of it")
        return self.number_outside(tensor)

    def number_outside(self, tensor: Tensor) -> Any:
        if id(tensor) in self.owner:
            self.owner[id(tensor)].doubts("other code reads what it made")
        self.readers[id(tensor)] += 1
        self.add(tensor)
        return "outside", self.numbers[id(tensor)], value_of(tensor)

    def run(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, *, stands_in: bool = False) -> Any:
        """Run the forward of a layer, or what stands for it, and record it."""
        if self.current is not None:
            self.current.doubts("it calls another layer")
            self.nested.add(name)
            return forward(*args, **kwargs)
        with self.noting():
            self.current = self.begun(name, args, kwargs)
        call = self.current
        if call is None:
            return forward(*args, **kwargs)
        before = None if stands_in else self.state_of(call)
        try:
            output = forward(*args, **kwargs)
        finally:
            self.current = None
        with self.noting():
            if before is not None and self.state_of(call) != before:
                call.doubts("it changes attributes, or objects that others see")
            if not call.given.are(LayerArguments.of(args, kwargs)):
                call.doubts("it changes its arguments")
            self.end(call, output)
        return output

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around work for the record: whatever goes wrong, the model can be traced without one."""
        try:
            yield
        except Exception as why:
            self.doubt = self.doubt or str(why) or type(why).__name__

    def state_of(self, call: LayerCall) -> PythonState | None:
        """What Python code keeps in the layer of a call and in what it reaches."""
        try:
            return PythonState.of(call.layer, *hooks_of_all_modules(), most=MOST_OF_LAYER)
        except Unseen as why:
            call.doubts(str(why))
            return None

    def begun(self, name: str, args: Any, kwargs: Any) -> LayerCall:
        call = LayerCall(name, self.layers[name], LayerArguments.of(args, kwargs), held_by(self.layers[name]))
        if call.given.doubt:
            call.doubts(call.given.doubt)
        self.between.append((name, tuple(self.number_outside(tensor) for tensor in call.inputs)))
        for tensor in (*call.inputs, *call.tensors.values()):
            if id(tensor) not in call.numbers:
                call.add(tensor)
            self.readers_of_memory.setdefault(storage_of(tensor), []).append(call)
        self.calls.append(call)
        return call

    def end(self, call: LayerCall, output: Any) -> None:
        try:
            call.end(output)
        except Unknown as why:
            call.doubts(str(why))
        for tensor in call.made:
            self.owner.pop(id(tensor), None)
            self.add(tensor)
            self.readers_of_memory.setdefault(storage_of(tensor), []).append(call)

    def alike(self) -> list[list[LayerCall]]:
        """The calls that can stand for each other, in groups."""
        if self.doubt:
            return []
        times = Counter(call.name for call in self.calls)
        used = Counter(id(tensor) for call in self.calls for tensor in call.tensors.values())
        groups: list[tuple[Any, list[LayerCall]]] = []
        for call in self.calls:
            if not any(tensor.requires_grad for tensor in call.made):
                continue  # nothing of it is trained
            # The gradient of what others read too is a sum, whose order could be another.
            if any(t.requires_grad and self.readers[id(t)] > 1 for t in call.inputs):
                call.doubts("others read an argument of it too")
            if any(t.requires_grad and (used[id(t)] > 1 or self.readers[id(t)] > 0) for t in call.tensors.values()):
                call.doubts("others read a parameter of it too")
            if times[call.name] > 1 or call.name in self.nested:
                call.doubts("it is called more than once, or by another layer")
            if call.doubt:
                continue
            key = call.key
            group = next((group for known, group in groups if known == key), None)
            if group is None:
                groups.append((key, group := []))
            group.append(call)
        return [group for _, group in groups]

    def is_like(self, other: LayerRecorder, but: Mapping[str, Any]) -> bool:
        """Whether two records of a model say the same of what runs between layers, and in all layers `but` some."""
        if self.doubt or other.doubt or self.between != other.between:
            return False
        pairs = zip(self.calls, other.calls, strict=True)  # `between` names them
        return all(one.name in but or one.trail == two.trail for one, two in pairs) and not self.nested & but.keys()


def value_of(tensor: Tensor) -> Any:
    """What a constant holds: nothing is known of the values of other tensors."""
    if not is_constant(tensor):
        return None
    if tensor.numel() > MOST_COMPARED:
        return id(tensor)
    with without_modes():
        return tensor.dtype, repr(tensor.tolist())


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
