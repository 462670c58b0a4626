"""Prove a pipeline on the user's own model: the joint graph against its F, B and W run apart, gradient by gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from zbfx import rng
from zbfx._torch import graph_module, recomputing_within, set_gradient_dtype
from zbfx.arguments import checked_seed, finite_number, kind_of
from zbfx.comm.local import Mailbox
from zbfx.compiled import Compiled
from zbfx.errors import ZbfxError, first_line
from zbfx.graphs import Joint, Port, Role, copy_graph
from zbfx.passes.canonicalize import allow_any_strides, canonicalize
from zbfx.passes.nodes import is_random, is_view, is_widening
from zbfx.passes.positions import line_up
from zbfx.plan import Action, Kind
from zbfx.program import ops
from zbfx.program.codegen import Program, generate
from zbfx.runtime.engine import local_runners, take_turns
from zbfx.runtime.runner import Tensors
from zbfx.schedule import build
from zbfx.trace.compiled_parts import rebind_compiled, without_compiling
from zbfx.trace.guard import Source
from zbfx.trace.left_behind import without_look_outs
from zbfx.trace.objective import Objective
from zbfx.trace.tracer import named_tensors


class Values(StrEnum):
    """What the microbatches of a check hold."""

    RANDOM = "random"
    EXAMPLE = "example"
    ZEROS = "zeros"


@dataclass(frozen=True)
class Finding:
    """One wrong result: `name` is a parameter or "loss", `kind` is "lost", "doubled" or "different"."""

    name: str
    kind: str
    error: float  # largest absolute difference over the largest absolute value
    of_model: bool = False  # between two runs of the model itself, and the trace of one

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} (relative difference {self.error:.3g})"


@dataclass(frozen=True)
class Report:
    """What `check` compared and what it found; true if everything agreed. `bitwise` counts results equal in bits."""

    compared: int
    bitwise: int
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.compared} results compared, {self.bitwise} equal in bits, {len(self.findings)} wrong"
        return "\n".join([head, *map(str, self.findings)])


class Checkable(Protocol):
    """What `zbfx.compile` returns."""

    @property
    def compiled(self) -> Compiled: ...
    @property
    def source(self) -> Source: ...


def check(pipe: Checkable, *, seed: int = 0, tolerance: float = 1e-6, floor: float = 1e-12) -> Report:
    """Run the joint graph of two microbatches, and the stages' F, B and W apart, on the same random data.

    The second microbatch differs from the first in every value. Results are equal if they agree in bits, or, where a
    gradient is a sum of several contributions, within `tolerance` relative to its largest value, or to `floor` times
    the largest value of all, where that is more. A copy of the model itself runs both microbatches too, forward and
    backward, unless it draws random numbers: where its losses differ, or the buffers that it writes, the trace holds a
    value that changes from call to call. Allocates the whole model on the pipeline's device; the user's tensors are not
    written.

    Random numbers may mean nothing to the model, which then raises: the values of model and example are tried next,
    then zeros. Raises `ZbfxError` if all of these fail."""
    if not isinstance(getattr(pipe, "compiled", None), Compiled):
        raise ZbfxError(f"check takes a pipeline, what zbfx.compile returns; found {kind_of(pipe)}")
    checked_seed(seed)
    finite_number("tolerance", tolerance, "how far results may differ, relative to their largest value")
    finite_number("floor", floor, "how far results may differ, relative to the largest value of all")
    with pipe.source.modes.fixed():
        return check_compiled(pipe.compiled, pipe.source, seed, tolerance, floor)


def check_compiled(pipe: Compiled, source: Source, seed: int, tolerance: float, floor: float) -> Report:
    """`check`, of the pipeline that the model of `source` was made into."""
    if source.local:
        raise ZbfxError(
            "check runs in one process, and a model with DTensor parameters runs on several: check the model before "
            "its parameters are distributed"
        )
    failed: Exception | None = None
    for values in Values:
        try:
            return compare_all(pipe, source, values, seed, tolerance, floor)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            failed = failed or error
    assert failed is not None, "there are several kinds of values"
    raise ZbfxError(
        f"a pipeline that cannot run: on random data of the example's kind, on the example and on zeros alike. "
        f"The first failed with {type(failed).__name__}: {first_line(failed)}. Check that the example has the dtypes "
        f"and values that the model takes; compile with check=False if only data of yours will do"
    ) from failed


def compare_all(pipe: Compiled, source: Source, values: Values, seed: int, tolerance: float, floor: float) -> Report:
    """The report on two microbatches of these values."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tensors, rows = random_data(pipe, source, generator, values)
    microbatches = [ops.Microbatch(row, rng.mix(seed, index)) for index, row in enumerate(rows)]
    loss_gradient = torch.tensor(1.0 / len(rows), dtype=pipe.reduction.dtype, device=pipe.device)
    expected = joint_results(pipe.joint, copied(tensors, pipe.joint.grad_dtypes), microbatches, loss_gradient)
    found = split_results(pipe, copied(tensors, pipe.joint.grad_dtypes), microbatches, loss_gradient)
    findings, bitwise = [], 0
    least = floor * max((largest(want) for want in expected.values()), default=0.0)
    terms = {port.name: term_dtype(value) for value, port in gradient_outputs(pipe.joint)}
    for name, want in expected.items():
        have = found.get(name)
        if have is not None and torch.equal(have, want):
            bitwise += 1
        elif finding := compare(name, want, have, max(tolerance, rounding_of(terms.get(name, want.dtype))), least):
            findings.append(finding)
    findings += [Finding(name, "different", float("inf")) for name in found if name not in expected]
    own = own_results(pipe, source, tensors, rows, loss_gradient)
    for name, value in own.items():
        rounding = torch.finfo(value.dtype).eps ** 0.5 if value.is_floating_point() or value.is_complex() else 0.0
        title = f"{name} of the model itself (a Python value that changes from call to call?)"
        if finding := compare(title, value, expected[name], max(tolerance, rounding), least):
            findings.append(replace(finding, of_model=True))
    return Report(len(expected) + len(own), bitwise, tuple(findings))


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


def own_results(
    pipe: Compiled, source: Source, tensors: Tensors, rows: Sequence[Mapping[str, Tensor]], loss_gradient: Tensor
) -> dict[str, Tensor]:
    """The losses of a copy of the user's model on these tensors, and the buffers that its forwards and backwards write;
    nothing if it draws random numbers."""
    if any(is_random(node) for node in pipe.joint.graph.nodes):
        return {}
    memo = without_look_outs(source.model, source.loss_fn)
    for name, live in source.tensors.items():
        given = tensors.named[name].clone() if name in tensors.named else torch.zeros_like(live, device=pipe.device)
        memo[id(live)] = nn.Parameter(given, live.requires_grad) if isinstance(live, nn.Parameter) else given.detach()
    model = copy.deepcopy(source.model, memo)
    loss_fn = copy.deepcopy(source.loss_fn, memo) if isinstance(source.loss_fn, nn.Module) else source.loss_fn
    objective = Objective(model, loss_fn, pipe.signature, traced=False)
    results: dict[str, Tensor] = {}
    for copied in (model, loss_fn):
        if isinstance(copied, nn.Module):
            rebind_compiled(copied, memo)
    with source.modes.traced(), torch.enable_grad(), without_compiling(), recomputing_within(objective.recomputing):
        for index, row in enumerate(rows):
            objective.stand_ins = {name: buffer.clone() for name, buffer in objective.named_buffers()}
            loss = objective.losses(tuple(row.values()))[0]
            loss.backward(loss_gradient)
            results[f"loss {index}"] = loss.detach()
    now = named_tensors(model, loss_fn)
    written = [port for port in pipe.joint.outputs if port.role is Role.BUFFER_UPDATE]
    return results | {str(port): now[port.name].detach() for port in written}


def largest(values: Tensor) -> float:
    """The largest of the absolute values that are finite; 0 if there is none."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def compare(name: str, want: Tensor, have: Tensor | None, tolerance: float, least: float = 0.0) -> Finding | None:
    """What is wrong, relative to the largest value, or to `least`. Values that are not finite must be the same."""
    if not (want.is_floating_point() or want.is_complex()):
        want, have = want.double(), None if have is None else have.double()
    scale = max(largest(want), least) or 1.0
    if have is None:
        return Finding(name, "lost", 1.0)
    finite = want.isfinite()
    if not torch.allclose(have[~finite], want[~finite], rtol=0.0, atol=0.0, equal_nan=True):
        return Finding(name, "different", float("inf"))
    have, want = have[finite], want[finite]
    if not want.numel():
        return None
    error = float((have - want).abs().max()) / scale
    if error <= max(tolerance, rounding_of(want.dtype)):
        return None
    doubled = float((have - 2 * want).abs().max()) / scale <= tolerance
    return Finding(name, "doubled" if doubled else "different", error)


def random_data(
    pipe: Compiled, source: Source, generator: torch.Generator, values: Values
) -> tuple[Tensors, list[dict[str, Tensor]]]:
    """Random parameters and buffers, and two microbatches: new floats, and the example's integers in two orders; or
    the model's own values and the example twice; or zeros for the microbatches."""
    named: dict[str, Tensor] = {}
    live = source.tensors
    for node, port in pipe.joint.input_ports().items():
        if port.role in (Role.PARAMETER, Role.BUFFER):
            named[port.name] = random_like(node.meta["val"], live[port.name], generator, pipe.device)
            if values is Values.EXAMPLE and not live[port.name].is_meta:
                named[port.name].copy_(live[port.name].detach())
    examples = [(spec.name, example) for spec, example in zip(pipe.signature.tensors, pipe.examples, strict=True)]
    rows = [
        {name: like_example(example, values, shift, generator).to(pipe.device) for name, example in examples}
        for shift in (0, 1)
    ]
    return Tensors(named, pipe.joint.constants), rows


def random_like(fake: Tensor, live: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """Small random numbers for a floating-point tensor; a copy of the live one otherwise (masks, positions)."""
    if not (fake.is_floating_point() or fake.is_complex()):
        return torch.zeros_like(live, device=device) if live.is_meta else live.detach().clone().to(device)
    values = torch.randn(fake.shape, generator=generator, dtype=torch.float32).mul_(0.1).abs_().add_(0.01)
    signs = torch.randint(0, 2, fake.shape, generator=generator).mul_(2).sub_(1) if fake.ndim > 1 else 1
    result = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
    return result.copy_(values * signs)


def like_example(example: Tensor, values: Values, shift: int, generator: torch.Generator) -> Tensor:
    """Random values of the example's kind: new floats, or the example's integers in another order."""
    if example.is_meta or values is Values.ZEROS:
        return torch.zeros(example.shape, dtype=example.dtype)
    if values is Values.EXAMPLE:
        return example.detach()
    if example.is_floating_point():
        return torch.randn(example.shape, generator=generator, dtype=torch.float32).to(example.dtype)
    flat = example.flatten()
    order = torch.randperm(flat.numel(), generator=generator) if shift else torch.arange(flat.numel())
    return flat.cpu()[order].view(example.shape)


def copied(tensors: Tensors, dtypes: Mapping[str, torch.dtype]) -> Tensors:
    """Copies whose gradients have these dtypes, by parameter."""
    named = {
        name: nn.Parameter(t.clone()) if t.is_floating_point() or t.is_complex() else t.clone()
        for name, t in tensors.named.items()
    }
    for name, dtype in dtypes.items():
        set_gradient_dtype(named[name], dtype)
    return Tensors(named, tensors.constants)


class JointInterpreter(fx.Interpreter):
    """Runs a joint graph with the random numbers that the stages draw."""

    def __init__(self, joint: Joint, seed: int, repeats: Mapping[str, str]) -> None:
        """`repeats`: the random nodes that draw again what another drew, by name."""
        super().__init__(graph_module(nn.Module(), joint.graph, "Joint"))
        self.seed, self.repeats = seed, repeats

    def run_node(self, n: fx.Node) -> Any:
        if not is_random(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        stream = rng.stream_number(self.repeats.get(n.name, n.name))
        return rng.seeded(n.target, stream, self.seed, *args, **kwargs)


def repeated_draws(joint: Joint) -> dict[str, str]:
    """The random nodes of a joint graph that recompute, and the nodes that they repeat."""
    if not any(is_random(node) and node.meta.get("is_backward") for node in joint.graph.nodes):
        return {}
    original = line_up(canonicalize(joint)).original
    return {node.name: first.name for node, first in original.items() if is_random(node)}


@torch.no_grad()
def joint_results(
    joint: Joint, tensors: Tensors, microbatches: list[ops.Microbatch], loss_gradient: Tensor
) -> dict[str, Tensor]:
    """Losses, summed gradients and final buffers of the unsplit graph."""
    graph = copy_graph(joint.graph)
    allow_any_strides(graph)  # what runs may have other strides than what was traced
    joint = replace(joint, graph=graph)
    repeats = repeated_draws(joint)
    results: dict[str, Tensor] = {}
    for index, microbatch in enumerate(microbatches):
        inputs = [port_value(port.role, port.name, tensors, microbatch, loss_gradient) for port in joint.inputs]
        outputs = JointInterpreter(joint, microbatch.seed, repeats).run(*inputs)
        for port, value in zip(joint.outputs, outputs, strict=True):
            if port.role is Role.LOSS:
                results[f"loss {index}"] = value
            elif port.role is Role.BUFFER_UPDATE:
                tensors.named[port.name].copy_(value)
                results[str(port)] = tensors.named[port.name].detach()
            else:
                previous, value = results.get(port.name), value.to(joint.grad_dtypes.get(port.name, value.dtype))
                results[port.name] = value + torch.zeros_like(value) if previous is None else previous + value
    return results


def port_value(role: Role, name: str, tensors: Tensors, microbatch: ops.Microbatch, loss_gradient: Tensor) -> Tensor:
    if role is Role.INPUT:
        return microbatch.inputs[name]
    if role is Role.CONSTANT:
        return tensors.constants[name]
    return loss_gradient if role is Role.LOSS_GRADIENT else tensors.named[name].detach()


@torch.no_grad()
def split_results(
    pipe: Compiled, tensors: Tensors, microbatches: list[ops.Microbatch], loss_gradient: Tensor
) -> dict[str, Tensor]:
    """Losses, summed gradients and final buffers of the stages' F, B and W, on all ranks, in this process."""
    runners = local_runners(pipe, apart(pipe, len(microbatches)), tensors, Mailbox())
    runners[pipe.loss_rank].combine = lambda *losses: losses[0]  # each is compared by itself
    for runner in runners:
        runner.start(loss_gradient)
    ends = take_turns([runner.run(microbatches, step=0) for runner in runners])
    results = {f"loss {k}": loss for losses in ends for k, loss in enumerate(losses)}
    results |= {name: t.grad for name, t in tensors.named.items() if t.grad is not None}
    written = {port for port in pipe.joint.outputs if port.role is Role.BUFFER_UPDATE}
    return results | {str(port): tensors.named[port.name].detach() for port in written}


def apart(pipe: Compiled, microbatches: int) -> tuple[Program, ...]:
    """Programs that run all Fs, then all Bs, then all Ws."""
    costs = pipe.schedule.costs
    orders = []
    for rank in range(costs.rank_count):
        stages = costs.stages_of(rank)
        forward = [Action(Kind.F, stage, k) for stage in stages for k in range(microbatches)]
        backward = [
            Action(kind, s, k) for kind in (Kind.B, Kind.W) for s in reversed(stages) for k in range(microbatches)
        ]
        orders.append((*forward, *backward))
    return generate(pipe.stages, build("apart", costs, microbatches, tuple(orders), None))
