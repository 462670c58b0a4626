"""Why a schedule cannot run to its end, in words and as a picture.

Takes   an `Instance` and coded orders that stop before their end.
Gives   a message that names the ranks and actions that wait for one another, with an excerpt of the orders.
Raises  nothing.
Source  ours. Programs communicate in this way: every ordered pair of ranks has one first-in-first-out channel. An
        action's values are sent right after it, in the sender's order. A send holds its channel, not the rank, until
        the receiver takes it. Before an action the receiver takes what its channels carry, in the sender's order, up
        to the values that the action needs. So no channel ever waits for a value behind it, and the ranks can only
        stop for ever at a cycle of data and order.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbfx.plan import Action
from zbfx.timing.exact import Instance
from zbfx.timing.longest_path import longest_paths


def excerpt(ranks: Sequence[Sequence[Action]], marks: dict[int, int], context: int = 4) -> str:
    """The rank x step grid around the cells `marks` (rank -> step), each drawn as >F0.3<."""
    first = max(0, min(marks.values(), default=0) - context)
    last = min(max(marks.values(), default=0) + context + 1, max(map(len, ranks), default=0))
    cells = [
        [
            f">{order[step]}<" if marks.get(rank) == step else f" {order[step]} "
            for step in range(first, min(last, len(order)))
        ]
        for rank, order in enumerate(ranks)
    ]
    width = max((len(cell) for row in cells for cell in row), default=0)
    lead = "... " if first else ""
    header = "step".ljust(9) + " " * len(lead) + " ".join(str(step).center(width) for step in range(first, last))
    lines = [
        f"rank {rank}".ljust(9)
        + lead
        + " ".join(cell.center(width) for cell in row)
        + (" ..." if last < len(ranks[rank]) else "")
        for rank, row in enumerate(cells)
    ]
    return "\n".join(line.rstrip() for line in [header, *lines])


def describe_deadlock(problem: Instance, orders: Sequence[Sequence[int]]) -> str:
    """Name the cycle (or the action that nobody runs) at which coded `orders` stop."""
    reached = longest_paths(problem, orders).reached
    m = problem.microbatches
    made_by = {
        problem.output[code // m] * m + code % m: (rank, step)
        for rank, order in enumerate(orders)
        for step, code in enumerate(order)
    }

    def needed(rank: int) -> int:
        """The output that `rank` waits for."""
        group, microbatch = divmod(orders[rank][reached[rank]], m)
        for source, _ in problem.sources[group]:
            wanted = source * m + microbatch
            maker = made_by.get(wanted)
            if maker is None or maker[1] >= reached[maker[0]]:
                return wanted
        raise AssertionError("a rank stands still although all that it needs is there")

    rank = next(rank for rank, order in enumerate(orders) if reached[rank] < len(order))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        wanted = needed(rank)
        if wanted not in made_by:
            stuck = problem.action(orders[rank][reached[rank]])
            text = f"rank {rank} waits at {stuck} for {problem.action(wanted)}, which no rank runs"
            return f"{text}\n{excerpt(problem.decode(orders), {rank: reached[rank]})}"
        rank = made_by[wanted][0]
    cycle = path[path.index(rank) :]
    reasons = []
    for rank in cycle:
        stuck, wanted = problem.action(orders[rank][reached[rank]]), needed(rank)
        maker = made_by[wanted][0]
        waits = problem.action(orders[maker][reached[maker]])
        reasons.append(
            f"rank {rank} waits at {stuck} for {problem.action(wanted)}, which rank {maker} runs only after {waits}"
        )
    picture = excerpt(problem.decode(orders), {rank: reached[rank] for rank in cycle})
    return f"deadlock: {'; '.join(reasons)}. Move one of the marked actions back.\n{picture}"
