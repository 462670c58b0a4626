"""Programs and a batch -> loss and gradients.

One executor runs a rank's program, node by node, whether the other ranks are processes or live in this one: it is a
generator that yields where a message has not arrived yet. Gradients accumulate into `.grad`.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zbfx import comm
from zbfx.codegen import AddToGradient, Gradient, GradientBucket, PartialSum, PhaseCall, Program
from zbfx.errors import PipelineFault
from zbfx.flat import FlatGradients
from zbfx.graphs import Role
from zbfx.streams import Beside, stream_of
from zbfx.timeline import Recorder

Run = Generator[int, None, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Tensors:
    """The live tensors behind the names of a graph: parameters and buffers by canonical name, and the constants."""

    named: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]


class RankRunner:
    """Runs the program of one rank on live tensors."""

    def __init__(self, program: Program, tensors: Tensors, transport: comm.Transport, adds: Collection[str]) -> None:
        """`adds`: the shared parameters whose gradients this rank adds up (ranks of one process share the tensors)."""
        self.program, self.tensors, self.transport, self.adds = program, tensors, transport, adds
        modules = list(program.module.modules())
        self.calls = [m for m in modules if isinstance(m, PhaseCall)]
        self.sums = [m for m in modules if isinstance(m, PartialSum)]
        self.additions = [m for m in modules if isinstance(m, AddToGradient)]
        self.totals = [m for m in modules if isinstance(m, Gradient)]
        self.buckets = [m for m in modules if isinstance(m, GradientBucket)]
        self.flat: FlatGradients | None = None  # where gradients are summed over replicas
        self.besides = [m for m in modules if isinstance(m, Beside)]
        self.nodes = list(program.module.graph.nodes)
        self.dying = dying_values(self.nodes)
        self.recorder: Recorder | None = None
        self.keep_gradients = False  # accumulate into the same memory in every step, whatever becomes of `.grad`
        self.kept: dict[str, Tensor] = {}

    @property
    def rank(self) -> int:
        return self.program.rank

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
        partial_sums = self.start_gradients()
        shared = {name for name, _ in partial_sums}
        if self.besides and loss_gradient.is_cuda and self.besides[0].stream is None:
            stream = torch.cuda.Stream(loss_gradient.device)
            for beside in self.besides:
                beside.stream = stream
        for call in self.calls:
            stage = call.phase.stage
            call.ports = [self.port_tensor(port.role, port.name, loss_gradient) for port in call.phase.ports]
            call.accumulators = [
                partial_sums[name, stage] if name in shared else self.gradient(name) for name in call.phase.gradients
            ]

    def start_gradients(self) -> dict[tuple[str, int], Tensor]:
        """Zero the stages' sums of shared gradients, and make `.grad` of all others what the step adds to."""
        for module in self.sums:
            if module.tensor is None:
                module.tensor = torch.empty_like(self.tensors.named[module.name], requires_grad=False)
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
            self.flat = FlatGradients(own, self.tensors.named)
        for module in self.buckets:
            module.tensor = self.flat.flat[module.bucket.key]
        return self.flat

    def finish_gradients(self) -> None:
        """After the program: `.grad` is what it was before the step and the step's sum over the replicas."""
        if self.flat is not None and self.program.buckets:
            self.flat.finish()

    def port_tensor(self, role: Role, name: str, loss_gradient: Tensor) -> Tensor | str:
        if role is Role.INPUT:
            return name
        if role is Role.LOSS_GRADIENT:
            return loss_gradient
        return (self.tensors.constants if role is Role.CONSTANT else self.tensors.named)[name].detach()

    def gradient(self, name: str) -> Tensor:
        """The tensor that a parameter's gradient is added to: its `.grad`, from zero if it has none."""
        parameter = self.tensors.named[name]
        if self.flat is not None and name in self.flat.views:
            return self.flat.views[name]
        if self.keep_gradients:
            kept = self.kept.get(name)
            if kept is None:
                kept = self.kept[name] = torch.empty_like(parameter, requires_grad=False)
            if parameter.grad is None:
                kept.zero_()
            elif parameter.grad is not kept:
                kept.copy_(parameter.grad)
            parameter.grad = kept
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        return parameter.grad

    def run(self, microbatches: Sequence[comm.Microbatch], step: int) -> Run:
        """Execute the program; yields its position while a message that it needs has not arrived.

        Returns the losses of the microbatches, in order, on the rank that computes them.
        """
        environment: dict[fx.Node, Any] = dict(zip(self.nodes, (self.transport, *microbatches), strict=False))

        def load(node: fx.Node) -> Any:
            return environment[node]

        for index, node in enumerate(self.nodes):
            if node.op == "output":
                losses: Any = fx.map_arg(node.args[0], load)
                break
            if node.op == "placeholder":
                continue
            if node.target is comm.receive:
                while not self.transport.ready(str(node.args[1])):
                    yield index
            args: Any = fx.map_arg(node.args, load)
            target: Any = node.target
            if node.op == "call_module":
                environment[node] = self.call(node, args, step)
            else:
                environment[node] = target(*args)
            del args
            for dead in self.dying[index]:
                del environment[dead]
        self.transport.finish()
        return losses

    def call(self, node: fx.Node, args: tuple[Any, ...], step: int) -> Any:
        recorder, action = self.recorder, node.meta.get("action")
        try:
            module = self.program.module.get_submodule(str(node.target))
            with stream_of(module):
                start = recorder.mark() if recorder else None
                result = module(*args)
                if recorder and action:
                    recorder.marks.append((action, start, recorder.mark()))
                return result
        except Exception as error:
            if action is None:
                raise
            raise PipelineFault(
                f"{self.transport.name}, step {step}, action {action} (stage {action.stage}, microbatch "
                f"{action.microbatch}): {type(error).__name__}: {error}"
            ) from error


def dying_values(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """For each node, the values that nothing after it reads."""
    last_use = {source: index for index, node in enumerate(nodes) for source in (node, *node.all_input_nodes)}
    dying: list[list[fx.Node]] = [[] for _ in nodes]
    for node, index in last_use.items():
        if node.op != "output":
            dying[index].append(node)
    return dying
