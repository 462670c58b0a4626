"""Memory limits: reading what the user wrote, and the smallest limit that any schedule can meet.

Takes   a cost table and a limit: bytes, text like "24GiB", one of these per rank, or a multiple like "2x".
Gives   the limit in bytes per rank, static bytes included; the least bytes with which a rank can run.
Raises  `ZbfxError` for what is no limit; `NoFeasibleSchedule` for a limit that no schedule meets.
Source  section 5.4 and appendix B of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from typing import Any, cast

from zbfx.errors import NoFeasibleSchedule, ZbfxError
from zbfx.plan import CostTable, Number
from zbfx.timing.exact import exact

BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS = BINARY | DECIMAL | {"b": 1}  # last, for the other units end with "b" too

MemLimit = Number | str | Sequence[Number | str] | None
FORMS = (
    'a memory limit is a number of bytes, also like "24GiB" (B, KiB to TiB, kB to TB), a multiple like "2x", or one '
    "number of bytes per rank"
)


def one_x(costs: CostTable) -> Fraction:
    """Activation bytes of 1F1B, the unit of "2x": p times the largest M_B of a rank, over all its stages."""
    ranks = range(costs.rank_count)
    return len(ranks) * max(
        sum((exact(costs.stages[s].saved_bytes) for s in costs.stages_of(r)), Fraction()) for r in ranks
    )


def rank_static_bytes(costs: CostTable, rank: int) -> Fraction:
    """What a rank holds through the whole step, room for the largest transient of an action included."""
    own = [costs.stages[stage] for stage in costs.stages_of(rank)]
    return sum((exact(s.static_bytes) for s in own), Fraction()) + max(exact(s.transient_bytes) for s in own)


def limit_per_rank(costs: CostTable, mem_limit: MemLimit) -> tuple[Number, ...] | None:
    """Bytes per rank, static bytes included. "1.5x" allows 1.5 times `one_x` for activations on top of those."""
    if mem_limit is None:
        return None
    if isinstance(mem_limit, str) and mem_limit.strip().lower().endswith("x"):
        allowed = from_text(mem_limit.strip()[:-1], mem_limit) * one_x(costs)
        return tuple(allowed + rank_static_bytes(costs, rank) for rank in range(costs.rank_count))
    if isinstance(mem_limit, str | bytes) or not isinstance(mem_limit, Sequence):
        return (limit_in_bytes(mem_limit),) * costs.rank_count
    if len(mem_limit) != costs.rank_count:
        raise ZbfxError(f"one memory limit per rank: expected {costs.rank_count}, found {len(mem_limit)}")
    return tuple(map(limit_in_bytes, mem_limit))


def limit_in_bytes(limit: Any) -> Number:
    """A number of bytes, or text like "24GiB"."""
    if isinstance(limit, str):
        number = limit.strip().lower()
        unit = next((unit for unit in UNITS if number.endswith(unit)), "")
        return from_text(number.removesuffix(unit), limit, UNITS.get(unit, 1))
    is_number = isinstance(limit, Real) and not isinstance(limit, bool)
    if not is_number or not 0 < limit < math.inf:
        raise ZbfxError(f"{FORMS}, above 0; found {limit!r}")
    return cast(Number, limit)


def from_text(number: str, text: str, unit: int = 1) -> Fraction:
    """`number` times `unit`, if that is above 0 and below 2**100. Else raises `ZbfxError`, which quotes `text`."""
    try:
        found = Fraction(number) * unit
        if 0 < found < 2**100:
            return found
    except (ValueError, ZeroDivisionError):
        pass
    raise ZbfxError(f"{FORMS}; found {text!r}")


def smallest_limit(costs: CostTable, rank: int) -> Fraction:
    """The least bytes with which `rank` can run at all. One microbatch after the other, each backward fused, holds one
    M_B per stage and nothing else. No order holds less where each stage feeds the next: a forward passes all stages of
    the rank before its backward returns to the first."""
    return rank_static_bytes(costs, rank) + sum(
        (exact(costs.stages[s].saved_bytes) for s in costs.stages_of(rank)), Fraction()
    )


def require_feasible(costs: CostTable, limits: Sequence[Number] | None) -> None:
    """Raise NoFeasibleSchedule if some rank cannot hold even one microbatch."""
    if limits is None:
        return
    least = [smallest_limit(costs, rank) for rank in range(costs.rank_count)]
    short = [rank for rank, need in enumerate(least) if exact(limits[rank]) < need]
    if not short:
        return
    rank = max(short, key=lambda r: least[r])
    stage = max(
        costs.stages_of(rank), key=lambda s: exact(costs.stages[s].static_bytes) + exact(costs.stages[s].saved_bytes)
    )
    one_limit = max(least) if len(set(limits)) == 1 else least[rank]
    throughout = rank_static_bytes(costs, rank)
    room = max(exact(costs.stages[s].transient_bytes) for s in costs.stages_of(rank))
    parts = f" ({float(throughout - room):g} static, and room for {float(room):g} inside an action)" if room else ""
    raise NoFeasibleSchedule(
        f"no schedule fits in {float(limits[rank]):g} on rank {rank}: it holds {float(throughout):g} "
        f"throughout{parts}, and {float(least[rank] - throughout):g} for a single microbatch. "
        f"The smallest feasible limit is {float(one_limit):g}, "
        f"set by stage {stage} (M_B {float(costs.stages[stage].saved_bytes):g}). "
        "Raise the limit, use smaller microbatches, or cut the model into more stages.",
        float(one_limit),
    )
