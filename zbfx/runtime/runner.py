"""Programs and a batch -> loss and gradients. One executor runs a rank's program, wherever the other ranks are: a
generator that yields where a message has not arrived yet, or what it sent has not. Where an optimizer step waits for
its verdict, the prefix runs first, and again if the verdict says that its weights were wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn
from torch.profiler import record_function

from zbfx._torch.switches import profiler_records
from zbfx._torch.tensors import gradient_dtype
from zbfx.errors import PipelineFault
from zbfx.graphs import Joint, Phase, Port, Role, Stage
from zbfx.passes.operators import Noted, noting_checks
from zbfx.plan import Action, Kind
from zbfx.program import calls, ops
from zbfx.program.boxed import dying_values
from zbfx.program.calls import PhaseCall
from zbfx.program.codegen import Program, Result
from zbfx.program.streams import Beside, on_stream_of, second_stream
from zbfx.runtime.checked_values import CheckedValue, failed, refuse_failed
from zbfx.runtime.flat import FlatGradients, Shards
from zbfx.runtime.pace import Pace
from zbfx.runtime.timeline import Recorder


class Wait(NamedTuple):
    """What a rank waits for: a message that it receives, or one that it sent; `number` counts its waits."""

    number: int
    key: str


NO_RANGE: AbstractContextManager[Any] = nullcontext()
Run = Generator[Wait, None, dict[Result, Tensor]]
Environment = dict[fx.Node, Any]


class Pending(Protocol):
    """An optimizer step that waits for its verdict. The rank that knows it first asks for `own_verdict`. `is_refuted`:
    a rank stepped early and was wrong, so forwards ran on wrong weights. `correct` mends that, once a process."""

    stream: torch.cuda.Stream | None  # where the verdict travels, beside the forwards; None: where they run

    @property
    def is_refuted(self) -> bool: ...
    def own_verdict(self) -> Tensor: ...
    def judge(self, verdict: Tensor) -> None: ...
    def correct(self) -> None: ...


@dataclass(frozen=True)
class Tensors:
    """The live tensors behind the names of a graph: parameters and buffers by canonical name, and the constants. Where
    phases are of several graphs, `apart` has the constants of each, by the phase's identity."""

    named: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    apart: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def of(self, joint: Joint) -> Tensors:
        """For another graph of the same model, which has constants of its own."""
        return Tensors(self.named, joint.constants)

    def among(self, forms: Sequence[tuple[Joint, Sequence[Stage]]]) -> Tensors:
        """For stages of several graphs of the same model."""
        apart = {
            id(phase): joint.constants for joint, stages in forms for stage in stages for phase in stage.phases.values()
        }
        return Tensors(self.named, forms[0][0].constants, apart)

    def constant(self, phase: Phase, name: str) -> Tensor:
        return self.apart.get(id(phase), self.constants)[name]


class RankRunner:
    """Runs the program of one rank on live tensors."""

    def __init__(self, program: Program, tensors: Tensors, transport: ops.Transport, adds: Collection[str]) -> None:
        """`adds`: the shared parameters whose gradients this rank adds up (ranks of one process share the tensors)."""
        self.program, self.tensors, self.transport, self.adds = program, tensors, transport, adds
        self.rank, modules = program.rank, list(program.module.modules())
        self.calls = [m for m in modules if isinstance(m, PhaseCall)]
        self.sums = [m for m in modules if isinstance(m, calls.PartialSum)]
        self.additions = [m for m in modules if isinstance(m, calls.AddToGradient)]
        self.totals = [m for m in modules if isinstance(m, calls.Gradient)]
        self.buckets = [m for m in modules if type(m) is calls.GradientBucket]
        self.collected = [m for m in modules if isinstance(m, calls.ParameterBucket)]
        self.flat: FlatGradients | None = None  # where gradients are summed over replicas
        self.shards: Shards | None = None  # of parameters (ZeRO-1)
        self.besides = [m for m in modules if isinstance(m, Beside)]
        self.nodes = list(program.module.graph.nodes)
        self.dying = dying_values(self.nodes)
        self.recorder: Recorder | None = None
        self.pace: Pace | None = None  # of actions, where the host runs them
        self.keep_gradients = False
        self.kept: dict[str, Tensor] = {}
        self.waits = 0
        self.pending: Pending | None = None
        self.summarize: Callable[..., tuple[Tensor, ...]] | None = None  # what microbatches have to that of the batch
        self.checks: list[CheckedValue] | None = None  # what a verdict on all checks is made of; None: each raises
        self.watched: list[tuple[Action, Tensor]] | None = None  # the largest absolute value that each action made

    def share(self, other: RankRunner) -> None:
        """Accumulate into the tensors of another runner of the same rank."""
        self.kept = other.kept
        self.flat, self.shards = other.flat, other.shards

    def keep(self) -> None:
        """Accumulate into the same memory in every step, whatever becomes of `.grad`."""
        self.keep_gradients = True

    def shard(self, shards: Shards) -> None:
        """Work on this replica's parts of the parameters (ZeRO-1)."""
        self.shards = shards

    def follow(self, pending: Pending | None, watched: list[Any] | None) -> None:
        """Settle the optimizer step that waits, within the next run, and note the largest values in `watched`."""
        self.pending, self.watched = pending, watched

    def bound(self, name: str) -> calls.Bound:
        """The node's module that runs a function bound at run time."""
        module = self.program.module.get_submodule(name)
        assert isinstance(module, calls.Bound)
        return module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank's stages read or give gradients to, under the model's names, in its order."""
        found = {name for call in self.calls for name in call.phase.parameters}
        return {name: t for name, t in self.tensors.named.items() if name in found and isinstance(t, nn.Parameter)}

    @property
    def tensor_names(self) -> set[str]:
        """The parameters and buffers that this rank's stages use."""
        ports = {
            port.name for call in self.calls for port in call.phase.ports if port.role in (Role.PARAMETER, Role.BUFFER)
        }
        return ports | set(self.parameters)

    @property
    def input_names(self) -> set[str]:
        """The tensors of the microbatch that this rank's stages read."""
        return {name for call in self.calls for name in call.phase.port_names(Role.INPUT)}

    def start(self, loss_gradient: Tensor) -> None:
        """Bind every phase to the tensors of this step; gradients start from `.grad`, or from zero."""
        if self.besides and loss_gradient.is_cuda and self.besides[0].stream is None:
            for beside in self.besides:
                beside.stream = second_stream(loss_gradient.device)
        self.bind_summary(self.summarize)  # anew in each step: several runners may share a program
        for module in self.collected:
            assert self.shards is not None, "made as the pipeline was bound"
            module.tensor = self.shards.flat[module.name]
        for call in self.calls:
            call.ports = [self.port_tensor(call.phase, port, loss_gradient) for port in call.phase.ports]
        if self.pending is None:  # else the gradients of the last step are needed until its verdict
            self.bind_gradients()

    def bind_summary(self, run: Callable[..., tuple[Tensor, ...]] | None) -> None:
        """Let `run` make loss and metrics of the batch, where this rank makes them."""
        if self.program.chain.after is None and self.program.chain.summary:
            self.bound("summary").run = run

    def bind_gradients(self) -> None:
        partial_sums = self.start_gradients()
        shared = {name for name, _ in partial_sums}
        for call in self.calls:
            stage = call.phase.stage
            call.accumulators = [
                partial_sums[name, stage] if name in shared else self.gradient(name) for name in call.phase.gradients
            ]

    def start_gradients(self) -> dict[tuple[str, int], Tensor]:
        """Zero the stages' sums of shared gradients, and make `.grad` of all others what the step adds to."""
        for module in self.sums:
            if module.tensor is None:
                module.tensor = empty_gradient(self.tensors.named[module.name])
            module.tensor.zero_()
        if self.program.buckets:
            self.flatten_gradients().start()
        shared = {module.name for module in (*self.additions, *self.sums)}
        for total in self.totals:
            total.tensor = self.gradient(total.name)
        for addition in self.additions:
            addition.tensor = self.gradient(addition.name) if addition.name in self.adds else None
        for call in self.calls:
            for name in call.phase.gradients:
                if name not in shared:
                    self.gradient(name)
        return {(module.name, module.stage): module.tensor for module in self.sums if module.tensor is not None}

    def flatten_gradients(self) -> FlatGradients:
        if self.flat is None:
            # Ranks of one process share the tensors: one of them holds a shared gradient.
            own = [b for b in self.program.buckets if not b.shared or b.key in self.adds]
            self.flat = FlatGradients(own, self.tensors.named, self.shards)
        for module in self.buckets:
            module.tensor = self.flat.flat[module.name]
        return self.flat

    def finish_gradients(self) -> None:
        """After the program: `.grad` is what it was before the step and the step's sum over the replicas."""
        if self.flat is not None and self.program.buckets:
            self.flat.finish()

    def port_tensor(self, phase: Phase, port: Port, loss_gradient: Tensor) -> Tensor | str:
        if port.role is Role.INPUT:
            return port.name
        if port.role is Role.LOSS_GRADIENT:
            return loss_gradient
        is_constant = port.role is Role.CONSTANT
        found = self.tensors.constant(phase, port.name) if is_constant else self.tensors.named[port.name]
        return found.detach()

    def gradient(self, name: str) -> Tensor:
        """The tensor that a parameter's gradient is added to: its `.grad`, from zero if it has none."""
        parameter = self.tensors.named[name]
        if self.flat is not None and name in self.flat.views:
            return self.flat.views[name]
        if self.keep_gradients:
            kept = self.kept.get(name)
            if kept is None:
                kept = self.kept[name] = empty_gradient(parameter)
            if parameter.grad is None:
                kept.zero_()
            elif parameter.grad is not kept:
                kept.copy_(parameter.grad)
            parameter.grad = kept
        elif parameter.grad is None:
            parameter.grad = empty_gradient(parameter).zero_()
        return parameter.grad

    def run(self, microbatches: Sequence[ops.Microbatch], step: int) -> Run:
        """Execute the program; yields while a message has not arrived. Returns what the program does, by name and
        microbatch."""
        given = self.given(microbatches)
        environment = dict(given)
        buffers = self.written_early() if self.pending else {}
        notes: list[list[Any]] = [self.recorder.marks] if self.recorder else []
        notes += [] if self.watched is None else [self.watched]
        notes += [] if self.checks is None else [self.checks]
        noted_before = [len(noted) for noted in notes]
        wrong, kept = False, self.checks
        if self.pending is None:
            yield from self.warm_up(environment, step)
        else:
            self.checks = early = [] if kept is None else kept  # of weights that may be taken back
            yield from self.warm_up(environment, step)
            self.checks = kept
            wrong = yield from self.settle(step, warmed_up=True)
            self.bind_gradients()
            if not wrong and kept is None:
                refuse_failed(failed(early, self.transport.name, step))
        if wrong:
            for noted, count in zip(notes, noted_before, strict=True):
                del noted[count:]
            restore(buffers)
            environment = given
            yield from self.warm_up(environment, step)
        return (yield from self.complete(environment, step))

    def given(self, microbatches: Sequence[ops.Microbatch]) -> Environment:
        return dict(zip(self.nodes, (self.transport, *microbatches), strict=False))

    def warm_up(self, environment: Environment, step: int) -> Generator[Wait, None, None]:
        """Run the prefix: what may run before the verdict on an optimizer step; nothing in programs without one."""
        return self.execute(range(self.program.verdict[0]), environment, step)

    def complete(self, environment: Environment, step: int) -> Run:
        yield from self.execute(range(self.program.verdict[1], len(self.nodes)), environment, step)
        yield from self.finish()
        results: tuple[Tensor, ...] = fx.map_arg(self.nodes[-1].args[0], environment.__getitem__)
        self.bind_summary(None)  # the program lives longer than what runs it
        return dict(zip(self.program.results, results, strict=True))

    def settle(self, step: int, *, warmed_up: bool, received: Collection[str] = ()) -> Generator[Wait, None, bool]:
        """Get the verdict on the pending optimizer step and correct it; whether forwards ran on wrong weights. After
        the prefix (`warmed_up`), what it sent is dropped then, unless `received` already: at once, for the devices of
        other ranks wait until it is, and to correct a step may take loading code, or talking to them."""
        pending = self.pending
        assert pending is not None, "an optimizer step waits"
        self.bound("judge").run = pending.judge
        if self.program.chain.after is None:
            self.bound("own_verdict").run = pending.own_verdict
        environment: Environment = {self.nodes[0]: self.transport}
        with on_stream(pending.stream):
            yield from self.execute(range(*self.program.verdict), environment, step)
        self.pending = None
        if warmed_up and pending.is_refuted:
            yield from self.drop_early(received)
        pending.correct()
        return pending.is_refuted

    def written_early(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The buffers that forwards write, and copies of them."""
        names = {name for call in self.calls if call.phase.kind is Kind.F for name in call.phase.updates}
        return {name: (self.tensors.named[name], self.tensors.named[name].clone()) for name in names}

    def drop_early(self, received: Collection[str]) -> Generator[Wait, None, None]:
        """Receive and drop what other ranks' prefixes sent that this one's did not read, unless `received` already."""
        for message in self.program.chain.dropped:
            if message.key in received:
                continue
            self.transport.posted_once(message.key)
            yield from self.wait_for(message.key)
            self.transport.receive(message.key)
        yield from self.finish()

    def finish(self) -> Generator[Wait, None, None]:
        """Wait until all that was sent has arrived."""
        for key in list(self.transport.sent):
            yield from self.wait_for(key)
        self.transport.finish()

    def wait_for(self, key: str) -> Generator[Wait, None, None]:
        self.waits += 1
        while not self.transport.ready(key):
            yield Wait(self.waits, key)

    def execute(self, positions: range, environment: Environment, step: int) -> Generator[Wait, None, None]:
        for index in positions:
            node = self.nodes[index]
            if node.op in ("placeholder", "output"):
                continue
            if node.target in (ops.receive, ops.release):
                yield from self.wait_for(str(node.args[1]))
            dying = self.dying[index]
            if node.op == "call_module":
                box = [environment[source] for source in node.args]
                for dead in dying:
                    environment.pop(dead, None)  # the call owns what dies with it
                environment[node] = self.call(node, box, step)
            else:
                args: Any = fx.map_arg(node.args, environment.__getitem__)
                target: Any = node.target
                environment[node] = target(*args)
                del args
            for dead in dying:
                environment.pop(dead, None)

    def call(self, node: fx.Node, box: list[Any], step: int) -> Any:
        recorder, action = self.recorder, node.meta.get("action")
        try:
            module = self.program.module.get_submodule(str(node.target))
            with on_stream_of(module), named_range(action):
                start = recorder.mark() if recorder and action else None
                begun_s = perf_counter()
                result = self.compute(module, box, action)
                if self.pace is not None and action is not None:
                    self.pace.add(action, perf_counter() - begun_s)
                if recorder and action:
                    recorder.marks.append((action, start, recorder.mark()))
                    if isinstance(module, Beside):
                        result = module.end()  # with the mark: a capture joins all that its streams have to do
            if self.watched is not None and isinstance(module, PhaseCall):
                self.watch(node, result)
            return result
        except Exception as error:
            if action is None:
                raise
            raise PipelineFault(
                f"{self.transport.name}, step {step}, action {action} (stage {action.stage}, microbatch "
                f"{action.microbatch}): {type(error).__name__}: {error}"
            ) from error

    def compute(self, module: Callable[..., Any], box: list[Any], action: Action | None) -> Any:
        """Run a module of the program, which empties `box`; `action`: the one that it computes, if it is a phase."""
        if not isinstance(module, PhaseCall):
            return module(*box)
        if self.checks is None or action is None:
            return module.take(box)
        noted: Noted = []
        with noting_checks(noted):
            result = module.take(box)
        self.checks += [CheckedValue(action, message, condition) for message, condition in noted]
        return result

    def watch(self, node: fx.Node, results: tuple[Any, ...]) -> None:
        """Keep the largest absolute value of what an action made for others: it tells where a NaN began."""
        assert self.watched is not None, "asked for"
        for value in results:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                dtype = torch.promote_types(value.dtype, torch.float32)
                largest = torch.linalg.vector_norm(value, torch.inf, dtype=dtype)
                self.watched.append((node.meta["action"], largest))


def named_range(action: Action | None) -> AbstractContextManager[Any]:
    """A range of torch.profiler, or of NVTX under `emit_nvtx`, with the name of the action, where either is on."""
    return record_function(str(action)) if action and profiler_records() else NO_RANGE


def empty_gradient(parameter: Tensor) -> Tensor:
    """Memory for a parameter's gradient, in the dtype that it has."""
    return torch.empty_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def restore(buffers: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    for live, before in buffers.values():
        live.copy_(before)
