"""Scenarios of models and training states on disk, for test_checkpoints.py: functions of the rank, see
tests/support/pool.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zbfx
from tests.checkpoint.models import language_pipe, on_meta, plain, plain_pipe, tensors, tokens
from tests.processes.replicas_worker import in_double_precision
from tests.processes.tensor_parallel_worker import distribute
from tests.support.models import llama
from tests.support.reference import compiled
from zbfx.errors import ZbfxError


def with_memory(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors(model).items() if not tensor.is_meta}


def from_folder(rank: int, make: Callable[[], nn.Module], folder: str) -> dict[str, Any]:
    """What a rank has in memory, what of it its stages use, and the loss of a step."""
    model = on_meta(make)
    step = language_pipe(model, dist.get_world_size()).bind(weights=folder)
    used = [name for name, _ in (*step.named_parameters(), *step.named_buffers())]
    found = with_memory(model)
    ids = tokens(4)
    return {"memory": found, "used": used, "loss": step(input_ids=ids, labels=ids)}


def initial(rank: int) -> dict[str, Tensor]:
    """Two replicas of two ranks, with ZeRO-1. Seeds of processes differ, and that of rank 0 counts."""
    torch.manual_seed(rank)
    model = on_meta(plain)
    step = plain_pipe(model, 2).bind(
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), weights="init", zero=1
    )
    step(torch.ones(4, 6), torch.zeros(4, 6))
    return with_memory(model)


def refused(rank: int) -> list[str]:
    """What each rank hears of weights that do not fit one rank, or of which only one is given any."""
    state = plain().state_dict()
    wrong = [state | {"4.weight": state["4.weight"].to(torch.int8)}, None if rank else state]
    found = []
    for weights in wrong:
        try:
            plain_pipe(on_meta(plain), dist.get_world_size()).bind(weights=weights)
        except ZbfxError as error:
            found.append(str(error))
    return found


def whole(rank: int, zero: int, folder: str) -> dict[str, Any]:
    """Two replicas of two ranks after two steps, the last of which waits for its verdict: the whole model on all ranks,
    on the first, in files, and what each rank has of it."""
    model = on_meta(trained)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    step = plain_pipe(model, 2).bind(mesh, weights="init", seed=7, zero=zero)
    optimizer = zbfx.optim.PostValidated(torch.optim.AdamW(step.parameters(), lr=0.1), step, max_norm=0.01)
    for _ in range(2):
        step(torch.ones(4, 6) * (1 + rank // 2), torch.zeros(4, 6))
        optimizer.step()
        optimizer.zero_grad()
    found = {"all": step.full_state_dict(everywhere=True), "first": step.full_state_dict()}
    step.export(folder)
    step.close()
    return found | {"own": with_memory(model)}


def trained() -> nn.Module:
    """Without a parameter that nothing fills."""
    model = plain()
    del model.unread
    return model


def whole_of_shards(rank: int) -> dict[str, Any]:
    """A Llama on two ranks of two shards each, and what it was before it was sharded."""
    problem = llama(2)
    before = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    distribute(problem.model, mesh["tp"])
    return {"before": before, "whole": compiled(problem, 2, 2).bind(mesh).full_state_dict(everywhere=True)}


@dataclass(frozen=True)
class Form:
    """How a training runs: over how many ranks, in how many replicas, in what order."""

    ranks: int
    replicas: int = 1
    zero: int = 0
    options: tuple[tuple[str, Any], ...] = (("schedule", "zb-h1"),)
    barrier: bool = False

    @property
    def processes(self) -> int:
        return self.ranks * self.replicas


def train(form: Form, step: Any, model: nn.Module, replica: int, folder: str, steps: int) -> dict[str, Any]:
    """Go on from a folder, if it has a checkpoint: what is there then, the losses of more steps, and a checkpoint."""
    adamw = torch.optim.AdamW(step.parameters(), lr=0.05)
    optimizer = zbfx.optim.PostValidated(adamw, step, max_norm=0.2, sync=form.barrier)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    step.load(folder, missing_ok=True, optimizer=optimizer, scheduler=scheduler)
    found: dict[str, Any] = {"count": step.count, "model": step.full_state_dict(everywhere=True)}
    found["optimizer"] = optimizer_state(step, optimizer)
    found["losses"] = []
    for _ in range(steps):
        x, y = batch(step.count)
        mine = slice(replica * 8 // form.replicas, (replica + 1) * 8 // form.replicas)
        found["losses"].append(float(step(x[mine], y[mine])))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    found["path"] = step.save(folder, keep=2, optimizer=optimizer, scheduler=scheduler).wait().name
    found["saved"] = step.full_state_dict(everywhere=True)
    found["saved optimizer"] = optimizer_state(step, optimizer)
    step.close()
    return found


def batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def optimizer_state(step: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """By parameter; with ZeRO-1 by bucket, as this replica's part of it."""
    state = optimizer.state_dict()["state"]
    names = [name for name, _ in step.named_parameters()]
    return {names[index]: {key: value.clone() for key, value in found.items()} for index, found in state.items()}


def made(tied: bool = False) -> nn.Module:
    torch.manual_seed(11)
    model = nn.Sequential(*trained().children(), nn.Dropout(0.1))
    last = model[7]
    assert isinstance(last, nn.Linear)
    if not tied:
        last.weight = nn.Parameter(last.weight.detach().clone())
    return model


@in_double_precision
def in_one_process(form: Form, folder: str, steps: int, seed: int, tied: bool = False) -> dict[str, Any]:
    model = made(tied)
    step = plain_pipe(model, form.ranks, 4, **dict(form.options)).run_local(seed=seed)
    return train(form, step, model, 0, folder, steps)


@in_double_precision
def over_processes(rank: int, form: Form, folder: str, steps: int, seed: int) -> dict[str, Any]:
    model = made()
    pipe = plain_pipe(model, form.ranks, 4 // form.replicas, **dict(form.options))
    mesh = init_device_mesh("cpu", (form.replicas, form.ranks), mesh_dim_names=("dp", "pp"))
    step = pipe.bind(mesh if form.replicas > 1 else None, zero=form.zero, seed=seed)
    found = train(form, step, model, rank // form.ranks, folder, steps)
    if step.engine.shards is not None:
        found["buckets"] = [
            (b.key, b.names, [(tuple(layout.shape), tuple(layout.stride)) for layout in b.layouts])
            for b in step.engine.shards.buckets
        ]
    return found
