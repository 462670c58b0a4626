"""compile(cache=folder): a second start neither traces nor plans, and what decides a plan decides the key.

Run: pytest tests/plans/test_cache.py (CPU, one process).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zbfx
from tests.plans.test_plans import counts, same_bits, tied, trained  # noqa: F401
from tests.support.models import Problem, mean_squares, mlp, squares
from tests.support.reference import compiled
from tests.support.user_passes import scaled, sine_for_tanh
from zbfx.errors import NoFeasibleSchedule, ZbfxError
from zbfx.plans import cache as caching
from zbfx.plans.cache import make_room, plan_cache


def test_a_warm_start_traces_and_plans_nothing(tmp_path: Path, counts: dict[str, int]) -> None:  # noqa: F811
    problem = tied(4)
    cold = compiled(problem, 2, 4, cache=tmp_path / "plans")
    once = dict(counts)
    assert min(once.values()) >= 1
    again = replace(problem, model=copy.deepcopy(problem.model))
    warm = compiled(again, 2, 4, cache=tmp_path / "plans")
    assert counts == once
    assert (warm.schedule, warm.memory) == (cold.schedule, cold.memory)
    assert same_bits(trained(problem, cold), trained(again, warm))
    assert len(list(tmp_path.joinpath("plans").iterdir())) == 1


def test_measured_costs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mlp(4)
    cold = compiled(problem, 2, 4, costs="measure", rebalance=True, check=False, cache=tmp_path)
    monkeypatch.setattr("zbfx.costs.measure.call_s", None)
    monkeypatch.setattr("zbfx.costs.measure.sustained_s", None)
    warm = compiled(problem, 2, 4, costs="measure", rebalance=True, check=False, cache=tmp_path)
    assert warm.costs == cold.costs


def key(problem: Problem, **options: Any) -> str:
    found = []

    def noted(*args: Any) -> Any:
        found.append(plan_cache(*args))
        raise KeyError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbfx.pipeline.plan_cache", noted)
        with pytest.raises(KeyError):
            compiled(problem, **{"stages": 2, "microbatches": 4, "cache": found_folder, **options})
    return str(found[0].key)


found_folder = Path(os.environ.get("TMPDIR", "/tmp"))


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.layers = scale, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.layers(x), self.scale)


def helper(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x * scale


def of_scale(scale: float = 2.0, dtype: torch.dtype = torch.float32, width: int = 8) -> Problem:
    rows = torch.zeros(8, width, dtype=dtype)
    return Problem(Scaled(scale).to(dtype), mean_squares, (rows,), (rows,))


def transposed(problem: Problem) -> Problem:
    return replace(problem, inputs=(torch.zeros(8, 8).t(),))


def weighted(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda output, targets: mean_squares(output * weight, targets)


def test_the_same_call_has_the_same_key() -> None:
    values = torch.randn(8, 8)
    assert key(of_scale()) == key(of_scale()) == key(replace(of_scale(), inputs=(values,)))
    weight = torch.ones(8)
    assert key(replace(of_scale(), loss_fn=weighted(weight))) == key(replace(of_scale(), loss_fn=weighted(weight + 0)))


KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
]
CHANGES: dict[str, Callable[[], str]] = {
    "a value": lambda: key(of_scale(3.0)),
    "a dtype": lambda: key(of_scale(dtype=torch.float64)),
    "one microbatch": lambda: key(of_scale(), microbatches=1),
    "a stride": lambda: key(transposed(of_scale()), microbatches=1),
    "a loss": lambda: key(replace(of_scale(), loss_fn=squares, targets=())),
    "what a loss holds": lambda: key(replace(of_scale(), loss_fn=weighted(torch.ones(8)))),
    "another of these": lambda: key(replace(of_scale(), loss_fn=weighted(torch.zeros(8)))),
    "stages": lambda: key(of_scale(), stages=1),
    "microbatches": lambda: key(of_scale(), microbatches=2),
    "a schedule": lambda: key(of_scale(), schedule="1f1b"),
    "a pass": lambda: key(of_scale(), passes=[zbfx.Pass("joint", sine_for_tanh)]),
    "what a pass holds": lambda: key(of_scale(), passes=[zbfx.Pass("joint", scaled(1.0))]),
    "another of that": lambda: key(of_scale(), passes=[zbfx.Pass("joint", scaled(2.0))]),
    "a limit": lambda: key(of_scale(), mem_limit="1.5x"),
    "costs": lambda: key(of_scale(), costs="measure"),
    "a dtype of gradients": lambda: key(of_scale(), grad_dtype=torch.float64),
    "check": lambda: key(of_scale(), check=False),
    "batch dims": lambda: key(of_scale(), batch_dims=((0,), {}, 0)),
}


def test_what_decides_a_plan_decides_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"nothing": key(of_scale()), **{name: make() for name, make in CHANGES.items()}}
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = key(of_scale())
    with sdpa_kernel(SDPBackend.MATH):
        found["kernels of attention"] = key(of_scale())
    kernels = [SDPBackend.CUDNN_ATTENTION, *(kernel for kernel in KERNELS if kernel != SDPBackend.CUDNN_ATTENTION)]
    with sdpa_kernel(kernels, set_priority=True):
        found["their order"] = key(of_scale())
    for name in ("own_version", "device_text"):
        with monkeypatch.context() as patch:
            patch.setattr(f"zbfx.plans.cache.{name}", lambda *_: "another")
            found[name] = key(of_scale())
    monkeypatch.setitem(globals(), "helper", lambda x, scale: x + scale)
    found["a function that a forward calls"] = key(of_scale())
    alike = {name: text for name, text in found.items() if list(found.values()).count(text) > 1}
    assert alike == {}


def test_a_damaged_plan_counts_as_none(tmp_path: Path, counts: dict[str, int]) -> None:  # noqa: F811
    problem = mlp(4)
    compiled(problem, 2, 4, check=False, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    before = counts["traces"]
    with pytest.warns(UserWarning, match="the cache's plan is left out: .* is no plan"):
        compiled(problem, 2, 4, check=False, cache=tmp_path)
    assert counts["traces"] > before
    assert file.stat().st_size > 100


def test_what_no_file_can_hold_is_not_kept(tmp_path: Path) -> None:
    problem = mlp(4)
    orders = compiled(problem, 2, 4, check=False).schedule.ranks
    with pytest.warns(UserWarning, match="this plan is not kept in the cache: .*a function"):
        compiled(problem, 2, 4, check=False, schedule=lambda costs, microbatches: orders, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_cache_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ZbfxError, match="is no folder"):
        compiled(mlp(4), 2, 4, cache=tmp_path / "file")
    with pytest.raises(ZbfxError, match="cache is the path of a folder"):
        compiled(mlp(4), 2, 4, cache=True)


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old", "broken")):
        file = tmp_path / f"{name}.plan"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 - age, 1000 - age))
    (tmp_path / "notes.txt").write_bytes(bytes(1000))
    make_room(tmp_path, tmp_path / "broken.plan", 250)
    assert {file.name for file in tmp_path.iterdir()} == {"new.plan", "broken.plan", "notes.txt"}
    assert caching.MOST_BYTES == 1 << 30


def test_a_plan_for_more_memory_than_there_is_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mlp(4)
    monkeypatch.setattr("zbfx.memory.predict.free_bytes", lambda device, ranks: [1e9] * ranks)
    first = compiled(problem, 2, 4, mem_limit="auto", check=False, cache=tmp_path)
    least = max(memory.peak_bytes for memory in first.memory)
    monkeypatch.setattr("zbfx.memory.predict.free_bytes", lambda device, ranks: [least - 1.0] * ranks)
    with pytest.raises(NoFeasibleSchedule):
        compiled(problem, 2, 4, mem_limit="auto", check=False, cache=tmp_path)
