"""Prove a pipeline on the user's own model: the emitted programs, step after step, against the unsplit joint graph, and
that against the model under autograd: losses, gradients, buffers and the order of their writes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, fx

from zbfx import rng
from zbfx.arguments import checked_seed, finite_number, kind_of
from zbfx.check_causes import cause_of
from zbfx.checked_runs import (
    Data,
    StepResults,
    Values,
    emitted_results,
    joint_results,
    own_results,
    phases_to_run,
    random_data,
)
from zbfx.compiled import Compiled
from zbfx.errors import ZbfxError, first_line, listed
from zbfx.graphs import Joint, Port, Role
from zbfx.passes.nodes import is_view, is_widening
from zbfx.plan import Action, Kind
from zbfx.schedule import build
from zbfx.trace.guard import Source

CHECKED_STEPS = 2
Close = Callable[..., "Finding | None"]  # compares what is expected and what is found


@dataclass(frozen=True)
class Finding:
    """One wrong result of a step, which counts from 1. `name` is a parameter, "loss 0", "buffer update ...", an action
    like "W0.1", or "the programs". `kind` is "lost", "doubled", "different", "out of order", "stale" (right in the step
    before), or why the programs failed."""

    name: str
    kind: str
    error: float  # largest absolute difference over the largest absolute value
    of_model: bool = False  # between two runs of the model itself, and the trace of one
    step: int = 1

    def __str__(self) -> str:
        where = "" if self.step == 1 else f" in step {self.step}"
        return f"{self.name}{where}: {self.kind} (relative difference {self.error:.3g})"


@dataclass(frozen=True)
class Report:
    """What `check` compared and what it found; true if everything agreed. `bitwise` counts results equal in bits.
    `cause` is the first place at which the programs go wrong, as far as it is known."""

    compared: int
    bitwise: int
    findings: tuple[Finding, ...]
    cause: str = ""

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.compared} results compared, {self.bitwise} equal in bits, {len(self.findings)} wrong"
        return "\n".join([head, *map(str, self.findings), *([self.cause] if self.cause else [])])


class Checkable(Protocol):
    """What `zbfx.compile` returns."""

    @property
    def compiled(self) -> Compiled: ...
    @property
    def source(self) -> Source: ...


def check(pipe: Checkable, *, seed: int = 0, tolerance: float = 1e-6, floor: float = 1e-12) -> Report:
    """Run two steps of the pipeline's programs on random data, all ranks in this process, in the schedule's order; and,
    on the same data, the unsplit joint graph, and a copy of the model itself under autograd.

    Every microbatch differs from the others in every value. Parameters change in place between the steps; gradients
    accumulate. Compared are the losses, the gradients, the buffers after each write, and the actions that ran; the
    global generators of random numbers stay as they are. StepResults of the programs are equal to those of the graph if
    they agree in bits, or, where a gradient is a sum of several contributions, within `tolerance` relative to its
    largest value, or to `floor` times the largest value of all, where that is more. Where the graph differs from the
    model, within half of the digits, the trace holds a value that changes from call to call, or a derivative is wrong.
    The copy draws the random numbers of the pipeline, unless it draws others than were traced: then it is left out.
    Allocates the whole model on the pipeline's device several times; the user's tensors are not written.

    Random numbers may mean nothing to the model, which then raises: the values of model and example are tried next,
    then zeros. Raises `ZbfxError` if all of these fail."""
    if not isinstance(getattr(pipe, "compiled", None), Compiled):
        raise ZbfxError(f"check takes a pipeline, what zbfx.compile returns; found {kind_of(pipe)}")
    checked_seed(seed)
    finite_number("tolerance", tolerance, "how far results may differ, relative to their largest value")
    finite_number("floor", floor, "how far results may differ, relative to the largest value of all")
    with pipe.source.modes.fixed():
        return check_compiled(pipe.compiled, pipe.source, seed, tolerance, floor, CHECKED_STEPS)


def check_compiled(pipe: Compiled, source: Source, seed: int, tolerance: float, floor: float, steps: int = 1) -> Report:
    """`check`, of the pipeline that the model of `source` was made into."""
    if source.local:
        raise ZbfxError(
            "check runs in one process, and a model with DTensor parameters runs on several: check the model before "
            "its parameters are distributed"
        )
    failed: Exception | None = None
    for values in Values:
        data = random_data(pipe, source, values, seed, steps)
        try:
            expected, own = joint_results(pipe, data), own_results(pipe, source, data)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            failed = failed or error
            continue
        return compare_results(pipe, data, expected, own, tolerance, floor)
    assert failed is not None, "there are several kinds of values"
    raise ZbfxError(
        f"a pipeline that cannot run: on random data of the example's kind, on the example and on zeros alike. "
        f"The first failed with {type(failed).__name__}: {first_line(failed)}. Check that the example has the dtypes "
        f"and values that the model takes; compile with check=False if only data of yours will do"
    ) from failed


def compare_results(
    pipe: Compiled,
    data: Data,
    expected: Sequence[StepResults],
    own: Sequence[StepResults],
    tolerance: float,
    floor: float,
) -> Report:
    """Compares what the programs give with what is expected, and that with the model's own results."""
    findings: list[Finding] = []
    bitwise, cause, before = 0, "", rng.generators(pipe.device)
    found = iter_found(emitted_results(pipe, data))
    for step, want in enumerate(expected, 1):
        have = next(found)
        if isinstance(have, Exception):
            text = f"failed with {type(have).__name__}: {first_line(have)}"
            findings.append(Finding("the programs", text, float("inf"), step=step))
            break
        bitwise += sum(name in have.values and torch.equal(have.values[name], v) for name, v in want.values.items())
        least = least_of(want, floor)
        close = partial(compare, tolerance=tolerance, least=least, different="different" if step == 1 else "stale")
        new = [*wrong_values(pipe.joint, want, have, close, tolerance), *wrong_order(pipe, want, have, close)]
        if new:
            findings += [replace(finding, step=step) for finding in new]
            both = {finding.name for finding in new} & want.values.keys() & have.values.keys()
            wrong = {name: have.values[name] - value for name, value in want.values.items() if name in both}
            cause = cause_of(pipe, data, step - 1, wrong, tolerance)
            break
    if not rng.same_generators(before, rng.generators(pipe.device)):
        findings.append(Finding("the global generators of random numbers", "different", float("inf")))
    findings += of_model(expected, own, tolerance, floor)
    count = sum(len(results.values) for results in (*expected, *own))
    return Report(count, bitwise, tuple(findings), cause)


def iter_found(steps: Iterator[StepResults]) -> Iterator[StepResults | Exception]:
    """The results of the steps, and the error that ends them, if any does."""
    try:
        yield from steps
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        yield error


def least_of(results: StepResults, floor: float) -> float:
    return floor * max(map(largest, results.values.values()), default=0.0)


def gradient_outputs(joint: Joint) -> list[tuple[fx.Node, Port]]:
    pairs = zip(joint.output_values, joint.outputs, strict=True)
    return [(value, port) for value, port in pairs if port.role is Role.GRADIENT]


def term_dtype(value: fx.Node) -> torch.dtype:
    """The dtype in which the graph adds up the terms of a gradient: stages add them in that of the whole sum."""
    while is_view(value) or is_widening(value):
        value = value.args[0]  # type: ignore[assignment]
    dtype: torch.dtype = value.meta["val"].dtype
    return dtype


def rounding_of(dtype: torch.dtype) -> float:
    """How far sums may differ that were rounded in another order."""
    return 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def wrong_values(
    joint: Joint, want: StepResults, have: StepResults, close: Close, tolerance: float
) -> Iterator[Finding]:
    """What is wrong with the values that a step of the programs has left."""
    terms = {port.name: term_dtype(value) for value, port in gradient_outputs(joint)}
    for name, value in want.values.items():
        found = have.values.get(name)
        is_equal = found is not None and torch.equal(found, value)
        rounding = max(tolerance, rounding_of(terms.get(name, value.dtype)))
        if not is_equal and (finding := close(name, value, found, tolerance=rounding)):
            yield finding
    yield from (Finding(name, "different", float("inf")) for name in have.values if name not in want.values)


def wrong_order(pipe: Compiled, want: StepResults, have: StepResults, close: Close) -> Iterator[Finding]:
    """Actions that did not run once, and buffers that were not written once by each microbatch, in ascending order."""
    count = pipe.reduction.microbatches
    ran = Counter(have.calls)
    for phase in (stage.phases[Kind.P] for stage in pipe.stages):
        times = sum(number for (name, _), number in ran.items() if name == phase.name)
        if times != (not phase.is_empty):
            yield Finding(f"{phase.name}.0", "doubled" if times else "lost", 1.0)
    for name in sorted(phases_to_run(pipe, have.calls)):
        for index in range(count):
            times = ran[name, index]
            if times != 1:
                yield Finding(f"{name}.{index}", "doubled" if times else "lost", 1.0)
    orders: dict[str, list[int]] = defaultdict(list)
    for name, index in have.calls:
        orders[name].append(index)
    for stage in pipe.stages:
        for phase in stage.phases.values():
            order = orders[phase.name]
            if phase.updates and order != sorted(order):
                text = f"out of order: written for microbatches {listed(map(str, order), 8)}"
                yield from (Finding(f"buffer {name}", text, 1.0) for name in phase.updates)
    for name, values in want.writes.items():
        found = have.writes.get(name, [])
        pairs = enumerate(zip(values, found, strict=False))
        wrong = (close(f"buffer {name} after microbatch {k}", a, b) for k, (a, b) in pairs)
        yield from [finding for finding in wrong if finding][:1]


def of_model(
    expected: Sequence[StepResults], own: Sequence[StepResults], tolerance: float, floor: float
) -> Iterator[Finding]:
    """Where the joint graph and the model itself differ: once for each name."""
    seen: set[str] = set()
    for step, (want, model) in enumerate(zip(expected, own, strict=False), 1):
        top = least_of(want, 1.0)
        for name, value in model.values.items():
            precise = value.is_floating_point() or value.is_complex()
            rounding = torch.finfo(value.dtype).eps ** 0.5 if precise else 0.0
            allowed = max(tolerance, rounding)
            # What is zero but for rounding, as a bias before a norm, differs by as much as the largest gradient rounds.
            least = top * max(floor, rounding / allowed if allowed else 0.0)
            title = f"{name} of the model itself (a Python value that changes from call to call?)"
            if name not in seen and (finding := compare(title, value, want.values[name], allowed, least)):
                seen.add(name)
                yield replace(finding, of_model=True, step=step)


def largest(values: Tensor) -> float:
    """The largest of the absolute values that are finite; 0 if there is none."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def compare(
    name: str, want: Tensor, have: Tensor | None, tolerance: float, least: float = 0.0, different: str = "different"
) -> Finding | None:
    """What is wrong, relative to the largest value, or to `least`. Values that are not finite must be the same.
    `different` is the kind of what is neither lost nor doubled."""
    if not (want.is_floating_point() or want.is_complex()):
        want, have = want.double(), None if have is None else have.double()
    scale = max(largest(want), least) or 1.0
    if have is None:
        return Finding(name, "lost", 1.0)
    finite = want.isfinite()
    if not torch.allclose(have[~finite], want[~finite], rtol=0.0, atol=0.0, equal_nan=True):
        return Finding(name, different, float("inf"))
    have, want = have[finite], want[finite]
    if not want.numel():
        return None
    error = float((have - want).abs().max()) / scale
    if error <= max(tolerance, rounding_of(want.dtype)):
        return None
    doubled = float((have - 2 * want).abs().max()) / scale <= tolerance
    return Finding(name, "doubled" if doubled else different, error)


def apart(pipe: Compiled, microbatches: int = 2) -> Compiled:
    """The pipeline with programs that run all Fs, then all Bs, then all Ws: its stages, whatever their schedule."""
    costs = pipe.schedule.costs
    orders = []
    for rank in range(costs.rank_count):
        stages = costs.stages_of(rank)
        forward = [Action(Kind.F, stage, k) for stage in stages for k in range(microbatches)]
        backward = [
            Action(kind, s, k) for kind in (Kind.B, Kind.W) for s in reversed(stages) for k in range(microbatches)
        ]
        orders.append((*forward, *backward))
    schedule = build("apart", costs, microbatches, tuple(orders), None)
    reduction = replace(pipe.reduction, microbatches=microbatches)
    return replace(pipe, schedule=schedule, reduction=reduction, reductions=(), chain=None)
