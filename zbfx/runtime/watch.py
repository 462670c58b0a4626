"""Compares the model with what was traced and bound, before each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zbfx._torch.modules import hook_tables, part_tables
from zbfx._torch.tensors import gradient_dtype
from zbfx.errors import InputError, listed
from zbfx.runtime.agreement import refuse_gradient_hooks, refuse_gradients
from zbfx.trace.guard import (
    MISSING,
    Source,
    dtype_and_shape,
    named_modules,
    named_parts,
    plain_attributes,
    same_objects,
)
from zbfx.trace.tensor_names import canonical_names, named_tensors, plain_tensors


class Watch:
    """Compares the model with what was traced and bound, before each step. That is quick where every object is the one
    that was seen last; any that is not is looked at by name."""

    def __init__(
        self,
        source: Source,
        device: torch.device,
        trained: Mapping[str, nn.Parameter],
        replaced: Collection[str] = (),
        constants: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        """The tensors are those of the model now; those that this process uses are on `device`; `trained` are the
        parameters whose gradients arise here, in the dtypes that they have now. `replaced` are the buffers that the
        model's own forward replaces, `constants()` the tensors beside parameters and buffers that graphs read."""
        guard, model, loss_fn = source.guard, source.model, source.loss_fn
        self.guard, self.model, self.loss_fn, self.trained = guard, model, loss_fn, trained
        self.gradient_dtypes = {
            name: dtype for name, p in trained.items() if (dtype := gradient_dtype(p)) not in (None, p.dtype)
        }
        self.device = torch.empty(0, device=device).device  # with its index
        self.tensors = named_tensors(model, loss_fn)
        self.canonical = canonical_names(model, loss_fn)
        self.distinct = list({id(tensor): tensor for tensor in self.tensors.values()}.values())
        self.seen: dict[bool, tuple[list[object], list[object]]] = {}
        self.handles: int | None = None
        self.reached, self.constants = guard.reached, constants
        modules = list(dict.fromkeys(guard.modules.values()))
        self.spaces = [vars(module) for module in modules]
        self.tables = [table for module in modules for table in (*part_tables(module), *hook_tables(module))]
        attributes = [(module, name) for module in modules for name in ("training", *plain_attributes(module))]
        attributes += [
            (module, name) for _, part in named_parts(model, loss_fn) for module, name, _, _ in plain_tensors(part)
        ]
        self.replaced = replaceable(model, loss_fn, replaced)
        self.owners = [module for module, _ in attributes]
        self.attributes = [name for _, name in attributes]
        self.parameters = [tensor for tensor in self.tensors.values() if isinstance(tensor, nn.Parameter)]

    def state(self) -> list[object]:
        """The objects that the model is made of; kept alive, so that none can pass for another."""
        return [
            *chain.from_iterable(table.values() for table in self.tables if table),
            *map(getattr, self.owners, self.attributes, repeat(MISSING)),
            *[space.get("forward") for space in self.spaces],
            *map(attrgetter("requires_grad"), self.parameters),
            *map(attrgetter("dtype"), self.distinct),
            *self.reached.state(),
        ]

    def places(self) -> list[object]:
        """Shapes and devices, which `tensor.data = ...` changes, as `model.to(...)` does."""
        return [*map(attrgetter("shape"), self.distinct), *map(attrgetter("device"), self.distinct)]

    def check(self, used: Callable[[], Collection[str]], *, evaluation: bool) -> None:
        """Raises `InputError` if anything has changed that a step of the pipeline would not see. `used` gives the names
        of the parameters and buffers that this process reads."""
        if not evaluation and RemovableHandle.next_id != self.handles:  # torch counts the hooks that it registers
            refuse_gradient_hooks(self.trained)
            self.handles = RemovableHandle.next_id
        if not evaluation:
            refuse_gradients(self.trained, self.gradient_dtypes)
        now, places = self.state(), self.places()
        before, places_before = self.seen.get(evaluation, ([], []))
        if same_objects(before, now) and places == places_before:
            return
        constants = set(map(id, self.constants()))
        now_held = self.guard.check(self.model, self.loss_fn, evaluation=evaluation, constants=constants)
        self.reached = now_held.reached  # of the objects that are there now
        self.take_back(used())
        self.check_tensors(used())
        self.seen[evaluation] = self.state(), self.places()

    @torch.no_grad()
    def take_back(self, used: Collection[str]) -> None:
        """A plain forward of the model, between steps, has put new tensors in the place of some: their values go into
        the tensors that the pipeline holds, and these back into the model, as if it had changed them in place."""
        for name, (module, attribute) in self.replaced.items():
            bound, found = self.tensors[name], getattr(module, attribute, None)
            if found is bound or name not in used or not isinstance(found, Tensor):
                continue
            if dtype_and_shape(found) == dtype_and_shape(bound) and found.device == bound.device:
                bound.detach().copy_(found)  # detached: a forward in inference mode may have made it
                setattr(module, attribute, bound)

    def check_tensors(self, used: Collection[str]) -> None:
        now = named_tensors(self.model, self.loss_fn)
        self.guard.check_layouts(now, used)
        changed = [
            name
            for name, tensor in self.tensors.items()
            if now.get(name) is not tensor and self.canonical[name] in used
        ]
        if changed:
            raise InputError(
                f"found other tensors in the place of those that the pipeline was bound to, which it would go on with: "
                f"{listed(changed)}. Change tensors in place (load_state_dict without assign=True; parameter.copy_() "
                f"under torch.no_grad(); buffer.fill_()), or bind the pipeline again"
            )
        moved = {name: now[name].device for name in sorted(used) if name in now and now[name].device != self.device}
        if moved:
            raise InputError(
                f"the pipeline was bound on {self.device}; found {listed(moved, 3)} on "
                f"{listed(dict.fromkeys(moved.values()))}. Move the model back (model.to({str(self.device)!r})), or "
                f"bind the pipeline again"
            )


def replaceable(model: nn.Module, loss_fn: Any, names: Collection[str]) -> dict[str, tuple[nn.Module, str]]:
    """The module and attribute behind each of these names that is the only one of its tensor."""
    modules, names_of = named_modules(model, loss_fn), Counter(canonical_names(model, loss_fn).values())
    places = {name: name.rpartition(".") for name in names if names_of[name] == 1}
    return {name: (modules[owner], attribute) for name, (owner, _, attribute) in places.items()}
