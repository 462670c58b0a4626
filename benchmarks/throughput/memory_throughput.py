"""Ways of training within less memory than 1F1B needs: time and memory of each, planned and measured.

    torchrun --nproc-per-node=4 --max-restarts=20 -- benchmarks/throughput/memory_throughput.py --config 1.5B \\
        --b 6 --m 12 \\
        --budget-s 540 --out memory.jsonl

    torchrun --nproc-per-node=4 --max-restarts=20 -- benchmarks/throughput/memory_throughput.py --config 1.5B \\
        --b 6 --m 12 \\
        --systems zbfx --zbfx-backends cudagraph --zbfx-schedules 1f1b-,zb-1p,auto@60% --budget-s 540 --out memory.jsonl

run, on as many GPUs as there are processes (2 to 8, over NCCL), 1F1B without limits, zbfx's plans under 60 % of its
memory, single means (recomputation, V placements, ZB-1p), and torch's 1F1B with activation checkpointing of every
block. Each case is a JSON row as of `benchmarks/compare.py`: `planned_gib` is zbfx's prediction for every rank,
`peak_gib` the CUDA allocator's `max_memory_allocated`. At the end a table: step time, peak, share of 1F1B's, how far
the prediction is off. Compare 2 GPUs by `--nproc-per-node=2 ... --config 350M --b 4 --m 8`; on a CPU, without figures
of memory, by `--device cpu --config tiny --b 2 --m 4 --costs estimate`. Flags of `compare.py` choose other cases.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rows import Row
from benchmarks.throughput import compare

ZBFX = (
    "1f1b-",
    "auto@60%",
    "zb-1p",
    "zb-1p+cheap",
    "zb-1p+full",
    "1f1b+cheap-",
    "1f1b+full-",
    "zb-v",
    "v-half",
    "v-min",
)
CASES = (
    *("--systems", "zbfx,torch", "--splits", "bal", "--torch-backends", "eager"),
    *("--torch-schedules", "1F1B,1F1B+checkpoint", "--zbfx-schedules", ",".join(ZBFX)),
    *("--zbfx-backends", "eager", "--case-timeout-s", "400"),
)
REFERENCE = ("zbfx", "1f1b-")


def table(rows: Sequence[Row]) -> str:
    """One line a case, cases without a figure last."""
    reference = next((peak(row) for row in rows if (row.system, row.schedule) == REFERENCE and row.peak_gib), None)
    lines = [f"{'case':44} {'step ms':>9} {'plan ms':>9} {'peak GiB':>9} {'of 1F1B':>8} {'plan GiB off by':>16}"]
    for row in sorted(rows, key=lambda row: row.step_ms or float("inf")):
        name = f"{row.system} {row.schedule} {row.backend} m={row.m}"
        if row.error:
            lines.append(f"{name:44} {row.error[:100]}")
            continue
        share = f"{peak(row) / reference:.1%}" if reference and peak(row) else ""
        planned = f"{row.planned_ms:.1f}" if row.planned_ms else ""
        lines.append(
            f"{name:44} {row.step_ms:9.1f} {planned:>9} {peak(row):9.2f} {share:>8} "
            f"{' '.join(f'{error:+.1%}' for error in errors(row)):>16}"
        )
    return "\n".join(lines)


def peak(row: Row) -> float:
    """The largest measured peak of a rank, in GiB; 0 if nothing was measured."""
    return max((value for value in row.peak_gib or [] if value is not None), default=0.0)


def errors(row: Row) -> list[float]:
    """How far each rank's predicted peak is off the measured one."""
    pairs = zip(row.planned_gib or [], row.peak_gib or [], strict=False)
    return [planned / measured - 1.0 for planned, measured in pairs if measured]


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = compare.parser().parse_args([*CASES, *given])
    if options.device == "cpu":
        options.zbfx_backends = [backend for backend in options.zbfx_backends if backend == "eager"]
    benchmark = compare.prepared(options)
    if benchmark is None:
        return
    benchmark.run()
    if benchmark.leads:
        print(table([Row(**json.loads(line)) for line in options.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
