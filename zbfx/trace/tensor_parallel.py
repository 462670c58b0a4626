"""Models whose parameters are DTensors, sharded over a mesh dimension beside the pipeline.

A stage then runs on several processes. Each has its shards, and the collectives between them are nodes of the stage's
F, B and W. The tracer writes the graph of one process's local tensors. A collective and its wait become one node, so
that both stay in one phase. A process trains the local part of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from zbfx._torch import tracing
from zbfx._torch.operators import is_collective, wait_tensor, waited
from zbfx.errors import ZbfxError


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a parameter that the processes of a mesh hold in parts."""
    return isinstance(tensor, nn.Parameter) and isinstance(tensor, DTensor)


def is_cut(tensor: Any) -> bool:
    """Whether each process of a mesh has another part of a parameter; else all have the whole of it."""
    return is_sharded(tensor) and any(placement.is_shard() for placement in tensor.placements)


def local_parts(named: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """This process's part of each sharded parameter, as a plain parameter on the memory of that part."""
    return {
        name: nn.Parameter(tensor.to_local().detach(), tensor.requires_grad)  # type: ignore[attr-defined]
        for name, tensor in named.items()
        if is_sharded(tensor)
    }


def refuse_measuring(local: Mapping[str, nn.Parameter], measures: bool) -> None:
    """Raise where costs are to be measured of a model with sharded parameters: no process can time a stage alone."""
    if local and measures:
        raise ZbfxError(
            "costs='measure' times each stage on one process, and those of a model with DTensor parameters run on "
            "several; use costs='estimate' or a CostTable"
        )


def refuse_other_shards(named: Mapping[str, Tensor], processes: Sequence[int], graph: fx.Graph) -> None:
    """Raise where parameters are not sharded over these `processes`, or nothing in the graph ties them together."""
    for name, tensor in named.items():
        if is_sharded(tensor):
            found = tensor.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
            if sorted(found) != sorted(processes):
                raise ZbfxError(
                    f"parameters are sharded along the dimension 'tp' of the mesh that bind gets, here over the "
                    f"processes {list(processes)}; found {name} over {found}. Call parallelize_module(model, "
                    f"mesh['tp'], ...) with that mesh before compile"
                )
    if len(processes) > 1 and not any(map(is_together, graph.nodes)):
        raise ZbfxError(
            f"along 'tp' the processes {list(processes)} compute one model together; found a model without DTensors or "
            f"collectives. Call parallelize_module(model, mesh['tp'], ...) before compile, or name the dimension 'dp' "
            f"if it holds replicas"
        )


def is_together(node: fx.Node) -> bool:
    """Whether several processes run a node together."""
    return node.target is waited or is_collective(node.target)


def fake_sharded(parameter: DTensor, fake_mode: Any, device: torch.device) -> nn.Parameter:
    """A copy of a sharded parameter with a fake local part on `device`."""
    local = parameter.to_local().detach()
    with fake_mode:
        fake = torch.empty_strided(local.size(), local.stride(), dtype=local.dtype, device=device)
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    whole = DTensor.from_local(fake, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def place_gradients(module: nn.Module) -> None:
    """Let the tracer place the gradient of each sharded parameter like the parameter. A gradient that is still to be
    summed over the mesh is summed then."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            placements = parameter.placements
            parameter.register_hook(
                lambda gradient, placements=placements: gradient.redistribute(placements=placements)
            )


def localize(module: fx.GraphModule) -> fx.GraphModule:
    """Reduce a traced graph, in place, to local tensors. Meshes are no longer inputs and outputs of it, and each
    collective is one node with its wait."""
    graph, output = module.graph, module.graph.output_node()
    found = map(tracing.local_description, output.meta["desc"])
    kept = [pair for pair in zip(output.args[0], found, strict=True) if pair[1] is not None]  # type: ignore[arg-type]
    output.args, output.meta["desc"] = (tuple(value for value, _ in kept),), [local for _, local in kept]
    for node in graph.find_nodes(op="placeholder"):
        node.meta["desc"] = tracing.local_description(node.meta["desc"])
        if node.meta["desc"] is None:
            graph.erase_node(node)
    for wait in graph.find_nodes(op="call_function", target=wait_tensor):
        (collective,) = wait.all_input_nodes
        if is_collective(collective.target) and len(collective.users) == 1:
            with graph.inserting_before(wait):
                whole = graph.call_function(waited, (collective.target, *collective.args), collective.kwargs)
            whole.meta = dict(wait.meta)
            wait.replace_all_uses_with(whole)
            graph.erase_node(wait)
            graph.erase_node(collective)
    graph.lint()
    return module


def groups_of(named: Mapping[str, Tensor]) -> list[dist.ProcessGroup]:
    """The process groups over which a model is sharded."""
    meshes = [tensor.device_mesh for tensor in named.values() if isinstance(tensor, DTensor)]
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()))
