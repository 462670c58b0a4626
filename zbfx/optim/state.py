"""What travels along the chain of ranks, and what follows from it: one number for each parameter and each rank.
In: gradient norms, and what each rank did. Out: a `Verdict`.

    state = (norm of the gradient of each trained parameter, in the model's order; what each rank did)

A norm that is not known yet is 0. Sums run over the model's parameters, whoever holds them, and are rounded once: the
norm depends neither on the placement nor on the number of ranks. What a rank did makes all come to one verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from math import fsum, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from zbfx._torch.tensors import foreach_norm
from zbfx.arguments import positive_number, true_or_false
from zbfx.compiled import Compiled
from zbfx.program.messages import parameter_holders
from zbfx.runtime.worker import Worker

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Act(IntEnum):
    """What a rank did before the verdict."""

    WAITED = 0  # nothing
    STEPPED = 1  # a step, as if nothing were to clip or skip
    KNEW = 2  # what the verdict asks for: the last rank of the chain has the whole state


@dataclass(frozen=True)
class Trained:
    """What an optimizer steps, under names that all ranks share: the parameters of the model, or with ZeRO-1 shards. By
    name: the tensors (on meta where another rank has them), the ranks that hold each, the stages of its
    gradient."""

    parameters: Mapping[str, Tensor]
    holders: Mapping[str, Sequence[int]]
    stages: Mapping[str, set[int]]

    @classmethod
    def of(cls, worker: Worker) -> Trained:
        pipe = worker.engine.pipe
        stages: dict[str, set[int]] = {}
        for stage in pipe.stages:
            for phase in stage.phases.values():
                for name in phase.gradients:
                    stages.setdefault(name, set()).add(stage.index)
        if worker.engine.shards is not None:
            return cls.of_shards(worker, pipe, stages)
        holders = parameter_holders(pipe.stages, pipe.placement)
        return cls(worker.tensors.named, holders, stages)

    @classmethod
    def of_shards(cls, worker: Worker, pipe: Compiled, stages: Mapping[str, set[int]]) -> Trained:
        runner = worker.engine.runners[0]
        assert runner.shards is not None, "of shards"
        parameters: dict[str, Tensor] = {}
        holders: dict[str, list[int]] = {}
        sources: dict[str, set[int]] = {}
        for rank, reductions in enumerate(pipe.reductions):
            for bucket in reductions.shards:
                name = bucket.key if bucket.shared else f"{bucket.key} of rank {rank}"
                holders.setdefault(name, []).append(rank)
                sources[name] = set().union(*(stages[parameter] for parameter in bucket.names))
                size = -(-bucket.size // runner.shards.replicas)
                parameters.setdefault(name, torch.empty(size, dtype=bucket.parameter_dtype, device="meta"))
                if rank == runner.rank:
                    parameters[name] = runner.shards.parameters[bucket.key]
        return cls(parameters, holders, sources)


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of the state. A parameter that several ranks hold counts once, by the first of them in the chain."""

    names: tuple[str, ...]
    chain: tuple[int, ...]
    counted_by: Mapping[str, int]

    @classmethod
    def of(cls, names: Sequence[str], chain: tuple[int, ...], holders: Mapping[str, Sequence[int]]) -> Layout:
        return cls(tuple(names), chain, {name: min(holders[name], key=chain.index) for name in names})

    @property
    def size(self) -> int:
        return len(self.names) + len(self.chain)

    def places(self, names: Sequence[str]) -> list[int]:
        place = {name: k for k, name in enumerate(self.names)}
        return [place[name] for name in names]

    def place_of(self, rank: int) -> int:
        return len(self.names) + rank


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step of the optimizer must do, on every rank. `norm` is the norm of all gradients, `factor` the number
    that they are multiplied by, `nonfinite` the parameters whose gradients are not finite, and `acts` what each rank
    did before the verdict. `cause` says where the first value that is not finite was made."""

    norm: float
    factor: float
    skipped: bool
    nonfinite: tuple[str, ...]
    acts: tuple[Act, ...]
    cause: str = ""

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"acts": [int(act) for act in self.acts], "nonfinite": list(self.nonfinite)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Verdict:
        """From `plain` data."""
        acts = tuple(Act(act) for act in state["acts"])
        return cls(**{**state, "acts": acts, "nonfinite": tuple(state["nonfinite"])})

    @property
    def is_clean(self) -> bool:
        return not self.skipped and self.factor == 1.0

    def refutes(self, act: Act) -> bool:
        """Whether a rank that did this must correct it."""
        return (act is Act.STEPPED and not self.is_clean) or (act is Act.WAITED and not self.skipped)

    @property
    def refutes_any(self) -> bool:
        return any(self.refutes(act) for act in self.acts)

    def __str__(self) -> str:
        if self.skipped:
            return f"skipped: {self.cause}" if self.cause else "skipped: a gradient is not finite"
        return f"gradient norm {self.norm:.6g}, multiplied by {self.factor:.6g}"


@dataclass
class Counts:
    """What became of the steps of an optimizer: how many clipped, were skipped, had to be undone on a rank of this
    process (`rolled_back`), and made the forwards of the next step run again on all ranks (`repeated`)."""

    steps: int = 0
    clipped: int = 0
    skipped: int = 0
    rolled_back: int = 0
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What makes a step clip (`max_norm`, None: nothing) or skip (`check_finite`)."""

    max_norm: float | None
    check_finite: bool

    @classmethod
    def of(cls, max_norm: Any, check_finite: Any) -> Rules:
        """From a user's arguments. Raises `ZbfxError` for others."""
        if max_norm is not None:
            max_norm = positive_number("max_norm", max_norm, "a number above 0, or None to clip nothing")
        return cls(max_norm, true_or_false("check_finite", check_finite))

    def judge(self, layout: Layout, state: Sequence[float]) -> Verdict:
        """The verdict if the state were complete."""
        norms = dict(zip(layout.names, state, strict=False))
        norm = sqrt(fsum(value * value for value in norms.values()))
        bad = tuple(name for name, value in norms.items() if not isfinite(value))
        ratio = 1.0 if self.max_norm is None else self.max_norm / (norm + CLIP_EPSILON)
        acts = tuple(Act(int(act)) for act in state[len(layout.names) :])
        return Verdict(norm, 1.0 if ratio >= 1.0 else ratio, self.check_finite and bool(bad), bad, acts)

    def is_clean(self, norms: Tensor) -> Tensor:
        """A float64 scalar, found on the device: 1 where a step may go ahead as it is, else 0. The norm of `judge` may
        differ in its last bit, and so may the verdict: the state says what the rank did."""
        return (self.factor(self.norm(norms)) == 1.0).double() * self.is_finite(norms)

    def norm(self, norms: Tensor) -> Tensor:
        """The norm of all gradients, found on the device."""
        return norms.square().sum().sqrt()

    def factor(self, norm: Tensor) -> Tensor:
        """What gradients of such a norm are multiplied by, found on the device. A norm that is not finite: 0 or NaN."""
        if self.max_norm is None:
            return torch.ones_like(norm)
        return (self.max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)

    def is_finite(self, norms: Tensor) -> Tensor:
        """A float64 scalar, found on the device: 0 where a step is skipped, else 1."""
        return norms.isfinite().all().double() if self.check_finite else torch.ones_like(norms[:1]).sum()


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient, in float64: finite for every finite gradient of at most 32 bits."""
    return foreach_norm(gradients) if gradients else []


@dataclass(frozen=True)
class Share:
    """What one rank does of a step: the parameters that it steps and the places of those that it counts in the norm."""

    rank: int
    names: tuple[str, ...]
    counted: tuple[str, ...]
