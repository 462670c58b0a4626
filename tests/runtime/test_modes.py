"""The caller's modes, at every call: the table of docs/modes.md, row by row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zbfx
from benchmarks.coverage.ambient import MODES, Watching
from tests.support.models import Problem, mean_squares, numbers
from tests.support.reference import compiled, reference
from zbfx.modes import SWITCHES
from zbfx.runtime.step import Step

MICROBATCHES = 2
TABLE = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if re.match(r"\| (?!-)", line)
]
CALLS, EXPECTED = ROWS[0][1:], {row[0]: row[1:] for row in ROWS[1:]}


class Model(nn.Module):
    """Products of a table in float32 that autocast leaves alone, read by both stages; a factor that is 1 where the
    default dtype is float64, and 0 where it is float32."""

    counts: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("counts", torch.ones(8, dtype=torch.int64))
        self.register_buffer("table", torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            angles = x @ self.table
        factor = (self.counts * 1e-25 * 1e-25 * 1e25 * 1e25).to(x.dtype)
        x = torch.tanh(self.first(x)) * angles.cos() + factor
        return self.second(x) * angles.sin()


def problem() -> Problem:
    return Problem(Model(), mean_squares, (numbers(32, 8),), (numbers(32, 8, seed=2),))


CHANGES = ("autocast", "default dtype", "function mode")  # what plain PyTorch computes for this model
# Within plain PyTorch these leave nothing to differentiate, or no values.
NOT_PLAIN = ("no_grad", "inference_mode", "default device", "torch.compile")


class Found(NamedTuple):
    """Losses of two steps, of an evaluation and of a profiled step, each gradient, and the switches that operators
    ran under."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    switches: set[tuple[Any, ...]]


def make(given: Problem) -> zbfx.Pipeline:
    return compiled(given, 2, MICROBATCHES, cuts=["second"], check=True)


@cache
def pipeline() -> zbfx.Pipeline:
    return make(problem())


def ran(mode: Callable[[Callable[[], Any]], Any], at: str) -> Found:
    """The calls in their order, one of them in a mode."""

    def called(name: str, call: Callable[[], Any]) -> Any:
        with Watching() if name != "compile" else nullcontext() as watching:
            result = mode(call) if name == at else call()
        if watching is not None and name != "bind":
            switches.update(watching.seen)
        return result

    switches: set[tuple[Any, ...]] = set()
    given = problem()
    pipe: zbfx.Pipeline = called("compile", partial(make, given)) if at == "compile" else pipeline()
    step: Step = called("bind", pipe.run_local)
    for parameter in step.parameters():
        parameter.grad = None
    batch = (*given.inputs, *given.targets)
    losses = [called(name, partial(step, *batch)) for name in ("first step", "later step")]
    losses.append(called("evaluate", partial(step.evaluate, *batch)))
    called("profile", partial(step.profile, *batch))
    losses += step.losses
    gradients = {name: p.grad for name, p in step.named_parameters() if p.grad is not None}
    assert not any(tensor.is_inference() for tensor in (*losses, *gradients.values()))
    return Found(losses, gradients, switches)


@cache
def usual() -> Found:
    return ran(lambda call: call(), "nowhere")


def assert_equal(found: Found, expected: Found) -> None:
    assert [loss.dtype for loss in found.losses] == [loss.dtype for loss in expected.losses]
    assert all(map(torch.equal, found.losses, expected.losses))
    assert found.gradients.keys() == expected.gradients.keys()
    assert all(torch.equal(value, expected.gradients[name]) for name, value in found.gradients.items())


def test_the_table_has_the_modes_and_calls_of_this_test() -> None:
    assert EXPECTED.keys() == MODES.keys()
    assert CALLS == ["compile", "bind", "first step", "later step", "evaluate", "profile"]
    assert {word for row in EXPECTED.values() for word in row} == {"followed", "frozen", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MODES)
def test_a_mode_at_a_call(name: str, call: str) -> None:
    kind = EXPECTED[name][CALLS.index(call)]
    if kind == "refused":
        with pytest.raises(zbfx.ZbfxError, match=r"called inside a transform of torch\.func"):
            ran(MODES[name], call)
        return
    found, expected = ran(MODES[name], call), usual()
    if name == "dispatch mode" or kind == "frozen":
        assert_equal(found, expected)
        assert found.switches == expected.switches == {tuple(switch.read() for switch in SWITCHES)}
        return
    (under,) = MODES[name](lambda: {tuple(switch.read() for switch in SWITCHES)})
    assert found.switches == {under}
    if name in NOT_PLAIN:
        assert_equal(found, expected)
        return
    given = problem()
    loss, gradients = MODES[name](lambda: reference(given, MICROBATCHES))
    assert torch.equal(found.losses[0], loss)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(found.gradients[parameter], 3 * gradient, rtol=1e-2, atol=1e-3)
    assert (name in CHANGES) == (not torch.equal(found.losses[0], expected.losses[0]))
    assert torch.equal(found.losses[2], found.losses[0]), "an evaluation outside of the mode follows it too"


def test_dispatch_modes_see_the_operators_of_a_step() -> None:
    step, given = pipeline().run_local(), problem()
    with Watching() as watching:
        step(*given.inputs, *given.targets)
    assert len(watching.seen) == 1


def everything() -> AbstractContextManager[Any]:
    @contextmanager
    def modes() -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.inference_mode(), torch.device("meta"):
            yield

    return modes()


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("rebalance", [False, True])
def test_phases_that_are_measured_under_autocast_are_compiled_without(rebalance: bool) -> None:
    """Else a product in float32, which both stages read, is one in bfloat16 that is read past its end."""
    given = problem()
    options: dict[str, Any] = {"backend": "inductor", "costs": "measure", "check": False, "rebalance": rebalance}
    if not rebalance:
        options["cuts"] = ["second"]
    with everything():
        pipe = compiled(given, 2, MICROBATCHES, **options)
    step = pipe.run_local()
    step.engine.run_phases_by(pipe.compiler)
    with everything():
        found = step(*given.inputs, *given.targets)
    exact, wanted = reference(given, MICROBATCHES)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, usual_gradients = reference(given, MICROBATCHES)
    assert abs(found - exact) <= 2 * abs(plain - exact) + 1e-3 * abs(exact)
    for name, parameter in step.named_parameters():
        gradient, want, usual_gradient = parameter.grad, wanted[name], usual_gradients[name]
        assert gradient is not None
        assert want is not None
        assert usual_gradient is not None
        assert (gradient - want).norm() <= 2 * (usual_gradient - want).norm() + 1e-3 * want.norm()


@pytest.mark.parametrize("spoilt", ["dtype", "shape"])
def test_what_a_phase_returns_is_what_the_next_was_made_for(spoilt: str) -> None:
    given = problem()
    step = make(given).run_local()
    call = next(call for call in step.engine.runners[0].calls if call.phase.name == "F0")
    run, name = call.run, call.phase.results[0]

    def wrong(box: list[Any]) -> Any:
        first, *others = run(box)
        return [first.double() if spoilt == "dtype" else first[:1], *others]

    call.run = wrong
    with pytest.raises(zbfx.ZbfxError) as raised:
        step(*given.inputs, *given.targets)
    dtype, rows = ("torch.float64", 16) if spoilt == "dtype" else ("torch.float32", 1)
    assert f"rank 0, step 0, action F0.0 (stage 0, microbatch 0): ZbfxError: F0 returns {name} as " in str(raised.value)
    assert f"found {dtype} of shape ({rows}, 8) on cpu" in str(raised.value)
