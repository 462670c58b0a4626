"""What optimizer steps cost in the plan: consecutive steps of all ranks, simulated with and without a barrier. The
simulator of schedules times one step, whose end nobody waits for. Here a rank goes on as soon as it has stepped its
optimizer, so that a step fills the gaps that the one before it left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zbfx.costs.estimate import Hardware
from zbfx.plan import Action, Kind, parts
from zbfx.program.chain import Chain
from zbfx.program.messages import Message
from zbfx.schedule.schedule import Schedule

STEPS = 8  # simulated; the last three settle what a step takes
WRONG = 4  # the step in which forwards run again

TaskKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class OptimizerCosts:
    """What a step of the optimizer costs. For each rank: seconds of a step and of the copies for undoing it (`step_s`),
    of undoing a step and taking it again (`redo_s`), and bytes of the copies. `hop_s`: from one rank to the next."""

    step_s: tuple[float, ...]
    redo_s: tuple[float, ...]
    hop_s: float
    undo_bytes: tuple[int, ...]


def estimated(
    optimizer: torch.optim.Optimizer, held_bytes: Sequence[int], *, exact: bool, hardware: Hardware
) -> OptimizerCosts:
    """Costs in closed form: an optimizer moves memory. `held_bytes`: of the parameters of each rank."""
    states = slots_per_parameter(optimizer)
    moved_s = [held / hardware.bytes_per_s for held in held_bytes]  # to read or write the parameters once
    update = 2.0 * (1 + states) + 1.0 + 1.0  # parameters and state read and written, gradients read twice (norm, step)
    copy = 2.0 * (1 + states)
    return OptimizerCosts(
        tuple((update + (copy if exact else 0.0)) * s for s in moved_s),
        tuple((update + copy) * s for s in moved_s),
        hardware.link_latency_s,
        tuple(held * (1 + states) if exact else 0 for held in held_bytes),
    )


def slots_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of its size the optimizer keeps for each parameter. For classes that are not torch's this is
    known once they have stepped, and 0 before."""
    for parameter, state in optimizer.state.items():
        return sum(isinstance(v, Tensor) and v.shape == parameter.shape for v in state.values())
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.Adam):
        return 3 if group["amsgrad"] else 2
    return int(isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0)


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """Seconds a step takes with a barrier and without, what a wrong step adds to that, and what the way back costs."""

    barrier_s: float
    validated_s: float
    repeat_s: float
    costs: OptimizerCosts

    def __str__(self) -> str:
        gain = self.barrier_s / self.validated_s - 1.0
        undo = ", ".join(f"{size / 2**20:.1f}" for size in self.costs.undo_bytes)
        return (
            f"optimizer: a step takes {self.barrier_s:.6g} s with a barrier, {self.validated_s:.6g} s without "
            f"({gain:.1%} faster), {self.repeat_s:.6g} s more where it was wrong; the optimizer itself "
            f"{max(self.costs.step_s):.3g} s; undo copies of {undo} MiB (by rank)"
        )

    def repeating_s(self, every: int) -> float:
        """Seconds a step takes if one in so many is wrong."""
        return self.validated_s + self.repeat_s / every


@dataclass(frozen=True, slots=True)
class Task:
    """Something that a rank does for so long. It waits for the tasks `after`, of any rank, and so long for each one's
    result to travel. `ends`: the number of the step of which it is the last task, None if it is not the last."""

    key: TaskKey
    seconds: float
    after: tuple[tuple[TaskKey, float], ...] = ()
    ends: int | None = None


def planned(schedule: Schedule, messages: Sequence[Message], chain: Chain, costs: OptimizerCosts) -> OptimizerPlan:
    def end_s(*, barrier: bool, wrong: frozenset[int] = frozenset()) -> list[float]:
        steps = Steps(schedule, messages, chain, costs, barrier)
        ranks = range(len(schedule.ranks))
        return step_ends([[t for n in range(STEPS) for t in steps.of(rank, n, n in wrong)] for rank in ranks])

    barrier, clean = end_s(barrier=True), end_s(barrier=False)
    repeated = end_s(barrier=False, wrong=frozenset({WRONG}))
    return OptimizerPlan(period_s(barrier), period_s(clean), max(0.0, repeated[-1] - clean[-1]), costs)


def period_s(ends: Sequence[float]) -> float:
    return (ends[-1] - ends[-4]) / 3


def step_ends(orders: Sequence[Sequence[Task]]) -> list[float]:
    """When each step's optimizer has stepped on the last rank. Tasks of a rank run one after the other."""
    done: dict[TaskKey, float] = {}
    clocks = [0.0] * len(orders)
    places = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and all(key in done for key, _ in order[places[rank]].after):
                task = order[places[rank]]
                begin = max([clocks[rank], *(done[key] + delay for key, delay in task.after)])
                clocks[rank] = done[task.key] = begin + task.seconds
                places[rank] += 1
                moved = True
    assert all(place == len(order) for place, order in zip(places, orders, strict=True)), "schedules do not deadlock"
    ends: dict[int, float] = {}
    for task in (task for order in orders for task in order):
        if task.ends is not None:
            ends[task.ends] = max(done[task.key], ends.get(task.ends, 0.0))
    return [ends[step] for step in sorted(ends)]


class Steps:
    """The tasks of consecutive steps. Keys: (action, step, run), ("verdict" or "state" or "optimizer", step, rank)."""

    def __init__(
        self, schedule: Schedule, messages: Sequence[Message], chain: Chain, costs: OptimizerCosts, barrier: bool
    ) -> None:
        self.schedule, self.chain, self.costs, self.barrier = schedule, chain, costs, barrier
        self.orders = [[part for action in order for part in parts(action)] for order in schedule.ranks]
        self.early = {a for order, count in zip(self.orders, chain.prefix, strict=True) for a in order[:count]}
        self.guests = dict(schedule.beside)
        self.hosts = set(self.guests.values())
        edges = {(edge.source, edge.target): edge for edge in schedule.costs.edges}
        self.sources: dict[Action, list[tuple[Action, float]]] = {}
        for message in messages:
            producer, consumer = message.ends
            low, high = sorted((producer.stage, consumer.stage))
            edge = edges.get((low, high))
            delay = None if edge is None else edge.forward_s if producer.kind is Kind.F else edge.backward_s
            self.sources.setdefault(consumer, []).append((producer, float(delay or 0.0)))

    def of(self, rank: int, step: int, wrong: bool) -> Iterator[Task]:
        """What a rank does in a step. `wrong`: the optimizer step before has to be undone and taken again."""
        order, prefix = self.orders[rank], self.chain.prefix[rank]
        first = "first" if wrong else "final"
        if not self.barrier:
            yield from (self.action(a, step, first) for a in order[:prefix])
            yield self.verdict(rank, step)
            if wrong:
                yield Task(("redo", step, rank), self.costs.redo_s[rank])
                yield from (self.action(a, step, "final") for a in order[:prefix])
            order = order[prefix:]
        yield from (self.action(a, step, "final") for a in order)
        yield self.state(rank, step)
        after = self.everyone(step) if self.barrier else ()
        yield Task(("optimizer", step, rank), self.costs.step_s[rank], after, ends=step)

    def action(self, action: Action, step: int, run: str) -> Task:
        after = tuple(
            ((source, step, run if source in self.early else "final"), delay)
            for source, delay in self.sources.get(action, ())
        )
        cost = self.schedule.costs.stages[action.stage]
        seconds = 0.0 if action in self.guests else float(cost.seconds(action.kind))
        if action in self.hosts and cost.beside_s is not None:
            seconds = float(cost.beside_s)
        return Task((action, step, run), seconds, after)

    def verdict(self, rank: int, step: int) -> Task:
        _, source = self.chain.neighbours(rank)
        known: TaskKey = ("state", step - 1, rank) if source is None else ("verdict", step, source)
        after = () if source is None and step == 0 else ((known, 0.0 if source is None else self.costs.hop_s),)
        return Task(("verdict", step, rank), 0.0, after)

    def state(self, rank: int, step: int) -> Task:
        source, _ = self.chain.neighbours(rank)
        waits = () if self.barrier or source is None else ((("state", step, source), self.costs.hop_s),)
        return Task(("state", step, rank), 0.0, waits)

    def everyone(self, step: int) -> tuple[tuple[TaskKey, float], ...]:
        """A barrier: every rank waits for all, along the chain and back."""
        delay = self.costs.hop_s * (len(self.orders) - 1)
        return tuple((("state", step, rank), delay) for rank in range(len(self.orders)))
