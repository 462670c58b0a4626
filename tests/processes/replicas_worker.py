"""Scenarios of replicas of pipelines, for test_replicas.py: functions of the rank, see tests/support/pool.py."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbfx
from tests.processes.worker import refusal, train
from tests.support.models import Maker, Problem, gpt2, mlp
from tests.support.reference import compiled, default_dtype, loss_of, one_trace, relative_error, rescheduled
from zbfx.optim import PostValidated
from zbfx.options import placement_of
from zbfx.runtime import captured
from zbfx.schedule.orders.registry import SEARCHED
from zbfx.testing.faults import Raise, action, injected

M = 3  # microbatches of a replica
STEPS = 20
Compiled = dict[str, tuple[Problem, zbfx.Pipeline]]  # by name: the problem of all replicas, the pipeline of one

in_double_precision = default_dtype(torch.float64)


def mesh_of(replicas: int, ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp"))


def part(problem: Problem, replica: int, replicas: int) -> Problem:
    """The batch of one replica."""

    def own(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(tensor.chunk(replicas)[replica] for tensor in tensors)

    return replace(problem, inputs=own(problem.inputs), targets=own(problem.targets))


def pipelines(replicas: int, ranks: int, make: Maker, schedules: Iterable[str], **options: Any) -> Compiled:
    """From one trace, stages for each placement; searched schedules are rank 0's, and get stages of their own."""
    found: Compiled = {}
    traces: dict[nn.Module, Any] = {}
    traced: dict[tuple[int, ...], zbfx.Pipeline] = {}
    whole = make(M * replicas)
    for schedule in schedules:
        placement = placement_of(schedule, ranks, None)
        if placement in traced and schedule not in SEARCHED:
            pipe = rescheduled(traced[placement], M, schedule)
        else:
            with one_trace(traces):
                pipe = traced[placement] = compiled(part(whole, 0, replicas), ranks, M, schedule=schedule, **options)
        found[f"{make.__name__} {schedule}"] = (whole, pipe)
    return found


def alone(problem: Problem, steps: int = STEPS) -> dict[str, Any]:
    """The same with plain autograd on the batches of all replicas; the gradients are those of the first step."""
    model = copy.deepcopy(problem.model)
    first: dict[str, Tensor] = {}

    def step(*tensors: Tensor) -> Tensor:
        loss = loss_of(problem, model, tensors[: len(problem.inputs)], tensors[len(problem.inputs) :], {})
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            first.setdefault(name, parameter.grad.clone())
        return loss.detach()

    return {"losses": train(problem, step, model.parameters(), steps), "gradients": first}


def trained(problem: Problem, step: Any, replica: int, replicas: int, steps: int = STEPS) -> dict[str, Any]:
    """Losses of one replica, and the gradients that the first step adds to what `.grad` holds."""
    gradients: dict[str, Tensor] = {}

    def first_gradients(*tensors: Tensor) -> Tensor:
        # Roll the batches of all replicas, then take this one's.
        loss: Tensor = step(*(tensor.chunk(replicas)[replica] for tensor in tensors))
        for name, parameter in step.named_parameters():
            gradients.setdefault(name, parameter.grad.clone())
        return loss

    return {"losses": train(problem, first_gradients, step.parameters(), steps), "gradients": gradients}


def errors(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest relative differences of losses and gradients from those of one process."""
    losses = zip(found["losses"], expected["losses"], strict=True)
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in losses),
        "gradient": max(relative_error(g, expected["gradients"][name]) for name, g in found["gradients"].items()),
    }


def every_pipeline(
    prepared: Compiled, replicas: int, ranks: int, rank: int, *, verbose: bool = False
) -> dict[str, Any]:
    mesh, results, expected = mesh_of(replicas, ranks), {}, {}
    for name, (whole, pipe) in prepared.items():
        model = name.partition(" ")[0]
        if model not in expected:
            expected[model] = alone(whole)
            initial = {key: value.clone() for key, value in whole.model.state_dict().items()}
        whole.model.load_state_dict(initial)
        whole.model.zero_grad()
        found = trained(whole, pipe.bind(mesh), rank // ranks, replicas)
        results[name] = errors(found, expected[model]) | {"steps": len(found["losses"]), "last": found["losses"][-1]}
        if verbose and rank == 0:
            print(f"{replicas} x {ranks} {name}: {results[name]}", flush=True)
    return results


def zero(prepared: Compiled, replicas: int, ranks: int, rank: int) -> dict[str, Any]:
    """Training in float32 with and without ZeRO-1: losses, parameters, and how many numbers the optimizer steps."""
    mesh, results = mesh_of(replicas, ranks), {}
    first = {id(w): {key: value.clone() for key, value in w.model.state_dict().items()} for w, _ in prepared.values()}
    for name, (whole, pipe) in prepared.items():
        initial = first[id(whole)]
        found = []
        for stage in (0, 1):
            pipe.model.load_state_dict(initial)
            step = pipe.bind(mesh, zero=stage, seed=0)
            losses = train(whole, part_of(step, rank // ranks, replicas), step.parameters())
            own_part = part(whole, rank // ranks, replicas)
            evaluated = step.evaluate(*own_part.inputs, *own_part.targets)
            step.collect()
            own = {n: p.detach().clone() for n, p in step.engine.runners[0].parameters.items()}
            sizes = sum(p.numel() for p in step.parameters())
            found.append({"losses": losses, "evaluated": evaluated.item(), "parameters": own, "size": sizes})
        results[name] = found
    return results


def part_of(step: Any, replica: int, replicas: int) -> Callable[..., Tensor]:
    """The step on this replica's part of the batches of all."""
    return lambda *tensors: step(*(tensor.chunk(replicas)[replica] for tensor in tensors))


@in_double_precision
def trained_alike(rank: int, make: Maker, replicas: int, ranks: int, *schedules: str) -> dict[str, Any]:
    return every_pipeline(pipelines(replicas, ranks, make, schedules), replicas, ranks, rank)


def two_by_two(rank: int, make: Maker, *schedules: str) -> dict[str, Any]:
    """What is loaded before messages, as on GPUs, changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "LOADS", ("cpu",))
        return in_double_precision(two_by_two_and_loaded)(rank, make, *schedules)


def two_by_two_and_loaded(rank: int, make: Maker, *schedules: str) -> dict[str, Any]:
    found = pipelines(2, 2, make, schedules)
    return every_pipeline({**found, **from_a_plan_on_disk(rank, make)}, 2, 2, rank)


def from_a_plan_on_disk(rank: int, make: Maker) -> Compiled:
    """A pipeline whose plan one rank has written, and all read: none traces."""
    box = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(box, src=0)
    whole, folder = make(M * 2), Path(box[0])
    compiled(part(make(M * 2), 0, 2), 2, M, schedule="zb-h1", cache=folder)
    dist.barrier()
    (file,) = folder.iterdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbfx.pipeline.trace", None)
        pipe = compiled(part(whole, 0, 2), 2, M, schedule="zb-h1", cache=folder)
    loaded = zbfx.load_plan(file, whole.model, whole.loss_fn)
    assert [program.code for program in loaded.programs] == [program.code for program in pipe.programs]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return {f"{make.__name__} from a plan on disk": (whole, loaded)}


@in_double_precision
def sharded(rank: int, replicas: int, ranks: int) -> dict[str, Any]:
    return zero(pipelines(replicas, ranks, in_float32, ["zb-h1"]), replicas, ranks, rank)


@in_double_precision
def refusals_of_bind(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    mesh = mesh_of(2, 2)
    pipe = compiled(part(mlp(M * 2), 0, 2), 2, M)
    results["no mesh"] = refusal(pipe.bind)
    with torch.no_grad():
        weight = pipe.model.get_parameter("0.weight")
        if rank == 2:
            weight.add_(1)
        results["other weights"] = refusal(partial(pipe.bind, mesh))
        if rank == 2:
            weight.copy_(mlp(M).model.get_parameter("0.weight"))
    results["zero 2"] = refusal(partial(pipe.bind, mesh, zero=2))
    return results


@in_double_precision
def steps_and_refusals(rank: int) -> dict[str, Any]:
    """Gradients that accumulate; batches that are refused; a fault last."""
    results: dict[str, Any] = {}
    mesh, replica = mesh_of(2, 2), rank // 2
    whole = mlp(M * 2)
    pipe = compiled(part(whole, 0, 2), 2, M)
    problem = part(whole, replica, 2)
    step = pipe.bind(mesh)
    results["accumulated"] = accumulated(step, problem)
    results["no data"] = refusal(step if replica else lambda: step(*problem.inputs, *problem.targets))
    more = tuple(torch.cat([t, t]) for t in (*problem.inputs, *problem.targets))
    results["other count"] = refusal(lambda: step(*(more if replica else (*problem.inputs, *problem.targets))))
    rows: Any = [((x, y), {}) for x, y in zip(problem.inputs[0].chunk(M), problem.targets[0].chunk(M), strict=True)]
    results["fewer"] = refusal(lambda: step.run_split(rows[: M - 1] if replica else rows))
    results["evaluated"] = step.evaluate(*problem.inputs, *problem.targets).item()
    results["after refusals"] = step(*problem.inputs, *problem.targets).item()
    with injected(Raise(), action("B1.0"), rank=3):
        results["fault"] = refusal(lambda: step(*problem.inputs, *problem.targets))
    return results


def in_float32(microbatches: int) -> Problem:
    """GPT-2, whose head is tied to the embedding, in float32."""
    problem = gpt2(microbatches)
    problem.model.float()
    return problem


@in_double_precision
def clipped(rank: int) -> list[dict[str, Any]]:
    """Training whose steps are clipped after the fact, every one or some, without and with ZeRO-1."""
    mesh, replica = mesh_of(2, 2), rank // 2
    whole = mlp(M * 2)
    pipe = compiled(part(whole, 0, 2), 2, M)
    initial = {key: value.clone() for key, value in pipe.model.state_dict().items()}
    found = []
    for max_norm in (0.02, 0.05, 10.0):
        for stage in (0, 1):
            pipe.model.load_state_dict(initial)
            step = pipe.bind(mesh, zero=stage)
            optimizer = PostValidated(torch.optim.AdamW(step.parameters(), lr=1e-2), step, max_norm=max_norm)
            losses = []
            for count in range(8):
                tensors = [t.roll(count, 0) for t in (*whole.inputs, *whole.targets)]
                losses.append(part_of(step, replica, 2)(*tensors).item())
                optimizer.step()
                optimizer.zero_grad()
            step.collect()
            own = {n: p.detach().clone() for n, p in step.engine.runners[0].parameters.items()}
            figures = {"losses": losses, "parameters": own, "counts": asdict(optimizer.counts)}
            found.append(figures | {"norm": optimizer.verdict.norm if optimizer.verdict else None})
    return found


def accumulated(step: Any, problem: Problem) -> dict[str, Any]:
    """Gradients over three steps, the second into a tensor of the user's own, against three times one step's."""
    batch = (*problem.inputs, *problem.targets)
    losses = [step(*batch).item()]
    once = {name: parameter.grad.clone() for name, parameter in step.named_parameters()}
    own = {}
    for name, parameter in step.named_parameters():
        own[name] = parameter.grad = parameter.grad.clone()
    losses += [step(*batch).item()]
    kept = all(parameter.grad is own[name] for name, parameter in step.named_parameters())
    for _, parameter in step.named_parameters():
        parameter.grad = None
    losses += [step(*batch).item(), step(*batch).item()]
    twice = [relative_error(own[name], 2 * gradient) for name, gradient in once.items()]
    twice += [relative_error(p.grad, 2 * once[name]) for name, p in step.named_parameters()]
    for _, parameter in step.named_parameters():
        parameter.grad = None
    return {"losses": losses, "kept": kept, "error": max(twice), "expected": alone(mlp(M * 2), 1)["losses"][0]}


def named_schedules(rank: int, *names: str) -> dict[str, list[float]]:
    """By the name of the user's schedule function: per shape of the batch, how far gradients are from one process's."""
    found: dict[str, list[float]] = {}
    with default_dtype(torch.float64):
        for name in names:

            def order(_: Any, microbatches: int) -> list[str]:
                return [" ".join(f"F0.{k} B0.{k} W0.{k}" for k in range(microbatches))]

            order.__name__ = name
            torch.manual_seed(0)
            model, inputs = torch.nn.Linear(4, 3), torch.randn(2, 8, 4)
            pipe = zbfx.compile(
                copy.deepcopy(model),
                stages=1,
                microbatches=2,
                schedule=order,
                loss_fn=torch.Tensor.mean,
                example_inputs=(inputs[0, :4],),
                check=False,
            )
            step = pipe.bind(mesh_of(2, 1), on_new_shape="recompile")
            found[name] = []
            for rows in (8, 4):
                pipe.model.zero_grad()
                model.zero_grad()
                step(inputs[rank, :rows])
                model(inputs[:, :rows].reshape(-1, 4)).mean().backward()
                assert model.weight.grad is not None
                own = pipe.model.get_parameter("weight").grad
                found[name].append(1.0 if own is None else float((own - model.weight.grad).abs().max()))
            step.close()
    return found
