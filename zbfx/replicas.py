"""A compiled pipeline -> one of several replicas, with the sums of gradients in its programs (appendix A)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zbfx.compiled import Compiled
from zbfx.costs import estimate
from zbfx.costs.estimate import Link
from zbfx.graphs import Phase, Stage
from zbfx.passes.cluster import inseparable, part_of
from zbfx.plan import Kind
from zbfx.program.messages import TensorLayout, layout_of, shared_gradients
from zbfx.program.reductions import Bucket, RankReductions, shared_buckets
from zbfx.schedule.tail import Portion, Tail, best_tail, ending_with, endings, tail_of

BUCKET_COUNTS = (1, 2, 4, 8, 16, 32)  # tried: more of them hide better, and each waits for the link once


def replicated(pipe: Compiled, replicas: int, link: Link | None = None, *, cluster: bool = True) -> Compiled:
    """`pipe` as one of so many replicas; itself if there is only one, or if it is already. For each rank the planner
    chooses buckets, and, with `cluster`, how many of its last Ws run bucket by bucket."""
    if replicas == 1 or pipe.reductions:
        return pipe
    hardware = estimate.hardware_of(pipe.device)
    link = link or Link(hardware.link_latency_s, hardware.link_bytes_per_s, replicas)
    plans = [best_plan(pipe, rank, link.sum_s, cluster) for rank in range(len(pipe.schedule.ranks))]
    schedule = ending_with(pipe.schedule, [tail for _, tail, _ in plans])
    reductions = tuple(found for found, _, _ in plans)
    lasting = [
        spans[-1].end_s - spans[0].start_s + found.exposed_s
        for spans, found in zip(pipe.schedule.spans, reductions, strict=True)
    ]
    exposed_s = max(0.0, max(lasting) - pipe.schedule.iteration_s)
    notes = [note(rank, *plan) for rank, plan in enumerate(plans) if plan[0].buckets]
    schedule = replace(schedule, notes=(*schedule.notes, *notes))
    return replace(pipe, schedule=schedule, reductions=reductions, exposed_s=exposed_s)


def best_plan(
    pipe: Compiled, rank: int, sum_s: Callable[[int], float], cluster: bool
) -> tuple[RankReductions, Tail, Tail]:
    """What a rank reduces and when, its planned end, and the planned end with the same buckets and no W in parts."""
    placement = pipe.placement
    stages = [stage for stage in pipe.stages if placement[stage.index] == rank]
    dtypes = {port.name: node.meta["val"].dtype for node, port in pipe.joint.input_ports().items()}
    shared = shared_buckets(shared_gradients(pipe.stages, placement), rank, dtypes)
    groups = gradient_groups(pipe, stages, {bucket.key for bucket in shared}, dtypes)
    ways = endings(pipe.schedule, rank) if cluster else endings(pipe.schedule, rank)[:1]
    total_bytes = sum(group.size_bytes for group in groups)
    best: tuple[Tail, tuple[Bucket, ...]] | None = None
    for count in BUCKET_COUNTS:
        held = packed(groups, total_bytes / count)
        buckets = (*(bucket_of(members, index) for index, members in enumerate(held)), *shared)
        portions = [portion_of(members, bucket, sum_s) for members, bucket in zip(held, buckets, strict=False)]
        portions += [Portion({}, frozenset(), sum_s(bucket.size_bytes), at_end=True) for bucket in shared]
        tail = best_tail(ways, portions)
        if best is None or tail.reduced_s < best[0].reduced_s:
            best, whole = (tail, buckets), tail_of(ways[0], portions)
    assert best is not None, "several counts were tried"
    tail, buckets = best
    ordered = tuple(buckets[index] for index in tail.sequence)
    pieces = {stage.index: pieces_of(stage, ordered) for stage in stages} if tail.ending.trailing else {}
    exposed_s = max(0.0, tail.reduced_s - ways[0].end_s)
    return RankReductions(ordered, tail.ending.trailing, pieces, exposed_s=exposed_s), tail, whole


@dataclass(frozen=True)
class Group:
    """Gradients of one dtype and stage, of parameters of one dtype, that come together: `weight_s` is what their part
    of a W takes."""

    layouts: Mapping[str, TensorLayout]
    parameter_dtype: torch.dtype
    stage: int
    weight_s: float | None  # None: they come in B
    in_backward: bool

    @property
    def size_bytes(self) -> int:
        return sum(layout.size_bytes for layout in self.layouts.values())

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the gradients and of the parameters."""
        return next(iter(self.layouts.values())).dtype, self.parameter_dtype


def gradient_groups(
    pipe: Compiled, stages: Sequence[Stage], shared: Collection[str], dtypes: Mapping[str, torch.dtype]
) -> list[Group]:
    """The gradients of these stages, shared ones aside, in groups; those that a backward makes first in front. `dtypes`
    are those of the parameters."""
    hardware = estimate.hardware_of(pipe.device)
    found = []
    for stage in reversed(stages):
        b, w = stage.phases[Kind.B], stage.phases[Kind.W]
        together = inseparable(w)
        estimated_s = [
            sum(estimate.node_s(n, hardware) for n in part_of(w, names, 0).module.graph.nodes) for names in together
        ]
        scale = float(pipe.schedule.costs.stages[stage.index].backward_weight_s) / (sum(estimated_s) or 1.0)
        early = [name for name in b.gradients if name not in w.gradients]
        for names, seconds in (*(((name,), None) for name in early), *zip(together, estimated_s, strict=True)):
            layouts = {
                name: layout_of((b if seconds is None else w).sums[name]) for name in names if name not in shared
            }
            kinds = {name: (layout.dtype, dtypes[name]) for name, layout in layouts.items()}
            for kind in dict.fromkeys(kinds.values()):
                alike = {name: layout for name, layout in layouts.items() if kinds[name] == kind}
                in_backward = any(name in b.gradients for name in alike)
                weight_s = None if seconds is None else seconds * scale
                found.append(Group(alike, kind[1], stage.index, weight_s, in_backward))
                seconds = None if seconds is None else 0.0
    return found


def packed(groups: Sequence[Group], bucket_bytes: float) -> list[list[Group]]:
    """Groups of the same dtypes together, as many as fit into so many bytes, or one."""
    filled: dict[tuple[torch.dtype, torch.dtype], list[list[Group]]] = {}
    for group in groups:
        of_dtype = filled.setdefault(group.dtypes, [[]])
        if of_dtype[-1] and sum(member.size_bytes for member in of_dtype[-1]) + group.size_bytes > bucket_bytes:
            of_dtype.append([])
        of_dtype[-1].append(group)
    return [members for of_dtype in filled.values() for members in of_dtype]


def bucket_of(members: Sequence[Group], index: int) -> Bucket:
    layouts = {name: layout for group in members for name, layout in group.layouts.items()}
    return Bucket(f"bucket {index}", tuple(layouts), tuple(layouts.values()), members[0].parameter_dtype)


def portion_of(members: Sequence[Group], bucket: Bucket, sum_s: Callable[[int], float]) -> Portion:
    weight_s: dict[int, float] = {}
    for group in members:
        if group.weight_s is not None:
            weight_s[group.stage] = weight_s.get(group.stage, 0.0) + group.weight_s
    backward = frozenset(group.stage for group in members if group.in_backward)
    return Portion(weight_s, backward, sum_s(bucket.size_bytes))


def pieces_of(stage: Stage, buckets: Sequence[Bucket]) -> dict[str, Phase]:
    """The stage's W in parts by bucket: what cannot be taken apart goes with the first bucket that needs it."""
    phase, names = stage.phases[Kind.W], dict[str, list[str]]()
    for together in inseparable(phase):
        first = next(bucket.key for bucket in buckets if set(together) & set(bucket.names))
        names.setdefault(first, []).extend(together)
    return {key: part_of(phase, own, index) for index, (key, own) in enumerate(names.items())}


def note(rank: int, found: RankReductions, tail: Tail, whole: Tail) -> str:
    """What the plan expects of a rank's sums."""
    size = sum(bucket.size_bytes for bucket in found.buckets)
    total_s = sum(end - start for start, end in tail.sums_s)
    return (
        f"rank {rank} sums {size / 2**20:.3g} MiB over the replicas in {len(found.buckets)} buckets, {total_s:.3g} s, "
        f"of which {found.exposed_s:.3g} s after its last action ({whole.exposed_s:.3g} s without Ws in parts); its "
        f"last {found.trailing} Ws run bucket by bucket"
    )
