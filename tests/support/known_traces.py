"""Traces of models that are alike, each made once in a process: tracing is most of what compiling a small model takes.

For scenarios over processes, and tests of what is done with a graph. Tests of tracing trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import zbfx.pipeline
import zbfx.variants
from zbfx._torch.modules import hook_tables
from zbfx._torch.operators import group_arguments, waited
from zbfx.graphs import Joint, copy_graph
from zbfx.modes import Modes
from zbfx.plans.identity import identity
from zbfx.spelled import spelled
from zbfx.trace.signature import Signature
from zbfx.trace.symbols import Sizes
from zbfx.trace.tensor_names import named_tensors
from zbfx.trace.tensor_parallel import groups_of, is_sharded
from zbfx.trace.tracer import trace
from zbfx.trace.wanted import TRAINING


class Trace(NamedTuple):
    joint: Joint
    signature: Signature
    groups: Sequence[str]  # of processes, as the collectives of the graph name them
    sizes: Sizes | None  # whose symbols the graph has


Known = dict[str, Trace]  # by what decides a trace


def trace_once(patch: pytest.MonkeyPatch, known: Known) -> None:
    """Until the patch is undone, `zbfx.compile` takes traces of models like earlier ones from `known`, and so do steps
    that meet a further shape, or evaluate."""

    def remembered(
        model: nn.Module, loss_fn: Callable[..., Any] | None, *arguments: Any, **options: Any
    ) -> tuple[Joint, Signature]:
        key = told(model, loss_fn, arguments, options)
        if key is None:
            return trace(model, loss_fn, *arguments, **options)
        groups = [group.group_name for group in groups_of(named_tensors(model, loss_fn))]
        sizes = options.get("sizes")
        if key not in known:
            known[key] = Trace(*trace(model, loss_fn, *arguments, **options), groups, sizes)
        found = known[key]
        if sizes is not None:
            vars(sizes).update(vars(found.sizes))
        return over(found.joint, dict(zip(found.groups, groups, strict=True))), found.signature

    patch.setattr(zbfx.pipeline, "trace", remembered)
    patch.setattr(zbfx.variants, "trace", remembered)


def told(model: nn.Module, loss_fn: Any, arguments: Any, options: Mapping[str, Any]) -> str | None:
    """All that decides a trace but the names of groups of processes, None where no text tells it."""
    wanted, sizes, undo = options.get("wanted", TRAINING), options.get("sizes"), options.get("undo")
    if wanted.selection is not None and any(map(callable, wanted.selection.leaves)):
        return None
    tensors, found, modes = named_tensors(model, loss_fn), identity(model, loss_fn), Modes.now()
    leaves, structure = pytree.tree_flatten(arguments)
    if found.strange or modes.function_modes:
        return None
    layouts = [(leaf.dtype, leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    devices = [str(tensor.device) for tensor in tensors.values()]
    state = modes.switches, modes.autocasts, modes.keeps_casts, torch.is_grad_enabled()
    parts = list(map(part, filter(is_sharded, tensors.values())))  # type: ignore[arg-type]
    sharding = (parts, list(resharding(model))) if parts else ()
    asked = wanted.trains, wanted.in_eval, wanted.has_loss, wanted.selection and wanted.selection.told
    symbols = sizes and (sizes.groups, sizes.signature)
    first = undo and (undo.__self__.layouts.keys(), undo.__self__.empty)  # of a guard: what it leaves in the model
    plain = {name: value for name, value in options.items() if name not in ("wanted", "sizes", "undo")}
    told = found.parts, layouts, str(structure), devices, plain, asked, symbols, first, state, sharding
    return spelled(told)


def part(parameter: DTensor) -> tuple[Any, ...]:
    """What a process holds of a sharded parameter."""
    mesh, local = parameter.device_mesh, parameter.to_local()
    return parameter.placements, mesh.shape, mesh.get_coordinate(), local.shape, local.stride()


def resharding(model: nn.Module) -> Iterator[Any]:
    """What `parallelize_module` had a model's modules do: their hooks are functions of torch that hold it."""
    for name, module in model.named_modules():
        for hook in (hook for table in hook_tables(module) for hook in table.values()):
            held = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
            yield name, [value for value in held if not isinstance(value, DeviceMesh)]


def over(joint: Joint, names: Mapping[str, str]) -> Joint:
    """A joint graph whose collectives run over the groups of these names in place of those that it names."""
    if all(old == new for old, new in names.items()):
        return joint
    graph = copy_graph(joint.graph)
    for node in graph.find_nodes(op="call_function", target=waited):
        collective, *args = node.args
        own = group_arguments(collective)
        node.args = (collective, *(names[value] if index in own else value for index, value in enumerate(args)))
    return replace(joint, graph=graph)
