"""What is traced: the model and its loss as one module, which returns the loss of a microbatch, and what else is
wanted."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zbfx._torch import under_tracer
from zbfx._torch.modules import own_buffers, own_parameters
from zbfx._torch.tensors import storage_of
from zbfx._transformers import masks_as_in_eager
from zbfx.errors import TraceError
from zbfx.graphs import LOSS, Port, Returned, Role
from zbfx.metrics import Metric, MetricKind, MetricReduction, metrics_of
from zbfx.trace.backward_code import BackwardCode
from zbfx.trace.first_forward import FirstForward
from zbfx.trace.known_values import KnownValues
from zbfx.trace.loss_returned import checked_loss, checked_losses, model_loss, with_metrics
from zbfx.trace.signature import Signature
from zbfx.trace.stamped import STAND_IN
from zbfx.trace.tensor_names import LOSS_PREFIX, MODEL_PREFIX
from zbfx.trace.tensor_parallel import place_gradients
from zbfx.trace.user_lines import UserLines
from zbfx.trace.wanted import TRAINING, Wanted, returned_of

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Computed:
    """What model and loss make of a microbatch: the loss and its count, or rows of several; the metrics; and what is
    asked for of the model's output."""

    loss: Tensor | None = None
    count: Tensor | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    returned: Returned | None = None
    outputs: Sequence[Tensor] = ()

    @property
    def kinds(self) -> tuple[MetricKind, ...]:
        found = self.metrics.items()
        return tuple(MetricKind(name, MetricReduction(m.reduction), m.count is not None) for name, m in found)

    def results(self) -> Iterator[tuple[Port, Tensor]]:
        """What a graph returns, in its order. No gradient flows from other results than the loss."""
        if self.loss is not None:
            yield Port(Role.LOSS, LOSS), self.loss
        if self.count is not None:
            yield Port(Role.COUNT, "count"), self.count
        for kind, metric in zip(self.kinds, self.metrics.values(), strict=True):
            for name, value in zip(kind.parts, (metric.value, metric.count), strict=False):
                yield Port(Role.METRIC, name), detached(value)
        for index, value in enumerate(self.outputs):
            yield Port(Role.OUTPUT, str(index)), detached(value)


class Objective(nn.Module):
    """Model and loss as one module over the flat tensors of a microbatch; returns the scalar loss, and what else is
    wanted."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        signature: Signature,
        wanted: Wanted = TRAINING,
        *,
        traced: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.loss_fn, self.signature, self.wanted = model, loss_fn, signature, wanted
        self.hooks = BackwardCode(self.tensors)
        self.lines = UserLines(model, self.hooks.watched) if traced else contextlib.nullcontext()
        if traced:
            self.hooks.watch_modules(model)
        self.one_pass: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.part = "the model"  # what is at work, for messages: then "loss_fn", then "the backward"
        self.replaced: set[str] = set()  # the names of buffers that the forward replaces by new tensors
        self.first = FirstForward(("", model), (LOSS_PREFIX.removesuffix("."), loss_fn))
        self.starts_afresh = False  # whether every pass is a first forward
        self.made_first: list[str] = []  # the names of the tensors that such a pass made: each is a further output
        self.ports: list[Port] = []  # of the outputs before these
        self.kinds: tuple[MetricKind, ...] = ()
        self.returned: Returned | None = None
        self.leaves: list[Tensor] = []  # the tensors to which the gradient of the loss flows
        self.held: Named = {}  # parameters and buffers, as the forward and then the backward write them
        self.stand_ins: Named = {}  # buffers as the forward found them, for code that recomputes
        self.noted: Mapping[str, tuple[int, int]] = {}  # how often each stand-in and its buffer had been written
        self.written_late: set[str] = set()  # stand-ins that the backward of a recomputed part has written

    @property
    def is_steady(self) -> bool:
        """Whether the forwards so far have made nothing that the model keeps, and put no hooks on nodes of autograd."""
        return not self.first.made() and not (isinstance(self.lines, UserLines) and self.lines.looks_at_autograd)

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.starts_afresh:
            self.first.restore()
        self.held = self.tensors()
        place_gradients(self.model)
        with self.one_pass():
            found = self.unwritten(self.made(tensors))
        self.keep_replaced()
        if found.loss is not None:
            nodes = nodes_of_backward(found.loss)
            self.leaves = [node.variable for node in nodes if hasattr(node, "variable")]
            self.hooks.are_there |= any(is_function(node) for node in nodes)
            found.loss.register_hook(self.begin_backward)
        self.kinds, self.returned = found.kinds, found.returned
        self.ports = [port for port, _ in found.results()]
        results = [value for _, value in found.results()]
        made = self.first.made() if self.starts_afresh else {}
        self.made_first = [name for name, (tensors_made, _) in made.items() for _ in tensors_made]
        copies = [tensor.detach().clone() for tensors_made, _ in made.values() for tensor in tensors_made]
        return (*results, *copies) if len(results) + len(copies) > 1 else results[0]

    def made(self, tensors: tuple[Tensor, ...]) -> Computed:
        """What model and loss make of a microbatch, as far as it is wanted."""
        args, kwargs = self.signature.unflatten(tensors)
        inputs, targets = args[: self.signature.input_count], args[self.signature.input_count :]
        wanted, found = self.wanted, Computed()
        with self.lines, KnownValues() as known, masks_as_in_eager(known.knows):
            output = self.model(*inputs, **kwargs)
            if wanted.selection is not None:
                self.part = "outputs"
                returned, outputs = returned_of(wanted.selection.of(output, targets))
                found = replace(found, returned=returned, outputs=outputs)
            if not wanted.has_loss:
                return found
            if self.loss_fn is None:
                return replace(found, loss=checked_loss(model_loss(output), "the model"))
            self.part = "loss_fn"
            loss, metrics = with_metrics(self.loss_fn(output, *targets))
            loss, count = checked_losses(loss)
            return replace(found, loss=loss, count=count, metrics=metrics_of(metrics))

    def replacements(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """The buffers that the model has replaced by name, each with the new tensor."""
        for name, buffer in self.held.items():
            module, attribute = self.place(name)
            if attribute in (table := own_buffers(module)) and table[attribute] is not buffer:
                yield name, buffer, table[attribute]

    def unwritten(self, found: Computed) -> Computed:
        """With copies of what is a replaced buffer as the forward found it, or a view of one: the new tensor is yet to
        be written there."""
        old = {storage_of(buffer) for _, buffer, _ in self.replacements()}

        def kept(value: Tensor) -> Tensor:
            return value.clone() if old and storage_of(value) in old else value

        count = None if found.count is None else kept(found.count)
        metrics = {name: metric.mapped(kept) for name, metric in found.metrics.items()}
        return replace(found, count=count, metrics=metrics, outputs=list(map(kept, found.outputs)))

    def keep_replaced(self) -> None:
        """Write the new tensors of buffers that the model has replaced into the old ones."""
        for name, buffer, new in self.replacements():
            write_replaced(name, buffer, new)
            self.replaced.add(name.removeprefix(MODEL_PREFIX))

    def begin_backward(self, _: Tensor) -> None:
        """Called as the backward begins. Its code finds parameters and buffers as the forward left them."""
        self.part = "the backward"
        before = self.tensors()
        buffers = {  # a first forward may have made others
            name: buffer for name, buffer in self.named_buffers(remove_duplicate=False) if name in self.held
        }
        found = {id(buffer): under_tracer.functional(buffer) for buffer in buffers.values()}
        self.stand_in({name: found[id(buffer)] for name, buffer in buffers.items()})
        self.put(self.held)
        self.hooks.begin()

        def end() -> None:
            self.keep_late_writes()
            self.keep_replaced()
            self.put(before)

        under_tracer.at_end_of_backward(end)

    def tensors(self) -> Named:
        """The parameters and buffers of the modules, under all their names."""
        found = (self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False))
        return dict(itertools.chain(*found))

    def put(self, tensors: Named) -> None:
        """Make these tensors the parameters and buffers of the modules, by qualified name."""
        for name, tensor in tensors.items():
            module, attribute = self.place(name)
            tables: tuple[dict[str, Any], ...] = (own_buffers(module), own_parameters(module))
            next(table for table in tables if attribute in table)[attribute] = tensor

    def place(self, name: str) -> tuple[nn.Module, str]:
        """The module of a parameter or buffer, and its name there."""
        owner, _, attribute = name.rpartition(".")
        return self.get_submodule(owner), attribute

    def stand_in(self, stand_ins: Named) -> None:
        """A backward begins, in which code that recomputes finds these in the place of buffers."""
        self.stand_ins, self.written_late = stand_ins, set()
        self.noted = self.writes()

    def writes(self) -> dict[str, tuple[int, int]]:
        """How often each stand-in was written, and the buffer that it stands for."""
        pairs = {name: (stand_in, self.held[name]) for name, stand_in in self.stand_ins.items()}
        return {
            name: (under_tracer.writes_into(one), under_tracer.writes_into(other))
            for name, (one, other) in pairs.items()
        }

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Around code that recomputes: it reads buffers as the forward found them, and its writes are lost."""
        self.hooks.recompute = True
        self.note_late_writes()
        before = self.tensors()
        self.put(self.stand_ins)
        try:
            with KnownValues() as known, masks_as_in_eager(known.knows):
                yield
        finally:
            self.put(before)
            self.noted = {name: (now, self.noted[name][1]) for name, (now, _) in self.writes().items()}

    def note_late_writes(self) -> None:
        now = self.writes()
        self.written_late |= {name for name, (count, _) in now.items() if count != self.noted[name][0]}

    def keep_late_writes(self) -> None:
        """Called at the end of a backward, which has written into stand-ins for buffers in recomputed parts: copy those
        into the buffers. Raises `TraceError` if it has written into one of these buffers itself, too."""
        self.note_late_writes()
        now, kept = self.writes(), dict[int, Tensor]()
        for name in sorted(self.written_late):
            buffer, stand_in = self.held[name], self.stand_ins[name]
            if id(buffer) in kept:  # under another name
                continue
            if now[name][1] != self.noted[name][1]:
                raise TraceError(
                    f"the backward writes into {name.removeprefix(MODEL_PREFIX)} in a checkpointed part and outside of "
                    f"it: in which order is not part of the graph. Use a buffer for each"
                )
            kept[id(buffer)] = buffer
            with torch.no_grad():
                buffer.copy_(stand_in)


def write_replaced(name: str, before: Tensor, after: Tensor | None) -> None:
    """Write the new tensor of a buffer that the model replaces (`self.count = self.count + 1`) into the old one."""
    if after is None or after.shape != before.shape or after.dtype != before.dtype:
        found = "nothing" if after is None else f"{after.dtype} of shape {tuple(after.shape)}"
        converted = after is not None and after.shape == before.shape
        once = (
            ". If it only is what a forward made before the model was converted (model.double()), run the model once "
            "before compile: model(*example_inputs) under torch.no_grad()"
        )
        raise TraceError(
            f"the model replaces {name.removeprefix(MODEL_PREFIX)}, {before.dtype} of shape {tuple(before.shape)}, by "
            f"{found}: one graph cannot hold both. Keep shape and dtype, or keep the value out of the model"
            f"{once if converted else ''}"
        )
    with torch.no_grad():
        before.copy_(after.detach())


def detached(value: Tensor | None) -> Tensor:
    assert value is not None, "a count, where a metric has one"
    return value.detach()


def nodes_of_backward(loss: Tensor) -> list[Any]:
    """The nodes of autograd through which the gradient of a loss flows."""
    found, waiting = dict[Any, None](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [source for source, _ in node.next_functions]
    return list(found)


def is_function(node: Any) -> bool:
    """Whether a node of autograd is a custom Function, and not one that stands for a layer."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) and not isinstance(node, STAND_IN)
