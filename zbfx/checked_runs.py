"""Runs of one model on the same data, for `check` to compare: its joint graph, the emitted programs of all ranks, and
the model itself. Each runs a few steps; between them parameters change in place, as an optimizer changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from zbfx import rng
from zbfx._torch.compiling import graph_module
from zbfx._torch.tensors import set_gradient_dtype
from zbfx._torch.tracing import recomputing_within
from zbfx.compiled import Compiled
from zbfx.graphs import Joint, Role, copy_graph
from zbfx.passes.canonicalize import allow_any_strides
from zbfx.passes.nodes import is_random
from zbfx.plan import Kind
from zbfx.program import ops
from zbfx.program.calls import Item, PhaseCall
from zbfx.replayed import OtherDraws, Replayed, repeated_draws
from zbfx.runtime.engine import Engine
from zbfx.runtime.ranks import AllHere
from zbfx.runtime.runner import Tensors
from zbfx.trace.compiled_parts import deep_copy, without_compiling
from zbfx.trace.guard import Source
from zbfx.trace.left_behind import without_look_outs
from zbfx.trace.loss import dtype_of_batch_loss
from zbfx.trace.objective import Objective
from zbfx.trace.tensor_names import named_tensors

SHRINK = 0.75  # what becomes of every parameter between two steps
BATCH_LOSS = "loss of the batch"
NamedRow = Mapping[str, Tensor]  # a microbatch
Keep = Callable[[int, int, dict[str, Tensor]], None]  # (step, microbatch, values of all nodes)
# At what a call takes or returns: (step, call, microbatch, names, values).
Look = Callable[[int, PhaseCall, int, Sequence[Item], Sequence[Any]], None]


class Values(StrEnum):
    """What the microbatches of a check hold."""

    RANDOM = "random"
    EXAMPLE = "example"
    ZEROS = "zeros"


@dataclass(frozen=True)
class Data:
    """What all runs start from: tensors, which none of them writes, and the microbatches of each step."""

    tensors: Tensors
    batches: tuple[tuple[NamedRow, ...], ...]
    seed: int

    def seeded(self, step: int) -> list[ops.Microbatch]:
        seed = rng.mix(self.seed, step)
        return [ops.Microbatch(row, rng.mix(seed, index)) for index, row in enumerate(self.batches[step])]


@dataclass
class StepResults:
    """What a step leaves. `values`: losses by "loss k", gradients by parameter, buffers by their ports. `writes`: by
    buffer, its value after each write."""

    values: dict[str, Tensor] = field(default_factory=dict)
    writes: dict[str, list[Tensor]] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)  # the phases that ran, and on which microbatch


def random_data(pipe: Compiled, source: Source, values: Values, seed: int, steps: int) -> Data:
    """Random parameters and buffers, and microbatches that all differ: new floats, and the example's integers in other
    orders; or the model's own values and the example each time; or zeros for the microbatches."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    named: dict[str, Tensor] = {}
    live = source.tensors
    for node, port in pipe.joint.input_ports().items():
        if port.role in (Role.PARAMETER, Role.BUFFER):
            value = random_like(node.meta["val"], live[port.name], generator, pipe.device)
            if values is Values.EXAMPLE and not live[port.name].is_meta:
                value.copy_(live[port.name].detach())
            named[port.name] = nn.Parameter(value, requires_grad=False) if port.role is Role.PARAMETER else value
    examples = [(spec.name, example) for spec, example in zip(pipe.signature.tensors, pipe.examples, strict=True)]
    batches = tuple(
        tuple(
            {name: like_example(example, values, step + k > 0, generator).to(pipe.device) for name, example in examples}
            for k in range(pipe.reduction.microbatches)
        )
        for step in range(steps)
    )
    return Data(Tensors(named, pipe.joint.constants), batches, seed)


def random_like(fake: Tensor, live: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """Small random numbers for a floating-point tensor; a copy of the live one otherwise (masks, positions)."""
    if not (fake.is_floating_point() or fake.is_complex()):
        return torch.zeros_like(live, device=device) if live.is_meta else live.detach().clone().to(device)
    values = torch.randn(fake.shape, generator=generator, dtype=torch.float32).mul_(0.1).abs_().add_(0.01)
    signs = torch.randint(0, 2, fake.shape, generator=generator).mul_(2).sub_(1) if fake.ndim > 1 else 1
    result = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
    return result.copy_(values * signs)


def like_example(example: Tensor, values: Values, is_shuffled: bool, generator: torch.Generator) -> Tensor:
    """Random values of the example's kind: new floats, or the example's integers in another order."""
    if example.is_meta or values is Values.ZEROS:
        return torch.zeros(example.shape, dtype=example.dtype)
    if values is Values.EXAMPLE:
        return example.detach()
    if example.is_floating_point():
        return torch.randn(example.shape, generator=generator, dtype=torch.float32).to(example.dtype)
    flat = example.flatten()
    order = torch.randperm(flat.numel(), generator=generator) if is_shuffled else torch.arange(flat.numel())
    return flat.cpu()[order].view(example.shape)


def copied(tensors: Tensors, dtypes: Mapping[str, torch.dtype]) -> Tensors:
    """Copies whose gradients have these dtypes, by parameter."""
    named = {
        name: nn.Parameter(t.clone(), requires_grad=False) if isinstance(t, nn.Parameter) else t.clone()
        for name, t in tensors.named.items()
    }
    for name, dtype in dtypes.items():
        set_gradient_dtype(named[name], dtype)
    return Tensors(named, tensors.constants)


@torch.no_grad()
def shrink(tensors: Mapping[str, Tensor]) -> None:
    """Change the parameters among these, each once, under however many names it goes."""
    parameters = {id(tensor): tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)}
    for parameter in parameters.values():
        parameter.mul_(SHRINK)


def loss_weight(pipe: Compiled, rows: Sequence[NamedRow]) -> Tensor:
    """The gradient of the batch's loss by the loss of each microbatch."""
    weight = pipe.reduction.zeros(pipe.device)
    pipe.reduction.weigh(weight, pipe.reduction.tokens(rows), pipe.reduction.microbatches)
    return weight


class JointInterpreter(fx.Interpreter):
    """Runs a joint graph with the random numbers that the stages draw. `kept` gets the values of the nodes in it."""

    def __init__(self, joint: Joint, repeats: Mapping[str, str], kept: dict[str, Tensor] | None = None) -> None:
        """`repeats`: the random nodes that draw again what another drew, by name."""
        super().__init__(graph_module(nn.Module(), joint.graph, "Joint"))
        self.seed, self.repeats, self.kept = 0, repeats, kept

    def run_node(self, n: fx.Node) -> Any:
        if is_random(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            stream = rng.stream_number(self.repeats.get(n.name, n.name))
            result = rng.seeded(n.target, stream, self.seed, *args, **kwargs)
        else:
            result = super().run_node(n)
        if self.kept is not None and isinstance(result, Tensor):
            self.kept[n.name] = result
        return result


@torch.no_grad()
def joint_results(
    pipe: Compiled, data: Data, keep: Callable[[int, int, dict[str, Tensor]], None] | None = None
) -> list[StepResults]:
    """Losses, summed gradients and buffers of the unsplit graph, microbatch after microbatch. `keep` gets the values of
    all nodes, by step and microbatch."""
    joint, tensors = pipe.joint, copied(data.tensors, pipe.joint.grad_dtypes)
    graph = copy_graph(joint.graph)
    allow_any_strides(graph)  # what runs may have other strides than what was traced
    joint = replace(joint, graph=graph)
    runner = JointInterpreter(joint, repeated_draws(joint), None if keep is None else {})
    gradients: dict[str, Tensor] = {}
    steps: list[StepResults] = []
    for step, rows in enumerate(data.batches):
        shrink(tensors.named if step else {})
        results, weight = StepResults(), loss_weight(pipe, rows)
        steps.append(results)
        for index, microbatch in enumerate(data.seeded(step)):
            start = weight.to(pipe.reduction.dtype)
            inputs = [port_value(port.role, port.name, tensors, microbatch, start) for port in joint.inputs]
            runner.seed = microbatch.seed
            outputs = runner.run(*inputs)
            for port, value in zip(joint.outputs, outputs, strict=True):
                if port.role is Role.LOSS:
                    results.values[f"loss {index}"] = value
                elif port.role is Role.BUFFER_UPDATE:
                    tensors.named[port.name].copy_(value)
                    results.writes.setdefault(port.name, []).append(value.clone())
                    results.values[str(port)] = value.clone()
                elif port.role is Role.GRADIENT:
                    before, value = gradients.get(port.name), value.to(joint.grad_dtypes.get(port.name, value.dtype))
                    gradients[port.name] = value + torch.zeros_like(value) if before is None else before + value
            if keep is not None:
                assert runner.kept is not None, "asked for"
                keep(step, index, dict(runner.kept))
        losses = [results.values[f"loss {index}"] for index in range(len(rows))]
        results.values[BATCH_LOSS] = pipe.reduction.combine(losses, weight)
        results.values |= gradients
    return steps


def port_value(role: Role, name: str, tensors: Tensors, microbatch: ops.Microbatch, loss_gradient: Tensor) -> Tensor:
    if role is Role.INPUT:
        return microbatch.inputs[name]
    if role is Role.CONSTANT:
        return tensors.constants[name]
    return loss_gradient if role is Role.LOSS_GRADIENT else tensors.named[name].detach()


def noted_take(
    tensors: Tensors,
    results: StepResults,
    look: Look | None,
    step: int,
    microbatches: Mapping[int, int],
    call: PhaseCall,
    box: list[Any],
) -> tuple[Any, ...]:
    """What a call returns; notes that it ran, and what it wrote. `microbatches` are their numbers, by seed."""
    index = microbatches[box[0].seed]
    results.calls.append((call.phase.name, index))
    if look is not None:
        look(step, call, index, call.arguments, box[1:])
    returned = PhaseCall.take(call, box)
    for name in call.phase.updates:
        results.writes.setdefault(name, []).append(tensors.named[name].clone())
    if look is not None:
        look(step, call, index, call.returned, returned)
    return returned


@contextmanager
def taken_by(engine: Engine, take: Callable[[PhaseCall, list[Any]], Any]) -> Iterator[None]:
    """Meanwhile the calls of phases go through `take(call, box)`."""
    calls = [call for runner in engine.runners for call in runner.calls]
    for call in calls:
        vars(call)["take"] = partial(take, call)
    try:
        yield
    finally:
        for call in calls:
            del vars(call)["take"]


@torch.no_grad()
def emitted_results(pipe: Compiled, data: Data, look: Look | None = None) -> Iterator[StepResults]:
    """What the programs of all ranks leave, in this process, step after step. `look` sees what every call takes and
    returns, and the microbatch that it belongs to."""
    tensors = copied(data.tensors, pipe.joint.grad_dtypes)
    engine = AllHere().engine(pipe, tensors)
    names = [spec.name for spec in pipe.signature.tensors]
    for step, rows in enumerate(data.batches):
        shrink(tensors.named if step else {})
        microbatches = {microbatch.seed: index for index, microbatch in enumerate(data.seeded(step))}
        results = StepResults()

        take = partial(noted_take, tensors, results, look, step, microbatches)
        with taken_by(engine, take):
            ordered = [[row[name] for name in names] for row in rows]
            engine.weigh(ordered)
            for runner in engine.runners:
                runner.start(engine.loss_gradient)
            made = engine.run(ordered, rng.mix(data.seed, step), step)
            for runner in engine.runners:
                runner.finish_gradients()
        results.values |= {f"loss {index}": loss for index, loss in enumerate(made.losses)}
        assert made.loss is not None, "steps have losses"
        results.values[BATCH_LOSS] = made.loss
        results.values |= {name: t.grad.clone() for name, t in tensors.named.items() if t.grad is not None}
        written = [port for port in pipe.joint.outputs if port.role is Role.BUFFER_UPDATE]
        results.values |= {str(port): tensors.named[port.name].clone() for port in written}
        yield results


def own_results(pipe: Compiled, source: Source, data: Data) -> list[StepResults]:
    """Losses, gradients and written buffers of a copy of the user's model under autograd, on the random numbers of the
    pipeline; nothing if the model draws in another way than its graph."""
    memo = without_look_outs(source.model, source.loss_fn)
    for name, live in source.tensors.items():
        named = data.tensors.named
        given = named[name].detach().clone() if name in named else torch.zeros_like(live, device=pipe.device)
        memo[id(live)] = nn.Parameter(given, live.requires_grad) if isinstance(live, nn.Parameter) else given
    for name, dtype in pipe.joint.grad_dtypes.items():
        set_gradient_dtype(memo[id(source.tensors[name])], dtype)
    model = deep_copy(source.model, memo)
    loss_fn = deep_copy(source.loss_fn, memo) if isinstance(source.loss_fn, nn.Module) else source.loss_fn
    objective = Objective(model, loss_fn, pipe.signature, traced=False)
    replay = Replayed(pipe.joint) if any(is_random(node) for node in pipe.joint.graph.nodes) else None
    steps: list[StepResults] = []
    with source.modes.traced(), torch.enable_grad(), without_compiling(), recomputing_within(objective.recomputing):
        for step, rows in enumerate(data.batches):
            now = named_tensors(model, loss_fn)
            shrink(now if step else {})
            torch.clear_autocast_cache()  # of casts of weights that have changed
            results, weight = StepResults(), loss_weight(pipe, rows)
            losses, counts = [], []
            for microbatch in data.seeded(step):
                objective.held = objective.tensors()
                objective.stand_in({name: buffer.clone() for name, buffer in objective.named_buffers()})
                try:
                    with replay or nullcontext():
                        loss, count = run_own(objective, microbatch, weight, replay)
                except OtherDraws:
                    return []
                losses.append(loss.detach())
                counts += [] if count is None else [count.detach()]
            results.values |= {f"loss {index}": loss for index, loss in enumerate(losses)}
            results.values[BATCH_LOSS] = batch_loss(pipe, losses, counts)
            now = named_tensors(model, loss_fn)
            for port in pipe.joint.outputs:
                if port.role is Role.BUFFER_UPDATE:
                    results.values[str(port)] = now[port.name].detach().clone()
                elif port.role is Role.GRADIENT:
                    gradient = now[port.name].grad
                    dtype = pipe.joint.grad_dtypes.get(port.name, now[port.name].dtype)
                    zeros = torch.zeros_like(now[port.name].detach(), dtype=dtype)
                    results.values[port.name] = zeros if gradient is None else zeros + gradient
            steps.append(results)
    return steps


def run_own(
    objective: Objective, microbatch: ops.Microbatch, weight: Tensor, replay: Replayed | None
) -> tuple[Tensor, Tensor | None]:
    """Forward and backward of a microbatch: its loss, and its count if it has one."""
    if replay is not None:
        replay.begin(microbatch.seed)
    found = objective.made(tuple(microbatch.inputs.values()))
    assert found.loss is not None, "steps have losses"
    if replay is not None:
        replay.begin_backward()
    found.loss.backward(weight.to(found.loss.dtype))
    objective.keep_late_writes()
    if replay is not None:
        replay.end()
    return found.loss, found.count


def batch_loss(pipe: Compiled, losses: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
    """The loss of a batch, from those of its microbatches and their counts, if they have any."""
    whole = torch.stack(list(losses))
    total = whole.to(dtype_of_batch_loss(whole.dtype)).sum(0)
    if counts:
        count = torch.stack(list(counts)).double().sum(0)
        return torch.where(count > 0, total / count, 0.0).to(total.dtype).sum()
    return pipe.reduction.combine(losses, torch.ones_like(total))


def phases_to_run(pipe: Compiled, calls: Sequence[tuple[str, int]]) -> set[str]:
    """The names of the phases that each microbatch goes through; those of a W in pieces are taken from what ran."""
    kinds = [stage.phases.values() for stage in pipe.stages]
    pieces = bool(pipe.reductions)
    once = {phase.name for phases in kinds for phase in phases if phase.kind is Kind.P}
    whole = [p for phases in kinds for p in phases if not (p.is_empty or (pieces and p.kind is Kind.W))]
    return ({phase.name for phase in whole} | ({name for name, _ in calls} if pieces else set())) - once
