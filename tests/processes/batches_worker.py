"""Scenarios of ranks that get other batches after the first one, for test_batches.py: functions of the rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.processes.replicas_worker import M, mesh_of, part
from tests.processes.worker import refusal
from tests.support.models import mlp
from tests.support.reference import compiled


def others(rank: int) -> dict[str, Any]:
    """By case: the step in which the pipeline ended, and what was said."""
    problem = mlp(3)
    pipe = compiled(problem, 2, 3, check=False)
    found: dict[str, Any] = {}
    for case, every, other_in in (("second", 2, 4), ("not looked at", 2, 3), ("each", 1, 3), ("never", 0, 4)):
        step, raised, number = pipe.bind(check_batches=every), dict[str, Any](), 0
        while number < 6 and not raised.get("type"):
            number += 1
            (inputs,), (targets,) = problem.inputs, problem.targets
            if rank == 1 and number == other_in:
                targets = targets.clone()
                targets[5, 3] += 1e-6
            raised = refusal(partial(step, inputs, targets))
        found[case] = raised | {"step": number}
        step.close()
    found["wrong"] = refusal(lambda: pipe.bind(check_batches=-1))["text"]
    found["apart"] = refusal(lambda: pipe.bind(check_batches=1 + rank))["text"]
    return found


def of_replicas(rank: int) -> dict[str, Any]:
    """Replicas have batches of their own. The last rank of the second one alone gets another, and inputs, which its
    stage does not read, without data."""
    whole, mesh = mlp(2 * M), mesh_of(2, 2)
    own = part(whole, mesh.get_local_rank("dp"), 2)
    step = compiled(own, 2, M, check=False).bind(mesh, check_batches=2)
    (inputs,), (targets,) = own.inputs, own.targets
    if rank in (1, 3):
        inputs = torch.empty_like(inputs, device="meta")
    for _ in range(3):
        step(inputs, targets)
    found = refusal(lambda: [step(inputs, targets + (rank == 3)), step(inputs, targets)])
    step.close()
    return found
