"""What a model makes in its first forward and finds again in the next, like the tables of rotary embeddings.

One graph holds no first forward. Where tracing fails because of such a tensor, every pass of the tracer begins with the
model as it was before its first forward: the graph then makes the tensor anew in every microbatch. The result does not
change if the tensor is made of constants and of buffers that no forward writes; any other is refused.
"""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn

from zbfx._torch.modules import own_buffers
from zbfx._torch.tensors import pytree
from zbfx._torch.tracing import descriptors
from zbfx.passes.nodes import is_random

OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
Table = dict[Any, Any] | list[Any]


@dataclass(frozen=True)
class Held:
    """A table in which a module keeps things: the dict of its attributes or of its buffers, or a dict or list that is
    an attribute."""

    module: nn.Module
    name: str  # the qualified name of the module, or of the attribute
    attribute: str  # the attribute that the table is; "" for the dicts of attributes and buffers
    table: Table
    before: Mapping[Any, Any]  # what the table held before the first forward

    def name_of(self, key: Any) -> str:
        return f"{self.name}[{key!r}]" if self.attribute else f"{self.name}.{key}".removeprefix(".")

    def made(self) -> Iterator[tuple[Any, list[Tensor]]]:
        """The keys whose entries hold tensors now and did not before, and these tensors."""
        for key, value in entries(self.table).items():
            if not tensors_in(self.before.get(key)) and tensors_in(value):
                yield key, tensors_in(value)

    def restore(self, leave: Collection[str]) -> None:
        """Make the table what it was before, but for names in `leave`, and for entries that held tensors before. The
        tracer has replaced those, or the graph writes them like buffers."""
        now = entries(self.table)
        if isinstance(self.table, list):
            del self.table[len(self.before) :]
        for key in [key for key in now if key not in self.before and self.name_of(key) not in leave]:
            if isinstance(self.table, dict):
                del self.table[key]
        for key, value in self.before.items():
            if now.get(key, Tensor) is not value and not tensors_in(value) and self.name_of(key) not in leave:
                self.table[key] = value


class FirstForward:
    """The modules of a model and its loss as they are before their first forward."""

    def __init__(self, *roots: tuple[str, Any]) -> None:
        self.held = [
            Held(module, ".".join(filter(None, (label, name, attribute))), attribute, table, entries(table))
            for label, root in roots
            if isinstance(root, nn.Module)
            for name, module in root.named_modules()
            for attribute, table in tables(module)
        ]
        self.leave: tuple[str, ...] = ()  # the names of what `restore` leaves as it is

    def restore(self) -> None:
        """Undo what forwards have made since."""
        for held in self.held:
            held.restore(self.leave)

    def made(self) -> dict[str, tuple[list[Tensor], str]]:
        """By name, the tensors that forwards have made since, and the line that makes them ("" if unknown)."""
        return {
            held.name_of(key): (found, line_of(held.module, held.attribute or str(key)))
            for held in self.held
            for key, found in held.made()
            if held.name_of(key) not in self.leave
        }


def tables(module: nn.Module) -> Iterator[tuple[str, Table]]:
    """The tables of a module, each with the name of the attribute that it is."""
    yield "", vars(module)
    yield "", own_buffers(module)
    for attribute, value in vars(module).items():
        if attribute not in OF_MODULES and isinstance(value, dict | list):
            yield attribute, value


def entries(table: Table) -> dict[Any, Any]:
    """What a table holds, by key or index, without the attributes that every module has."""
    if isinstance(table, list):
        return dict(enumerate(table))
    return {key: value for key, value in table.items() if key not in OF_MODULES}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value: the value itself, or those in a dict, list or tuple."""
    if isinstance(value, Tensor | dict | list | tuple):
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return []


def line_of(module: nn.Module, attribute: str) -> str:
    """The line at which a method of the module's classes sets an attribute, or else one that reads it to add to it; ""
    if there is none. `__init__` is left out."""
    for operation in ("STORE_ATTR", "LOAD_ATTR"):
        for owner in type(module).__mro__[:-1]:
            for name, method in vars(owner).items():
                if not isinstance(method, FunctionType) or name == "__init__":
                    continue
                for step in dis.get_instructions(method):
                    if step.opname == operation and step.argval == attribute and step.positions:
                        return f"{method.__code__.co_filename}:{step.positions.lineno}"
    return ""


def take_made(module: fx.GraphModule, results: int, names: list[str]) -> list[str]:
    """Take the outputs after the first `results` out of a joint graph. They are what a first forward made, by `names`.
    Returns the names of the tensors that may differ between forwards."""
    output = module.graph.output_node()
    pairs = list(zip(output.args[0], output.meta["desc"], strict=True))  # type: ignore[arg-type]
    mutations = [d for _, d in pairs if isinstance(d, descriptors.InputMutationAOTOutput)]
    written = {getattr(mutation.mutated_input, "target", "") for mutation in mutations}
    made = [(v, d) for v, d in pairs if isinstance(d, descriptors.PlainAOTOutput) and d.idx >= results]
    kept = [pair for pair in pairs if not any(pair is other or pair[1] is other[1] for other in made)]
    output.args = (tuple(value for value, _ in kept),)
    output.meta["desc"] = [description for _, description in kept]
    changing = [names[d.idx - results] for value, d in made if isinstance(value, fx.Node) and changes(value, written)]
    module.graph.eliminate_dead_code()
    module.recompile()
    return list(dict.fromkeys(changing))


def changes(value: fx.Node, written: Collection[str]) -> bool:
    """Whether a value may differ between forwards. It does if it depends on the microbatch, on parameters, on buffers
    that forwards write (`written`), or on random numbers. Sizes are equal in all forwards of a graph."""
    seen, waiting = set[fx.Node](), [value]
    while waiting:
        node = waiting.pop()
        if node in seen or not isinstance(node.meta.get("val"), Tensor | list | tuple):
            continue
        seen.add(node)
        if is_random(node):
            return True
        if node.op == "placeholder":
            description = node.meta["desc"]
            if not isinstance(description, descriptors.BufferAOTInput) or description.target in written:
                return True
        waiting += node.all_input_nodes
    return False
