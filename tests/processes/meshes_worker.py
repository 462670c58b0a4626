"""Scenarios of meshes with their dimensions in any order, for test_meshes.py: functions of the rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.processes.faults import outcome
from tests.processes.replicas_worker import M, alone, in_double_precision, part
from tests.processes.tensor_parallel_worker import local_part
from tests.processes.worker import refusal, train
from tests.support.models import Problem, mlp
from tests.support.reference import compiled, relative_error
from zbfx.optim import PostValidated
from zbfx.testing import faults

STEPS = 3


class Block(nn.Module):
    """What tensor parallelism takes: a wide part between two products, and a norm that every shard has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(microbatches: int) -> Problem:
    torch.manual_seed(0)
    return replace(mlp(microbatches), model=nn.Sequential(*(Block() for _ in range(4))))


def twos(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def meshed(names: tuple[str, ...]) -> tuple[Problem, DeviceMesh, int, int]:
    """The batches of all replicas, a model that is sharded along "tp", which replica this is, and of how many."""
    mesh = twos(*names)
    replicas = 2 if "dp" in names else 1
    whole = blocks(M * replicas)
    if "tp" in names:
        distribute(whole.model, mesh["tp"])
    return whole, mesh, mesh.get_local_rank("dp") if replicas > 1 else 0, replicas


@in_double_precision
def trained(rank: int, names: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Losses of a few steps and the first gradients, beside plain autograd's on the batches of all replicas."""
    whole, mesh, replica, replicas = meshed(names)
    expected = alone(blocks(M * replicas), STEPS)
    step = compiled(part(whole, replica, replicas), 2, M).bind(mesh, **options)
    named, errors = dict(whole.model.named_parameters()), dict[str, float]()

    def run(*tensors: Tensor) -> Tensor:
        loss: Tensor = step(*(tensor.chunk(replicas)[replica] for tensor in tensors))
        for name, parameter in step.named_parameters():
            if name in named:  # no shard of ZeRO-1
                wanted = local_part(expected["gradients"][name], named[name])
                errors.setdefault(name, relative_error(parameter.grad, wanted))  # type: ignore[arg-type]
        return loss

    losses = train(whole, run, step.parameters(), STEPS)
    step.close()
    return {"losses": losses, "expected": expected["losses"], "errors": errors}


def zero(rank: int, names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = trained(rank, names, zero=1)
    return found


@in_double_precision
def other_batches(rank: int, names: tuple[str, ...]) -> dict[str, Any]:
    """The last process along "pp" and along "tp" takes a batch of its own; then all are right."""
    whole, mesh, replica, replicas = meshed(names)
    own = part(whole, replica, replicas)
    step = compiled(own, 2, M).bind(mesh)
    results: dict[str, Any] = {}
    for name in (name for name in names if name != "dp"):
        is_other = all(mesh.get_local_rank(name) == 1 for name in {name, *(n for n in names if n == "dp")})
        inputs = tuple(tensor + is_other for tensor in own.inputs)
        results[name] = refusal(partial(step, *inputs, *own.targets))
    results["right"] = [step(*own.inputs, *own.targets).item(), alone(blocks(M * replicas), 1)["losses"][0]]
    step.close()
    return results


@in_double_precision
def shards(rank: int) -> dict[str, Any]:
    """Random numbers, and steps that are not finite, are those of all shards; a plan that one refuses, all refuse."""
    torch.manual_seed(5)
    mesh, problem = twos("pp", "tp"), blocks(M)
    problem = replace(problem, model=nn.Sequential(*(m for b in problem.model.children() for m in (b, nn.Dropout()))))
    distribute(nn.ModuleList(problem.model[::2]), mesh["tp"])  # type: ignore[index]
    pipe = compiled(problem, 2, M)
    torch.manual_seed(7 + mesh.get_local_rank("tp"))
    step = pipe.bind(mesh, on_nonfinite="drop")
    results: dict[str, Any] = {"loss": step(*problem.inputs, *problem.targets).item()}
    if rank == 3:
        with torch.no_grad():
            next(p for name, p in step.named_parameters() if name.endswith("up.weight"))[0, 0] = torch.nan
    step(*problem.inputs, *problem.targets)
    results["verdict"] = step.verdict
    step.close()
    if rank == 1:
        problem.model.get_parameter("0.norm.bias").register_hook(lambda gradient: gradient)
    results["bind"] = refusal(partial(pipe.bind, mesh))
    return results


def failing_shard(rank: int, phase: str) -> dict[str, Any]:
    """The last process fails in one of its phases, and shares no pipeline with the first ones."""
    problem, mesh = blocks(M), twos("pp", "tp")
    distribute(problem.model, mesh["tp"])
    step = compiled(problem, 2, M).bind(mesh)
    step(*problem.inputs, *problem.targets)
    with faults.injected(faults.Raise(), faults.action(f"{phase}.0"), rank=3):
        return outcome(partial(step, *problem.inputs, *problem.targets))


@in_double_precision
def strange_meshes(rank: int) -> dict[str, Any]:
    problem, results = blocks(M), dict[str, Any]()
    pipe = compiled(problem, 2, M)
    for other in ("cp", "ep", "replicas"):
        results[other] = refusal(partial(pipe.bind, twos("pp", other)))
    results["pp independent"] = refusal(partial(pipe.bind, twos("pp", "dp"), independent=("pp",)))
    results["no such"] = refusal(partial(pipe.bind, twos("pp", "dp"), independent=("ep",)))
    results["no tuple"] = refusal(partial(pipe.bind, twos("pp", "dp"), independent="ep"))  # type: ignore[arg-type]
    results["no mesh"] = refusal(partial(pipe.bind, independent=("ep",)))
    results["no shards"] = refusal(partial(pipe.bind, twos("pp", "tp")))
    mesh = twos("pp", "ep")
    family = mesh.get_local_rank("ep")
    step = pipe.bind(mesh, independent=("ep",))
    own = part(blocks(2 * M), family, 2)
    results["apart"] = [step(*own.inputs, *own.targets).item(), alone(own, 1)["losses"][0]]
    step.close()
    distribute(problem.model, mesh["ep"])
    sharded = compiled(problem, 2, M)
    results["other shards"] = refusal(partial(sharded.bind, mesh, independent=("ep",)))
    return results


def tied(microbatches: int) -> Problem:
    """The first block's product is used again by the last one's: ranks share a parameter."""
    problem = blocks(microbatches)
    problem.model[-1].up = problem.model[0].up  # type: ignore[index]
    return problem


CLIPS = [(1e-2, 2.0), (1e-3, float("inf")), (1e-2, 1.0), (1e-2, 3.0), (1e6, 2.0)]  # all but the last one clip


@in_double_precision
def clipped(rank: int, names: tuple[str, ...], is_tied: bool, **options: Any) -> dict[str, Any]:
    """Norms, and gradients or what steps with them make of the parameters, beside torch's on one process."""
    make = tied if is_tied else blocks
    mesh, replicas = twos(*names), 2 if "dp" in names else 1
    plain, whole = make(M * replicas), make(M * replicas)
    if "tp" in names:
        distribute(whole.model, mesh["tp"])
    replica = mesh.get_local_rank("dp") if replicas > 1 else 0
    own = part(whole, replica, replicas)
    step = compiled(own, 2, M).bind(mesh, **options)
    optimizers = [torch.optim.SGD(p, lr=1.0) for p in (plain.model.parameters(), step.parameters())]
    results: dict[str, Any] = {"norms": [], "expected": []}
    for max_norm, norm_type in CLIPS:
        for optimizer in optimizers:
            optimizer.zero_grad()
        step(*own.inputs, *own.targets)
        nn.functional.mse_loss(plain.model(*plain.inputs), *plain.targets).backward()
        results["expected"].append(torch.nn.utils.clip_grad_norm_(plain.model.parameters(), max_norm, norm_type).item())
        results["norms"].append(step.clip_grad_norm_(max_norm, norm_type).item())
        for optimizer in optimizers:
            optimizer.step()
    if step.engine.shards is not None:
        step.collect()
    named, wanted = dict(whole.model.named_parameters()), dict(plain.model.named_parameters())
    results["errors"] = {
        name: relative_error(parameter.detach(), local_part(wanted[name].detach(), named[name]))
        for name, parameter in step.engine.runners[0].parameters.items()
    }
    results["wrong"] = refusal(lambda: step.clip_grad_norm_(-1.0))
    results["validated"] = refusal(lambda: PostValidated(optimizers[1], step, max_norm=1.0))
    step.close()
    return results


def clipped_shards(rank: int, names: tuple[str, ...], is_tied: bool) -> dict[str, Any]:
    found: dict[str, Any] = clipped(rank, names, is_tied, zero=1)
    return found


@in_double_precision
def other_clips(rank: int) -> dict[str, Any]:
    """Ranks that clip to other norms hear of it."""
    problem = blocks(M)
    step = compiled(problem, 2, M).bind()
    step(*problem.inputs, *problem.targets)
    return {"other": refusal(lambda: step.clip_grad_norm_(1.0 + rank))}
