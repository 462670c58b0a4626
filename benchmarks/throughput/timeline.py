"""One measured step beside its plan, as a picture, and where each rank's time goes.

    torchrun --nproc-per-node=4 -- benchmarks/throughput/timeline.py --config 1.5B --b 6 --m 12 --out timeline

writes `timeline.svg` and one JSON line per rank: seconds that it computes in the plan and in the step, by kind of
action, and its longest gaps with what it waits for in them. Over gloo: `--device cpu --config tiny --costs estimate`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measure import synchronize
from benchmarks.place import Place
from benchmarks.rows import machine
from benchmarks.stages import CONFIGS, batch
from benchmarks.throughput.cases import Case
from benchmarks.throughput.ours import bound
from benchmarks.world import World, time_limit
from zbfx.plan import Span
from zbfx.runtime.timeline import Profile
from zbfx.timing.two_streams import as_they_run

WARMUP, LONGEST = 5, 5


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--config", choices=list(CONFIGS), default="350M")
    flags.add_argument("--b", type=int, default=2, help="sequences in a microbatch")
    flags.add_argument("--microbatches", "--m", dest="m", type=int, default=8)
    flags.add_argument("--schedule", default="zb-2p", help="see benchmarks/throughput/cases.py")
    flags.add_argument("--backend", default="cudagraph+inductor" if torch.cuda.is_available() else "eager")
    flags.add_argument("--costs", default="measure", help="what zbfx plans from: measure or estimate")
    flags.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    flags.add_argument("--timeout-s", type=float, default=150.0)
    flags.add_argument("--commit", help="recorded in every row; asked from git by default")
    flags.add_argument("--out", type=Path, default=Path("timeline"), help="without suffix")
    return flags


def busy_s(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds by kind of action; those of two that run beside each other count for both."""
    found: dict[str, float] = defaultdict(float)
    for span in spans:
        found[span.action.kind.value] += span.end_s - span.start_s
    return {kind: round(seconds, 6) for kind, seconds in found.items()}


def rank_rows(profile: Profile) -> list[dict[str, Any]]:
    """What each rank did, planned and measured."""
    return [
        {
            "rank": rank,
            "planned_end_s": max(span.end_s for span in planned),
            "measured_end_s": max(span.end_s for span in measured),
            "planned_busy_s": busy_s(planned),
            "measured_busy_s": busy_s(measured),
            "idle": [
                {
                    "before": str(idle.before),
                    "idle_s": round(idle.idle_s, 6),
                    "cause": idle.cause,
                    "because": str(idle.because),
                }
                for idle in sorted(profile.idle[rank], key=lambda idle: -idle.idle_s)[:LONGEST]
            ],
        }
        for rank, (planned, measured) in enumerate(zip(as_they_run(profile.schedule), profile.spans, strict=True))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    world = World.from_environment(options.device)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    place = Place(world.rank, world.ranks, world.device, dtype, timeout_s=options.timeout_s)
    case = Case("zbfx", options.config, options.b, options.m, options.schedule, options.backend, "auto")
    with time_limit(options.timeout_s), world.process_group("timeline", options.timeout_s):
        _, step = bound(case, place, options.costs)
        data = batch(CONFIGS[case.config], case.m * case.b, place.device)
        for _ in range(WARMUP):
            step(*data)
        profile = step.profile(*data)
        synchronize(place.device)
        step.close()
    if world.rank == 0:
        Path(f"{options.out}.svg").write_text(profile.svg())
        with Path(f"{options.out}.jsonl").open("w") as file:
            for row in rank_rows(profile):
                file.write(json.dumps(asdict(case) | row | machine(place, options.commit)) + "\n")


if __name__ == "__main__":
    main()
