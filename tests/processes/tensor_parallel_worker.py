"""A Llama, tensor-parallel over two processes, as two pipelines of two ranks, for test_tensor_parallel.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zbfx
from tests.processes.replicas_worker import STEPS, M, alone, in_double_precision, part
from tests.processes.worker import refusal, train
from tests.support.models import Problem, gpt2, llama, mlp
from tests.support.reference import compiled, relative_error
from zbfx.runtime.digest import digest

PLAN = {
    **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.get_submodule("model.layers").children():
        parallelize_module(layer, mesh, PLAN)


def local_part(whole: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """What this process holds of a gradient of the whole parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    (placement,) = parameter.placements
    if placement.is_replicate():
        return whole
    mesh = parameter.device_mesh
    return whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]  # type: ignore[attr-defined]


def distributed() -> tuple[Problem, DeviceMesh]:
    """The batches of both replicas, and a model of which each process holds a shard."""
    whole = llama(2 * M)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    distribute(whole.model, mesh["tp"])
    return whole, mesh


@in_double_precision
def compiled_alone(rank: int) -> dict[str, Any]:
    whole, mesh = distributed()
    results: dict[str, Any] = {}
    results["measure"] = refusal(lambda: compiled(part(whole, 0, 2), 2, M, costs="measure"))
    pipe = compiled(part(whole, mesh.get_local_rank("dp"), 2), 2, M)
    results["check"] = refusal(lambda: zbfx.check(pipe))
    results["collectives"] = {
        kind.value: str(phase.module.code).count("all_reduce") for kind, phase in pipe.stages[0].phases.items()
    }
    return results


@in_double_precision
def digests(rank: int) -> dict[str, dict[str, str]]:
    whole, mesh = distributed()
    pipes = {"sharded": compiled(part(whole, mesh.get_local_rank("dp"), 2), 2, M)}
    pipes |= {make.__name__: compiled(part(make(2 * M), 0, 2), 2, M) for make in (mlp, gpt2)}
    return {name: digest(pipe.replicated(2).compiled) for name, pipe in pipes.items()}


@in_double_precision
def two_by_two_by_two(rank: int) -> dict[str, Any]:
    """Twenty steps of AdamW in float64, and the first gradients, against plain autograd."""
    expected = alone(llama(2 * M))
    whole, mesh = distributed()
    replica = mesh.get_local_rank("dp")
    step = compiled(part(whole, replica, 2), 2, M).bind(mesh)
    named = dict(whole.model.named_parameters())
    errors: dict[str, float] = {}

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = step(*(tensor.chunk(2)[replica] for tensor in tensors))
        for name, parameter in step.named_parameters():
            wanted = local_part(expected["gradients"][name], named[name])
            errors.setdefault(name, relative_error(parameter.grad, wanted))  # type: ignore[arg-type]
        return loss

    results: dict[str, Any] = {"losses": train(whole, run, step.parameters(), STEPS)}
    results["expected"] = expected["losses"]
    results["errors"] = errors
    results["sharded"] = sum(isinstance(named[name], DTensor) for name in errors)
    return results
