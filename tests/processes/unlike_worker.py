"""Steps of unlike microbatches over ranks and replicas, for test_unlike.py: a function of the rank, see
tests/support/pool.py."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.processes.replicas_worker import mesh_of
from tests.processes.worker import refusal
from tests.runtime import test_buckets
from tests.runtime.test_unlike import Mixer, Rows, by_tokens, expected, mean, pipeline, rows_of
from tests.support.reference import default_dtype
from zbfx.optim import PostValidated
from zbfx.runtime.buckets import Buckets
from zbfx.runtime.step import Step

RANKS, REPLICAS = 2, 2
BATCHES = (([7, 2, 5], [9]), ([5, 5, 5], [5, 5, 5]), ([5, 5, 5], [3, 8]), ([4], [6, 6, 2, 9, 5, 3]))
LEARNING_RATE, MAX_NORM = 0.05, 0.2


def rows_of_replicas(lengths: tuple[list[int], ...], seed: int) -> list[Rows]:
    return [rows_of(own, seed=seed + 20 * k) for k, own in enumerate(lengths)]


def model_of_three() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mixer(0.0), Mixer(0.0), Mixer(0.0))


def plain_steps(model: nn.Module, loss_fn: Any, *, clips: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The loss of every step, and the parameters after it, of one process with the batches of all replicas."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)
    found = []
    for index, lengths in enumerate(BATCHES):
        rows = [row for own in rows_of_replicas(lengths, index) for row in own]
        loss, gradients = expected(model, loss_fn, rows)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        found.append((loss, {name: p.detach().clone() for name, p in model.named_parameters()}))
    return found


def largest(own: nn.Module, names: Any, after: dict[str, Tensor]) -> float:
    return max(float((own.get_parameter(name) - after[name]).detach().abs().max()) for name in names)


def refusals_of(step: Step, rank: int) -> dict[str, Any]:
    (x, y), _ = rows_of([4])[0]
    return {
        "empty": refusal(lambda: step.run_split([] if rank // RANKS else [((x, y), {})])),
        "refused": refusal(lambda: step.run_split([((x.long() if rank == 2 else x, y), {})])),
        "others": refusal(lambda: step.run_split(rows_of([4, 4] if rank == 1 else [4]))),
    }


@default_dtype(torch.float64)
def trained(rank: int) -> dict[str, Any]:
    """By way of training, the largest differences of losses and of parameters from one process."""
    mesh, replica = mesh_of(REPLICAS, RANKS), rank // RANKS
    results: dict[str, Any] = {}
    for way, loss_fn, zero in (("plain", mean, 0), ("zero", by_tokens, 1), ("validated", by_tokens, 0)):
        model = model_of_three()
        wanted = plain_steps(copy.deepcopy(model), loss_fn, clips=way == "validated")
        step = pipeline(model, loss_fn, RANKS).bind(mesh, on_new_shape="symbolic", zero=zero)
        names = sorted(step.engine.runners[0].parameters)
        inner = torch.optim.SGD(step.parameters(), lr=LEARNING_RATE, momentum=0.5)
        optimizer: Any = PostValidated(inner, step, max_norm=MAX_NORM) if way == "validated" else inner
        errors = {"loss": 0.0, "parameters": 0.0}
        for index, (lengths, (loss, after)) in enumerate(zip(BATCHES, wanted, strict=True)):
            optimizer.zero_grad()
            found = step.run_split(rows_of_replicas(lengths, index)[replica])
            errors["loss"] = max(errors["loss"], abs(float(found - loss)))
            optimizer.step()
            if way != "validated":
                step.collect()
                errors["parameters"] = max(errors["parameters"], largest(model, names, after))
        if way == "validated":
            optimizer.settle()
        errors["parameters"] = max(errors["parameters"], largest(model, names, wanted[-1][1]))
        step.collect()
        rows = rows_of_replicas(([3, 6], [4]), 7)
        whole = model_of_three()
        whole.load_state_dict(wanted[-1][1], strict=False)
        evaluated, _ = expected(whole, loss_fn, [row for own in rows for row in own])
        errors["evaluated"] = abs(float(step.evaluate_split(rows[replica]) - evaluated))
        if way == "plain":
            results |= refusals_of(step, rank)
            errors["after"] = abs(float(step.evaluate_split(rows[replica]) - evaluated))
        results[way] = errors
        step.close()
    return results


@default_dtype(torch.float64)
def bucketed(rank: int) -> dict[str, Any]:
    """Over replicas whose lengths differ: the largest differences from one process, and what is refused."""
    mesh, replica = mesh_of(REPLICAS, RANKS), rank // RANKS
    batches = test_buckets.rows_of((5, 7, 12)), test_buckets.rows_of((6, 2))  # nothing of a 6 is padded
    model = test_buckets.model_of()
    plain = copy.deepcopy(model)
    loss = test_buckets.loss_of(plain, [*batches[0], *batches[1]])
    loss.backward()
    buckets = Buckets({"inputs[0]": (1, 0), "targets[0]": (1, test_buckets.IGNORED)}, rounded=test_buckets.sixes)
    step = test_buckets.pipeline(model).bind(mesh, on_new_shape="symbolic", buckets=buckets)
    errors = {"loss": abs(float(step.run_split(batches[replica]) - loss.detach()))}
    for name, parameter in step.named_parameters():
        errors[name] = float((parameter.grad - plain.get_parameter(name).grad).abs().max())  # type: ignore[operator]
    step.close()
    counts = Buckets({"inputs[0]": (1, 0), "targets[0]": (1, 0)}, rounded=test_buckets.sixes)
    step = test_buckets.pipeline(test_buckets.model_of()).bind(mesh, on_new_shape="symbolic", buckets=counts)
    step.run_split(test_buckets.rows_of(((6, 12), (6,))[replica]))  # nothing grows
    no_pair: Any = [3]
    other = refusal(lambda: step.run_split(no_pair if rank == 2 else batches[replica]))
    grows = test_buckets.rows_of(((6, 12), (5,))[replica])  # in the second replica alone
    refused = [refusal(partial(call, grows)) for call in (step.evaluate_split, step.run_split, step.run_split)]
    count = step.count
    step.close()
    return {"errors": errors, "other": other, "refused": refused, "count": count}
