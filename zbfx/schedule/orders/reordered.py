"""The repeated blocks of a V with their warm-up and cool-down closed up.

Takes   when each F and B of microbatch 0 starts, in slots of one action; blocks repeat every six slots.
Gives   an order of actions per rank, with Ws in the free slots.
Raises  nothing.
Source  Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": repeat a building block, then squeeze it.

In the middle of a step six actions a microbatch fill a rank's six slots. Before and after it slots are free, for not
all blocks are there. Actions move up into these while the rank holds no more than some rank holds anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from zbfx.plan import Action, Kind
from zbfx.schedule.orders.handmade import Orders

EVERY = 6  # slots from a microbatch's block to the next one's


class Leg(IntEnum):
    """What a rank does to a microbatch. Values pass down the ranks, up the ranks, and the gradients likewise."""

    F_DOWN = 0
    F_UP = 1
    B_DOWN = 2
    B_UP = 3
    W = 4


FORWARD, BACKWARD, DOWN = (Leg.F_DOWN, Leg.F_UP), (Leg.B_DOWN, Leg.B_UP), (Leg.F_DOWN, Leg.B_DOWN)

# Per rank, step and microbatch its slot. A rank's Ws are numbered through, in the order of its Bs.
SlotTable = list[list[list[int]]]


def reordered(block: Sequence[Sequence[int]], microbatches: int) -> Orders:
    """`block[rank][step]`: the slot of microbatch 0's F down the ranks, F up, B down and B up."""
    slots = [[[start + EVERY * j for j in range(microbatches)] for start in starts] for starts in block]
    slots = with_ws(slots)
    most = max(max(_held(steps)) for steps in slots)
    slots = pressed(Squeeze(slots, most, warm_up=True).run())
    slots = Squeeze(slots, most, warm_up=False).run()
    slots = with_ws([steps[: Leg.W] for steps in slots])
    return tuple(_order(rank, steps, len(slots)) for rank, steps in enumerate(slots))


def with_ws(slots: SlotTable) -> SlotTable:
    """Every rank's Ws in its free slots, as soon as their Bs have run."""
    found = []
    for steps in slots:
        taken = {slot for step in steps for slot in step}
        ws: list[int] = []
        for ready in sorted(slot for step in BACKWARD for slot in steps[step]):
            first = max(ready, ws[-1] if ws else 0) + 1
            ws.append(next(slot for slot in count(first) if slot not in taken))
        found.append([*steps, ws])
    return found


def in_time(slots: SlotTable) -> Iterable[tuple[int, int, int, int]]:
    """(slot, rank, step, number), sorted."""
    return sorted(
        (slot, rank, step, number)
        for rank, steps in enumerate(slots)
        for step, row in enumerate(steps)
        for number, slot in enumerate(row)
    )


def ready(slots: SlotTable, rank: int, step: int, number: int) -> int:
    """The first slot in which an action can run, its rank's other work apart."""
    own = slots[rank]
    if step == Leg.W:
        return sorted(slot for backward in BACKWARD for slot in own[backward])[number] + 1
    before = [own[step][number - 1]] if number else []
    neighbour = rank - 1 if step in DOWN else rank + 1
    if 0 <= neighbour < len(slots):
        before.append(slots[neighbour][step][number])
    if step > 0:
        before.append(own[step - 1][number])
    return max(before, default=-1) + 1


def pressed(slots: SlotTable) -> SlotTable:
    """Every rank's actions in their order, each as soon as it can run."""
    found: SlotTable = [[[0] * len(row) for row in steps] for steps in slots]
    clock = [0] * len(slots)
    for _, rank, step, number in in_time(slots):
        slot = max(clock[rank], _ready_in_order(found, slots, rank, step, number))
        found[rank][step][number] = slot
        clock[rank] = slot + 1
    return found


def _ready_in_order(found: SlotTable, slots: SlotTable, rank: int, step: int, number: int) -> int:
    return 0 if step == Leg.W else ready(found, rank, step, number)


@dataclass
class Squeeze:
    """Moves actions up in the cool-down, from the last F down on some rank on. With `warm_up` also before the first B
    up on rank 0, and Ws too; without it Bs alone, which change places with Ws."""

    slots: SlotTable
    most: int  # microbatches that a rank may hold
    warm_up: bool

    def run(self) -> SlotTable:
        slots, last = self.slots, len(self.slots[0][Leg.F_DOWN]) - 1
        self.held = [_held(steps) for steps in slots]
        self.taken: list[set[int]] = [set() for _ in slots]  # by actions that have their place
        self.ws = [set(steps[Leg.W]) for steps in slots]
        moving, closing = self.warm_up, False
        for slot, rank, step, number in in_time(slots):
            if (rank, step, number) == (0, Leg.B_UP, 0):
                moving = False
            if (step, number) == (Leg.F_DOWN, last) and not moving and slots[0][Leg.B_UP][0] <= slot:
                closing = True
            if self.warm_up or step != Leg.W:
                place = self._place(rank, step, number, slot) if moving or closing else slot
                slots[rank][step][number] = place
                self.taken[rank].add(place)
        return slots

    def _place(self, rank: int, step: int, number: int, slot: int) -> int:
        """The first slot that the action can take, at most `slot`."""
        held, ws = self.held[rank], self.ws[rank]
        for place in range(ready(self.slots, rank, step, number), slot):
            if place in self.taken[rank]:
                continue
            late_w = not self.warm_up and place in ws
            change = late_w + (1 if step in FORWARD else -1 if step == Leg.W else 0)
            if change > 0 and max(held[place:slot]) + change > self.most:
                continue
            for between in range(place, slot):
                held[between] += change
            if late_w:
                ws.remove(place)
                ws.add(slot)
            return place
        return slot


def _held(steps: Sequence[Sequence[int]]) -> list[int]:
    """How many microbatches' values a rank holds in every slot, from F until W."""
    change = [0] * (1 + max(max(row) for row in steps))
    for step, row in enumerate(steps):
        for slot in row:
            change[slot] += 1 if step in FORWARD else -1 if step == Leg.W else 0
    held, now = [], 0
    for value in change:
        now += value
        held.append(now)
    return held


def _order(rank: int, steps: Sequence[Sequence[int]], p: int) -> tuple[Action, ...]:
    down, up = rank, 2 * p - 1 - rank
    meaning = {
        Leg.F_DOWN: (Kind.F, down),
        Leg.F_UP: (Kind.F, up),
        Leg.B_DOWN: (Kind.B, up),
        Leg.B_UP: (Kind.B, down),
    }
    timed = [(slot, Action(*meaning[step], number)) for step in meaning for number, slot in enumerate(steps[step])]
    backwards = [action for _, action in sorted(timed, key=lambda entry: entry[0]) if action.kind is Kind.B]
    timed += [
        (slot, Action(Kind.W, action.stage, action.microbatch))
        for slot, action in zip(steps[Leg.W], backwards, strict=True)
    ]
    return tuple(action for _, action in sorted(timed, key=lambda entry: entry[0]))
