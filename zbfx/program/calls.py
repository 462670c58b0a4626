"""The modules that a rank program calls: phases, and tensors that are bound at run time.
In: a `Phase`, with the names of the values that it takes and returns. Out: a module; the runtime binds its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbfx.errors import ZbfxError
from zbfx.graphs import Phase, Stage
from zbfx.passes.nodes import is_statistic
from zbfx.plan import Kind
from zbfx.program import ops
from zbfx.program.boxed import Boxed, boxed
from zbfx.program.reductions import Bucket

Item = str | tuple[str, ...]  # a value by name, or a bundle of values


class BoundTensor(nn.Module):
    """A tensor that is bound at run time; `name` is that of its parameter, or the key of its bucket."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.tensor: Tensor | None = None

    def forward(self) -> Tensor:
        assert self.tensor is not None, "bound before the program runs"
        return self.tensor


class Gradient(BoundTensor):
    """The gradient of a shared parameter."""


class PartialSum(BoundTensor):
    """One stage's sum of a shared gradient."""

    def __init__(self, name: str, stage: int) -> None:
        super().__init__(name)
        self.stage = stage


class AddToGradient(BoundTensor):
    """Adds the stages' sums of a shared gradient to the tensor. None: another rank of this process adds them."""

    def forward(self, *partial_sums: Tensor) -> None:  # type: ignore[override]
        if self.tensor is not None:
            for partial_sum in partial_sums:
                self.tensor.add_(partial_sum)


class GradientBucket(BoundTensor):
    """The flat tensor behind a bucket's gradients."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket.key)
        self.bucket = bucket


class ParameterBucket(GradientBucket):
    """The flat tensor behind a bucket's parameters."""


class Bound(nn.Module):
    """A node that runs a function bound at run time; `name` is that of what it makes for other ranks, if it does."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.run: Callable[..., Any] | None = None

    def forward(self, *args: Any) -> Any:
        assert self.run is not None, "bound before the program runs"
        return self.run(*args)


class Summary(Bound):
    """Makes the loss and the metrics of the batch, in a tuple, from those of its microbatches."""


class PhaseCall(nn.Module):
    """A phase as the program calls it: its static tensors are bound, and values that only its own stage reads later are
    packed into one bundle per lifetime. `arguments` lists what the call takes after the microbatch, `returned` what it
    returns: names, and bundles (tuples of names). `take` gets its arguments in a list and empties it: values that
    nobody else holds die at their last use inside the phase."""

    def __init__(self, phase: Phase, arguments: Sequence[Item], returned: Sequence[Item]) -> None:
        super().__init__()
        self.phase, self.arguments, self.returned = phase, tuple(arguments), tuple(returned)
        self.run: Boxed = boxed(phase)
        place: dict[str, tuple[int, int | None]] = {
            name: (i, k) for i, item in enumerate(arguments) for k, name in enumerate(item) if isinstance(item, tuple)
        }
        place |= {item: (i, None) for i, item in enumerate(arguments) if isinstance(item, str)}
        self.places = [place[name] for name in phase.values]
        self.packing = [
            phase.returned.index(item) if isinstance(item, str) else [phase.returned.index(name) for name in item]
            for item in returned
        ]
        self.is_checked = False  # whether results were found to be what later phases were made for
        self.ports: list[Tensor | str] = []  # a tensor, or the name of an input of the microbatch
        self.accumulators: list[Tensor] = []

    def forward(self, microbatch: ops.Microbatch, *args: Any) -> tuple[Any, ...]:
        return self.take([microbatch, *args])

    def take(self, box: list[Any]) -> tuple[Any, ...]:
        microbatch: ops.Microbatch = box[0]
        inside: list[Any] = [microbatch.inputs[port] if isinstance(port, str) else port for port in self.ports]
        inside += [box[1 + i] if k is None else box[1 + i][k] for i, k in self.places]
        inside += self.accumulators
        if self.phase.is_random:
            inside.append(microbatch.seed)
        box.clear()
        results = self.run(inside)
        if not self.is_checked:
            refuse_others(self.phase, results)
            self.is_checked = True
        return tuple(
            results[index] if isinstance(index, int) else tuple(results[i] for i in index) for index in self.packing
        )


def refuse_others(phase: Phase, results: Sequence[Any]) -> None:
    """Raise `ZbfxError` unless a phase returned what those that read it were made for. Strides may be others: a message
    has those of the trace, and a compiled phase is compiled for those that come. So may be the dtype of a norm's
    statistics: compiled code has the one of the norm's fake version, kernels have another on the CPU."""
    nodes: Any = phase.module.graph.output_node().args[0]
    for name, node, found in zip(phase.returned, nodes, results, strict=True):
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            continue
        expected = kind_of_tensor(value, found.dtype if is_statistic(node) else value.dtype)
        if kind_of_tensor(found, found.dtype) != expected:
            raise ZbfxError(
                f"{phase.name} returns {name} as {expected}, which is what later phases were made for; "
                f"found {kind_of_tensor(found, found.dtype)}. Either an operator gives another result than its meta "
                f"kernel says, or compiled code is wrong (try backend='eager'): please report the model"
            )


def kind_of_tensor(value: Tensor, dtype: torch.dtype) -> str:
    return f"{dtype} of shape {tuple(value.shape)} on {value.device.type}"


@dataclass(frozen=True)
class Readers:
    """By the name of a value, the stages that read it; and the names of all that a W reads."""

    stages: Mapping[str, frozenset[int]]
    in_w: frozenset[str]

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> Readers:
        found: dict[str, set[int]] = defaultdict(set)
        for stage in stages:
            for name in (name for phase in stage.phases.values() for name in phase.values):
                found[name].add(stage.index)
        in_w = frozenset(name for stage in stages for name in stage.phases[Kind.W].values)
        return cls({name: frozenset(read) for name, read in found.items()}, in_w)

    def last(self, name: str) -> Kind:
        return Kind.W if name in self.in_w else Kind.B


def bundles_of(stage: Stage, readers: Readers) -> dict[Kind, list[tuple[str, ...]]]:
    """For F and B of a stage, the values that no other stage reads, bundled by the phase that reads them last; all that
    its prologue keeps in one."""
    kept = stage.phases[Kind.P].results
    bundles: dict[Kind, list[tuple[str, ...]]] = {Kind.P: [kept] if kept else [], Kind.W: []}
    last_reader = {name: kind for kind in (Kind.B, Kind.W) for name in stage.phases[kind].values}
    for maker in (Kind.F, Kind.B):
        own = [name for name in stage.phases[maker].results if readers.stages[name] <= {stage.index}]
        by_reader = [tuple(name for name in own if last_reader[name] is reader) for reader in (Kind.B, Kind.W)]
        bundles[maker] = [bundle for bundle in by_reader if bundle]
    return bundles


def arguments_of(phase: Phase, bundles: Mapping[Kind, Sequence[tuple[str, ...]]]) -> list[Item]:
    """The names and bundles that hold what the phase reads."""
    bundle_of = {name: bundle for made in bundles.values() for bundle in made for name in bundle}
    return list(dict.fromkeys(bundle_of.get(name, name) for name in phase.values))


def packing_of(phase: Phase, bundles: Sequence[tuple[str, ...]]) -> list[Item]:
    """What the phase's call returns: the values that travel, what is for the user, and the bundles."""
    bundled = {name for bundle in bundles for name in bundle}
    alone = [name for name in phase.results if name not in bundled]
    return [*alone, *map(str, phase.last), *bundles]
