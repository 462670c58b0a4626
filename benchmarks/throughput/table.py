"""The benchmark's JSON lines as a markdown page: `python -m benchmarks.throughput.table FILE ... >
benchmarks/RESULTS.md`.

A row is compared with rows of the same model, microbatch, ranks, code and machine only. Where several versions of the
code were measured, those of the first files come first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.rows import Row

TITLE = """# Throughput

One training step without the optimizer: forward, backward and accumulated gradients of m microbatches of b sequences
on p GPUs. `step ms` is the time of a step in a row of steps, as in training: the median on the slowest rank. `alone ms`
is the time of a step by itself, from a moment at which all ranks begin until the last one ends (in rows without one,
which are older, `step ms` is that time). `of torch` is the tokens/s as a multiple of the fastest
torch.distributed.pipelining row with the same m; `of limit` is the fraction of the bubble-free limit of the same
kernels (eager, or compiled by inductor): the slowest rank's forward and whole backward alone, m times. What the figures
say: `benchmarks/results/README.md`.
"""
HEADER = (
    "| m | system | schedule | backend | split | layers | step ms | alone ms | tokens/s | peak GiB | planned ms "
    "| planned GiB | loss | of torch | of limit |"
)
ERROR_LENGTH = 160


def read(paths: Iterable[Path]) -> list[Row]:
    return [Row(**json.loads(line)) for path in paths for line in path.read_text().splitlines()]


def page(rows: Sequence[Row]) -> str:
    """The whole page: a section for every model, microbatch and machine."""
    seen = list(dict.fromkeys(map(setting, rows)))
    keyed = sorted(rows, key=lambda row: (setting(row)[:-1], seen.index(setting(row))))
    return "\n".join([TITLE, *(section(list(group)) for _, group in groupby(keyed, key=setting))])


def setting(row: Row) -> tuple[str, ...]:
    """What two rows must have in common to be compared, the number of microbatches aside; the code last."""
    return (row.config, f"{row.b:4d}", f"{row.p:4d}", row.device, row.dtype, row.torch, row.nccl or "", row.commit)


def section(rows: Sequence[Row]) -> str:
    """One setting: a sentence on the fastest of each system for every m, the table, and the failures."""
    row = rows[0]
    network = f", NCCL {row.nccl}" if row.nccl else ""
    good = sorted((r for r in rows if r.step_ms), key=lambda r: (r.m, r.step_ms))
    lines = [
        f"\n## {row.config}, b={row.b}, p={row.p}\n",
        f"{row.p} x {row.device}, {row.dtype}, torch {row.torch}{network}, commit {row.commit or 'unknown'}.\n",
        *(summary(list(group)) for _, group in groupby(good, key=lambda r: r.m)),
        f"\n{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}",
        *(line(r, good) for r in good),
    ]
    failed = [r for r in rows if r.error]
    if failed:
        lines += [
            "\nNo figure:\n",
            *(f"- {r.system} m={r.m} {r.name}: {r.error[:ERROR_LENGTH]}" for r in failed if r.error),
        ]
    return "\n".join(lines)


def fastest(rows: Iterable[Row], system: str, m: int, backend: str | None = None) -> Row | None:
    """The fastest row of a system at `m`, if it has one."""
    found = [r for r in rows if r.system == system and r.m == m and r.step_ms and backend in (None, r.backend)]
    return min(found, key=lambda r: r.step_ms or 0.0, default=None)


def kernels(row: Row) -> str:
    """Whose limit a row is held against: that of compiled or of eager kernels."""
    return "inductor" if "inductor" in row.backend else "eager"


def ratio(row: Row, reference: Row | None) -> float | None:
    """Tokens/s of `row` over those of `reference`."""
    return reference.step_ms / row.step_ms if reference and reference.step_ms and row.step_ms else None


def of_torch(row: Row, rows: Sequence[Row]) -> float | None:
    return ratio(row, fastest(rows, "torch", row.m))


def of_limit(row: Row, rows: Sequence[Row]) -> float | None:
    return ratio(row, fastest(rows, "limit", row.m, kernels(row)))


def summary(rows: Sequence[Row]) -> str:
    """The fastest zbfx row of one m against torch and the limit."""
    m = rows[0].m
    best = fastest(rows, "zbfx", m)
    if best is None:
        return f"- m={m}: no zbfx row."
    rival, torch_ratio, limit_ratio = fastest(rows, "torch", m), of_torch(best, rows), of_limit(best, rows)
    parts = [f"- m={m}: zbfx {best.name} {best.step_ms:.1f} ms"]
    if rival and torch_ratio:
        parts.append(f"{torch_ratio:.2f}x the fastest torch schedule ({rival.name}, {rival.step_ms:.1f} ms)")
    if limit_ratio:
        parts.append(f"{limit_ratio:.3f} of the limit")
    return ", ".join(parts) + "."


def line(row: Row, rows: Sequence[Row]) -> str:
    """One row of the table."""
    planned = "" if row.planned_ms is None or row.step_ms is None else with_error(row.planned_ms, row.step_ms)
    cells = [
        str(row.m),
        row.system,
        row.schedule,
        row.backend,
        row.split,
        "+".join(map(str, row.layers or [])),
        number(row.step_ms, 1),
        number(row.single_ms, 1),
        number(row.tokens_per_s, 0),
        per_rank(row.peak_gib),
        planned,
        per_rank(row.planned_gib),
        number(row.loss, 4),
        "" if row.system == "limit" else number(of_torch(row, rows), 2),
        "" if row.system == "limit" else number(of_limit(row, rows), 3),
    ]
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def per_rank(values: Sequence[float | None] | None) -> str:
    return " / ".join(number(value, 2) for value in values or [] if value is not None)


def with_error(planned_ms: float, step_ms: float) -> str:
    """The planned time and how far the measured one is from it."""
    return f"{planned_ms:.1f} ({step_ms / planned_ms - 1.0:+.1%})" if planned_ms else "0.0"


if __name__ == "__main__":
    print(page(read(map(Path, sys.argv[1:]))))
