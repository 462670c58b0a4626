"""Times and sizes as text, with their units."""

from __future__ import annotations

from math import floor, log10

from zbfx.plan import Timetable

PREFIXES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def is_real(schedule: Timetable) -> bool:
    """Whether times are seconds and sizes bytes, as for a model's program. Costs alone may have any unit."""
    return schedule.memory is not None


def amount(size_bytes: float, schedule: Timetable | None = None) -> str:
    """Bytes as text, in GiB or MiB from 1 MiB on. For a `schedule` planned from costs alone the bare number."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if size_bytes >= size and (schedule is None or is_real(schedule)):
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes:.6g}" + (" B" if schedule is not None and is_real(schedule) else "")


def duration(seconds: float, schedule: Timetable, digits: int = 4) -> str:
    """A time as text: 1.25 ms. For a schedule planned from costs alone the bare number."""
    size, unit = time_unit(seconds, schedule)
    return f"{seconds / size:.{digits}g}" + (f" {unit}" if unit else "")


def time_unit(most_s: float, schedule: Timetable) -> tuple[float, str]:
    """The unit in which times up to `most_s` are read best, in seconds, and its name."""
    if not is_real(schedule):
        return 1.0, ""
    return next(((size, unit) for size, unit in PREFIXES if most_s >= size), PREFIXES[-1] if most_s else PREFIXES[0])


def ticks(most: float, count: int) -> list[float]:
    """Round numbers from 0 to `most`, `count` of them or fewer: multiples of 1, 2 or 5 times a power of ten."""
    if not most > 0 or count < 1:
        return [0.0]
    power = 10.0 ** floor(log10(most / count))
    step = next(step * power for step in (1, 2, 5, 10) if most / (step * power) < count + 1)
    return [number * step for number in range(int(most / step * (1 + 1e-9)) + 1)]
