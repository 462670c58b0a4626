"""What a rank sums over the replicas of its pipeline, in which portions, and when: buckets of gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zbfx.graphs import Phase, Stage
from zbfx.messages import SharedGradient, TensorLayout, layout_of, shared_gradients
from zbfx.plan import Action, Kind, Schedule, parts


@dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype that are summed over the replicas as one flat tensor. `shared`: of a parameter that
    several stages use; its sum over the stages comes first, after the last action."""

    key: str
    names: tuple[str, ...]
    layouts: tuple[TensorLayout, ...]
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
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class RankReductions:
    """The buckets of one rank. The last `trailing` Ws of its order run in pieces, one bucket after the other, in the
    order of `buckets`; `pieces[stage]` are the parts of the stage's W that make the gradients of each bucket."""

    buckets: tuple[Bucket, ...]
    trailing: int = 0
    pieces: Mapping[int, Mapping[str, Phase]] = field(default_factory=dict)

    def whole(self) -> RankReductions:
        """The same buckets, with no W in pieces."""
        return RankReductions(self.buckets)

    def calls(self, order: Sequence[Action], stages: Sequence[Stage]) -> list[tuple[Action, Phase]]:
        """The phases that the rank runs, for its unfused order."""
        weights = [index for index, action in enumerate(order) if action.kind is Kind.W]
        first = weights[len(weights) - self.trailing] if self.trailing else len(order)
        calls = [(action, stages[action.stage].phases[action.kind]) for action in order[:first]]
        for bucket in self.buckets:
            for action in order[first:]:
                if bucket.key in self.pieces[action.stage]:
                    calls.append((action, self.pieces[action.stage][bucket.key]))
        return calls

    def starts(self, calls: Sequence[tuple[Action, Phase]]) -> dict[int, list[Bucket]]:
        """After which call each bucket's gradients are final; shared ones are not among them."""
        last = {name: index for index, (_, phase) in enumerate(calls) for name in phase.gradients}
        found: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            if not bucket.shared:
                found[max(last.get(name, 0) for name in bucket.names)].append(bucket)
        return found


def gradient_layouts(stages: Sequence[Stage], rank: int, placement: Sequence[int]) -> dict[str, TensorLayout]:
    """The parameters that get gradients from this rank's stages, those whose gradients are final first in front."""
    found: dict[str, TensorLayout] = {}
    for stage in reversed(stages):
        for kind in (Kind.B, Kind.W):
            phase = stage.phases[kind]
            if placement[stage.index] == rank:
                found |= {name: layout_of(phase.parameters[name]) for name in phase.gradients if name not in found}
    return found


def shared_buckets(shared: Sequence[SharedGradient], rank: int) -> tuple[Bucket, ...]:
    """A bucket for each gradient of several stages or ranks that this rank holds."""
    return tuple(
        Bucket(gradient.name, (gradient.name,), (gradient.layout,), shared=True)
        for gradient in shared
        if rank in gradient.holders
    )


def whole_reductions(stages: Sequence[Stage], schedule: Schedule, bucket_bytes: int) -> tuple[RankReductions, ...]:
    """For each rank, buckets of about so many bytes in the order in which their gradients are final, and whole Ws."""
    placement = schedule.costs.placement
    shared = shared_gradients(stages, placement)
    names = {gradient.name for gradient in shared}
    found = []
    for rank in range(schedule.costs.rank_count):
        layouts = gradient_layouts(stages, rank, placement)
        own = {name: layout for name, layout in layouts.items() if name not in names}
        buckets = tuple(
            Bucket(f"bucket {index}", tuple(group), tuple(own[name] for name in group))
            for index, group in enumerate(packed(own, bucket_bytes))
        )
        found.append(RankReductions((*buckets, *shared_buckets(shared, rank))))
    return tuple(found)


def packed(layouts: Mapping[str, TensorLayout], bucket_bytes: int) -> list[list[str]]:
    """Names in groups of one dtype and at most so many bytes, or one name."""
    groups: list[list[str]] = []
    held = 0
    for name, layout in layouts.items():
        size = torch.Size(layout.shape).numel() * layout.dtype.itemsize
        if not groups or layouts[groups[-1][0]].dtype != layout.dtype or held + size > bucket_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def unfused(schedule: Schedule, rank: int) -> list[Action]:
    return [part for action in schedule.ranks[rank] for part in parts(action)]
