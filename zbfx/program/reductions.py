"""What a rank sums over the replicas of its pipeline, in which portions, and when.
In: buckets of gradients and, where a W runs in pieces, the piece that makes each bucket. Out: the calls of a rank's
program, and the call after which each sum starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from zbfx.graphs import Forms, Phase
from zbfx.plan import Action, Kind
from zbfx.program.messages import SharedGradient, TensorLayout


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype, of parameters of one dtype, that are summed over the replicas as one flat tensor.
    `shared`: of a parameter that several stages use; its sum over the stages comes first, after the last action."""

    key: str
    names: tuple[str, ...]
    layouts: tuple[TensorLayout, ...]  # of the gradients
    parameter_dtype: torch.dtype
    shared: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.layouts[0].dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each gradient."""
        return tuple(torch.Size(layout.shape).numel() for layout in self.layouts)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def size_bytes(self) -> int:
        return sum(layout.size_bytes for layout in self.layouts)


@dataclass(frozen=True, slots=True)
class RankReductions:
    """The buckets of one rank. The last `trailing` Ws of its order run in pieces, one bucket after the other, in the
    order of `buckets`; `pieces[stage]` are the parts of the stage's W that make the gradients of each bucket.
    `shards`: the buckets whose parameters are collected from the replicas as the program begins (ZeRO-1).
    `exposed_s`: how much later than without replicas the rank is done, as planned."""

    buckets: tuple[Bucket, ...]
    trailing: int = 0
    pieces: Mapping[int, Mapping[str, Phase]] = field(default_factory=dict)
    shards: tuple[Bucket, ...] = ()
    exposed_s: float = 0.0

    def whole(self) -> RankReductions:
        """These buckets, with no W in pieces."""
        return RankReductions(self.buckets, shards=self.shards)

    def forward(self) -> RankReductions:
        """For a program of forwards alone: it collects shards, and sums nothing."""
        return RankReductions((), shards=self.shards)

    def sharded(self) -> RankReductions:
        """These buckets with ZeRO-1: their parameters are collected from the replicas."""
        return replace(self, shards=self.buckets)

    def reads(self, calls: Sequence[tuple[Action, Phase]], early: Collection[str]) -> dict[int, list[Bucket]]:
        """By position of the call, the shards that must be collected before it: before the first what prologues read,
        the parameters `early`."""
        found: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in self.shards:
            names = set(bucket.names)
            if not names.isdisjoint(early):
                found[0].append(bucket)
                continue
            first = next((k for k, (_, phase) in enumerate(calls) if names & set(phase.parameters)), 0)
            found[first].append(bucket)
        return found

    def calls(self, order: Sequence[Action], forms: Forms) -> list[tuple[Action, Phase]]:
        """The phases that the rank runs, for its unfused order."""
        first = len(order) - self.trailing
        assert all(action.kind is Kind.W for action in order[first:]), "only Ws run in parts"
        calls = [(action, forms.phase(action)) for action in order[:first]]
        for bucket in self.buckets:
            for action in order[first:]:
                if bucket.key in self.pieces[action.stage]:  # else another bucket's part makes its gradients
                    calls.append((action, self.pieces[action.stage][bucket.key]))
        return calls

    def starts(self, calls: Sequence[tuple[Action, Phase]]) -> dict[int, list[Bucket]]:
        """By position of the call, the buckets whose gradients are final after it. Shared ones are not among them."""
        last = {name: index for index, (_, phase) in enumerate(calls) for name in phase.gradients}
        found: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            if not bucket.shared:
                found[max(last.get(name, 0) for name in bucket.names)].append(bucket)
        return found


def shared_buckets(
    shared: Sequence[SharedGradient], rank: int, dtypes: Mapping[str, torch.dtype]
) -> tuple[Bucket, ...]:
    """A bucket for each gradient of several stages or ranks that this rank holds. `dtypes` are those of parameters."""
    return tuple(
        Bucket(gradient.name, (gradient.name,), (gradient.layout,), dtypes[gradient.name], shared=True)
        for gradient in shared
        if rank in gradient.holders
    )
