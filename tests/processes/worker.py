"""Scenarios of one pipeline over processes, for test_processes.py: functions of the rank, see tests/support/pool.py."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.models import Maker, Problem, gpt, gpt2, mlp, numbers
from tests.support.reference import compiled, reference, rescheduled
from zbfx.comm import process_groups
from zbfx.runtime import captured
from zbfx.testing.faults import Kill, Raise, action, injected

STEPS = 20


def train(problem: Problem, step: Callable[..., Tensor], parameters: Any, steps: int = STEPS) -> list[float]:
    """Losses of so many steps, each on the batch rolled by one more row."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for count in range(steps):
        optimizer.zero_grad()
        inputs, targets = (tuple(t.roll(count, 0) for t in group) for group in (problem.inputs, problem.targets))
        losses.append(step(*inputs, *targets).item())
        optimizer.step()
    return losses


def run(step: Any, problem: Problem, steps: int) -> dict[str, Any]:
    """Losses and parameters after training."""
    losses = train(problem, step, step.parameters(), steps)
    return {"losses": losses, "parameters": {name: p.detach() for name, p in step.named_parameters()}}


def refusal(action: Callable[[], Any]) -> dict[str, Any]:
    """What an action raises, and after how long."""
    begun = time.monotonic()
    try:
        action()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
    return {"type": None, "text": "", "seconds": time.monotonic() - begun}


def normed() -> Problem:
    """A model whose every stage writes buffers and draws random numbers."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]
    return replace(mlp(3), model=nn.Sequential(*blocks))


def resumed(rank: int) -> dict[str, Any]:
    """Four steps, and two of another model that starts from what all ranks together had after two."""
    found: dict[str, Any] = {"whole": [], "resumed": []}
    checkpoints: list[Any] = [None] * dist.get_world_size()
    for part in ("whole", "resumed"):
        problem = normed()
        if part == "resumed":
            torch.nn.init.zeros_(problem.model.get_parameter("0.0.weight"))  # nothing of it is left
            problem.model.load_state_dict({name: t for own, _, _ in checkpoints for name, t in own.items()})
        step = compiled(problem, 4, 3, cuts=["1", "2", "3"]).bind(seed=3)
        optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
        if part == "resumed":
            _, state, step.count = checkpoints[dist.get_rank()]
            optimizer.load_state_dict(state)
        while step.count < 4:
            if part == "whole" and step.count == 2:
                own = {name: t.detach().clone() for name, t in (*step.named_parameters(), *step.named_buffers())}
                dist.all_gather_object(checkpoints, (own, copy.deepcopy(optimizer.state_dict()), step.count))
            found[part].append(step(*problem.inputs, *problem.targets).item())
            optimizer.step()
            optimizer.zero_grad()
        found[f"{part}, after"] = {name: t.detach() for name, t in (*step.named_parameters(), *step.named_buffers())}
    return found


def trained(rank: int, schedule: str) -> dict[str, Any]:
    problem = gpt(5)
    return run(compiled(problem, 4, 5, schedule=schedule).bind(), problem, STEPS)


def trained_alone(rank: int, make: Maker, stages: int, microbatches: int, steps: int) -> dict[str, Any]:
    """All ranks of the pipeline in this process."""
    problem = make(microbatches)
    return run(compiled(problem, stages, microbatches).run_local(), problem, steps)


def many_microbatches(rank: int) -> dict[str, Any]:
    problem = mlp(256)
    pipe = compiled(problem, 4, 256, schedule="zb-h1")
    found = pipe.bind()(*problem.inputs, *problem.targets).item()
    problem.model.load_state_dict(mlp(256).model.state_dict())  # else of before the step, on all ranks but one
    return {"256": found, "local": pipe.run_local()(*problem.inputs, *problem.targets).item() if rank == 0 else None}


def refusals_of_bind(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    pipe = compiled(mlp(3), 4, 3)
    results["other order"] = refusal((rescheduled(pipe, 3, "1f1b") if rank == 2 else pipe).bind)
    results["other graph"] = refusal(compiled(skipping() if rank == 1 else mlp(3), 4, 3).bind)
    results["no data"] = refusal(compiled(without_data(rank == 3), 4, 3).bind)
    results["wrong rank"] = refusal(lambda: compiled(mlp(3), 4, 3).bind((rank + 1) % 4))
    results["wrong world"] = refusal(compiled(mlp(3), 3, 3).bind)
    return results


def disagreements(rank: int) -> dict[str, Any]:
    """Ranks that ask for different things; a pipeline of which all refuse a batch goes on."""
    problem = mlp(3)
    pipe = compiled(mlp(3), 4, 3)
    results: dict[str, Any] = {"alone": pipe.bind()(*problem.inputs, *problem.targets).item()}
    step = compiled(problem, 4, 3).bind()
    other = tuple(t.roll(1, 0) if rank == 2 else t for t in problem.inputs)
    results["other batch"] = refusal(lambda: step(*other, *problem.targets))
    losses = [step(*problem.inputs, *problem.targets).item()]
    results["other evaluation"] = refusal(lambda: step.evaluate(*other, *problem.targets))
    results["after other batch"] = [*losses, step.evaluate(*problem.inputs, *problem.targets).item()]
    options: dict[str, Any] = {"on_nonfinite": "drop", "timeout_s": 60.0} if rank == 1 else {}
    results["other options"] = refusal(lambda: pipe.bind(**options))
    results["unknown option"] = refusal(lambda: pipe.bind(on_nonfinite="dorp"))
    results["other arguments"] = refusal(lambda: compiled(mlp(3), 4, 3, check=rank == 3))
    results["other calls"] = refusal(pipe.bind if rank else lambda: compiled(mlp(3), 4, 3))
    return results


def faults(rank: int) -> dict[str, Any]:
    """A batch that all ranks refuse, then an error of rank 2 in the second microbatch's B; the model is bound again."""
    problem = mlp(3)
    step = compiled(problem, 4, 3).bind()
    results: dict[str, Any] = {}
    results["bad batch"] = refusal(lambda: step(numbers(7, 8), numbers(7, 8)))
    results["after bad batch"] = step(*problem.inputs, *problem.targets).item()
    with injected(Raise(), action("B2.1"), rank=2):
        results["fault"] = refusal(lambda: step(*problem.inputs, *problem.targets))
    results["after fault"] = refusal(lambda: step(*problem.inputs, *problem.targets))
    step = compiled(mlp(3), 4, 3).bind()
    results["bound again"] = step(*problem.inputs, *problem.targets).item()
    return results


def closed(rank: int) -> dict[str, Any]:
    """Steps that were closed, twice, and steps whose process groups are gone."""
    problem = mlp(3)
    step = compiled(problem, 4, 3).bind()
    step.close()
    step.close()
    results = {"closed": refusal(lambda: step(*problem.inputs, *problem.targets))}
    step = compiled(mlp(3), 4, 3).bind()
    dist.destroy_process_group()
    results["group gone"] = refusal(lambda: step(*problem.inputs, *problem.targets))
    step.close()
    return results


class Skipping(nn.Module):
    """Like the MLP, with the first layer's output added at the end: messages that skip ranks."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(x * 2.0)
        return self.layers(first) + first


def skipping() -> Problem:
    problem = mlp(3)
    first, *others = problem.model.children()
    return replace(problem, model=nn.Sequential(first, Skipping(nn.Sequential(*others))))


def without_data(here: bool) -> Problem:
    problem = mlp(3)
    return replace(problem, model=problem.model.to("meta")) if here else problem


def tied(rank: int) -> dict[str, Any]:
    """A tied model whose copies differ before bind. What is loaded before messages, as on GPUs, changes nothing."""
    problem = gpt2(4)
    torch.manual_seed(rank)
    if rank == 2:
        with torch.no_grad():
            problem.model.get_parameter("transformer.wte.weight").add_(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "LOADS", ("cpu",))
        step = compiled(problem, 3, 4).bind()
        return run(step, problem, 5)


def load_again(model: nn.Module) -> None:
    """Write a model's values, which no optimizer has changed: as far as a pipeline knows, other ranks trained them."""
    model.load_state_dict({name: value.detach().clone() for name, value in model.named_parameters()}, strict=False)


def seeded(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    dropout = replace(mlp(3), model=with_dropout())
    pipe = compiled(dropout, 3, 3)
    step, batch = pipe.bind(), (*dropout.inputs, *dropout.targets)
    first, _, second = step(*batch).item(), step.evaluate(*batch), step(*batch).item()
    load_again(dropout.model)
    one = pipe.run_local(seed=0)
    return {
        "seeded": [first, second, step.count],
        "seeded local": [one(*batch).item(), one(*batch).item(), 2],
    }


def shapes(rank: int) -> dict[str, Any]:
    """Losses and gradients of steps of several sizes, and beside them those of plain autograd."""
    problem = mlp(3)
    step = compiled(mlp(3), 3, 3).bind(on_new_shape="symbolic")
    found = []
    for rows in (6, 12, 9):
        batch = replace(problem, inputs=(numbers(rows, 8),), targets=(numbers(rows, 8, seed=2),))
        for parameter in step.parameters():
            parameter.grad = None
        loss, (expected, wanted) = step(*batch.inputs, *batch.targets), reference(batch, 3)
        own = {name: p.grad for name, p in step.named_parameters()}
        found.append((loss, own, expected, {name: wanted[name] for name in own}))
    for parameter in step.parameters():
        parameter.grad = None
    profiles = [step.profile(numbers(rows, 8), numbers(rows, 8, seed=2)) for rows in (12, 6, 12)]
    measured = [[[str(span.action) for span in spans] for spans in profile.spans] for profile in profiles]
    planned = [[[str(action) for action in order] for order in profile.schedule.ranks] for profile in profiles]
    seconds = [profile.schedule.costs.stages[0].forward_s for profile in profiles]
    return {
        "steps": found,
        "profiles": (measured, planned, seconds),
        "notes": [pipe.schedule.notes for pipe in step.pipelines],
    }


class Shared(nn.Module):
    """`frozen` and the buffers are read by the first and the last rank; `late` too, but trains on the last alone."""

    scale: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.late = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("kept", torch.arange(8) % 3 != 0)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x @ self.frozen + x @ self.late.detach()))
        x = torch.where(self.kept, x, x * self.scale)
        last = self.third(torch.tanh(self.second(x)) * self.scale).masked_fill(~self.kept, 0.1)
        return last @ self.frozen + x.sum() * self.late.sum()


def shared(rank: int) -> dict[str, Any]:
    """Two steps of a model whose copies differ from rank to rank before bind; rank 0's count."""
    problem = replace(mlp(3), model=Shared())
    pipe = compiled(problem, 3, 3, cuts=["second", "third"])
    local = run(pipe.run_local(), problem, 2)["losses"]
    problem.model.load_state_dict(Shared().state_dict())
    with torch.no_grad():
        for parameter in (problem.model.get_parameter(name) for name in ("frozen", "late")):
            parameter.add_(float(rank))
        problem.model.get_buffer("scale").add_(float(rank))
        problem.model.get_buffer("kept").logical_xor_(torch.tensor(rank > 0))
    step, told = warned(pipe.bind)
    return {"losses": run(step, problem, 2)["losses"], "local": local, "warnings": told}


def warned(bind: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What `bind` gives, and the warnings that the user sees, which are of this line."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step = bind()
    assert all(note.category is UserWarning and note.filename == __file__ for note in found)
    return step, [str(note.message) for note in found]


def other_values(rank: int) -> dict[str, list[str]]:
    """The warnings of binds of a model with other bits on some ranks, by why they are other."""
    told = {}
    for case in ("seeds", "checkpoint", "meta", "bound again", "checkpoint after bind", "same"):
        if case != "checkpoint after bind":
            problem = mlp(3)
        if case == "seeds":
            for parameter in problem.model.parameters():
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(rank))
        if case.startswith("checkpoint") and rank == 0:
            named = problem.model.named_parameters()
            problem.model.load_state_dict({name: value.detach() * 0.5 for name, value in named})
        pipe = compiled(problem, 3, 3, check=False)
        if case == "bound again":  # each rank trains its own stage
            run(pipe.bind(), problem, 1)
            pipe = compiled(problem, 3, 3, check=False)
        if case == "meta":
            used = {name for phase in pipe.stages[rank].phases.values() for name in phase.parameters}
            others = [name for name, _ in problem.model.named_parameters() if name not in used]
            for name in others:
                layer, _, last = name.rpartition(".")
                setattr(problem.model.get_submodule(layer), last, nn.Parameter(torch.empty(0, device="meta")))
        told[case] = warned(pipe.bind)[1]
    return told


def with_dropout() -> nn.Module:
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(*(b for _ in range(3) for b in (nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())))
    torch.set_rng_state(torch_state)
    return model


def killed(rank: int) -> dict[str, Any]:
    """Rank 1 dies in the middle of a step."""
    problem = mlp(3)
    step = compiled(problem, 3, 3).bind()
    step(*problem.inputs, *problem.targets)
    with injected(Kill(), action("B1.0"), rank=1):
        results = {"killed": refusal(lambda: step(*problem.inputs, *problem.targets))}
    results["compile after"] = refusal(lambda: compiled(mlp(3), 3, 3))
    return results


def ended_in_bind(rank: int) -> dict[str, Any]:
    """Rank 0 is late for a step by more than processes wait for each other in bind; then rank 1 ends in bind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "MEETING", timedelta(seconds=2))
        return meeting(rank, patch)


def meeting(rank: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    problem = mlp(3)
    pipe = compiled(problem, 2, 3)
    step = pipe.bind()
    if rank == 0:
        time.sleep(4)
    loss = step(*problem.inputs, *problem.targets).item()
    step.close()
    group = process_groups.new_group

    def ending(*args: Any) -> dist.ProcessGroup:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        return group(*args)

    load_again(problem.model)
    local = pipe.run_local()(*problem.inputs, *problem.targets).item()
    patch.setattr(process_groups, "new_group", ending)
    return {"late": loss, "local": local, "ended": refusal(pipe.bind)}
