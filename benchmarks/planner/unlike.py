"""Steps of unlike microbatches: milliseconds to plan one, its gap to the lower bound, and throughput against padding.

    python benchmarks/planner/unlike.py [--ranks 8] [--microbatches 32] [--steps 20]

Lengths are drawn from published quantiles, `QUANTILES` below, with logarithms in between:
    recipes  deciles of the README of AdamCodd/recipe-nlg-alpaca on Hugging Face, tokens of Llama 3
    web      quartiles of the README of BEE-spoke-data/TxT360-5M-sample-en on Hugging Face, tokens of GPT-4

Planning is timed for a decoder over so many ranks: the order, the program of one rank in the middle, and a walk of
that program that counts its memory, in milliseconds of the processor, for shapes that are known. Throughput is
simulated: documents a second of the same microbatches, each of a length rounded up by a fifth at most, padded to the
longest of the step, and padded to the next power of two, all planned by the same planner.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median
from time import process_time
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks.gpt import GPT, GPTConfig
from benchmarks.rows import git_commit
from zbfx.memory.predict import RankMemory, rank_memory
from zbfx.modes import uncollected
from zbfx.program.boxed import boxed
from zbfx.runtime.buckets import quarter_power
from zbfx.runtime.mixing import Mixing, Served
from zbfx.runtime.ranks import AllHere
from zbfx.schedule.unlike import Unlike, UnlikePlan, plan_unlike
from zbfx.trace.wanted import TRAINING, Request
from zbfx.variants import Variants

QUANTILES = {  # of lengths in tokens, by the share of documents that are no longer
    "recipes": (
        (0.0, 164),
        (0.1, 192),
        (0.2, 209),
        (0.3, 228),
        (0.4, 249),
        (0.5, 274),
        (0.6, 302),
        (0.7, 337),
        (0.8, 386),
        (0.9, 467),
        (1.0, 3285),
    ),
    "web": ((0.0, 257), (0.25, 402), (0.5, 622), (0.75, 1050), (1.0, 24576)),
}
LONGEST = 4096  # the model's context: longer documents are cut to it


def drawn(random: Random, mix: str) -> int:
    share, points = random.random(), QUANTILES[mix]
    (low, short), (high, long) = next(pair for pair in pairwise(points) if pair[0][0] <= share <= pair[1][0])
    return min(LONGEST, round(short * (long / short) ** ((share - low) / (high - low))))


def rounded_up(length: int) -> int:
    return min(LONGEST, quarter_power(length))


def loss_fn(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, torch.ones_like(targets).sum()


def row(length: int) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    return ids, ids


def program_and_memory(
    mixing: Mixing, of: Sequence[Served], plan: UnlikePlan, request: Request, rank: int
) -> RankMemory:
    """What a rank does before a step, once its order is known."""
    distinct = list({id(one): one for one in of}.values())
    places = tuple(next(k for k, one in enumerate(distinct) if one is other) for other in of)
    mixed = mixing.mixed([one.form for one in distinct], places, plan, request)
    served_by = {phase: one for one in distinct for phase in one.phases}
    return rank_memory(
        mixed.program(rank),
        mixed.rows,
        mixing.pipe.options,
        lambda phase, granule: served_by[id(phase)].lifetimes(phase, granule),
    )


def measured(ranks: int, microbatches: int, steps: int, mix: str, seed: int) -> dict[str, object]:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2 * ranks, hidden=768, heads=12, sequence=LONGEST, vocabulary=32000))
    ids, targets = row(64)
    pipe = zbfx.compile(
        model,
        stages=ranks,
        microbatches=microbatches,
        example_inputs=(ids,),
        example_targets=(targets,),
        loss_fn=loss_fn,
        schedule="1f1b",
        check=False,
        device="cpu",
    )
    variants = Variants(pipe.compiled, pipe.source, AllHere(), symbolic=True)
    request = Request(TRAINING, pipe.compiled.signature)
    first: Any = SimpleNamespace(pipe=pipe.compiled, runners=[SimpleNamespace(program=pipe.programs[0])])
    mixing = Mixing(lambda: first, AllHere(), variants.form, boxed, lambda engine: None)
    known: dict[int, Served] = {}

    def served(length: int) -> Served:
        if length not in known:
            known[length] = Served(variants.form(row(length), {}, request))
        return known[length]

    random = Random(seed)
    ordered_ms, planning_ms, forms_ms = list[float](), list[float](), list[float]()
    gaps, faster, faster_two = list[float](), list[float](), list[float]()
    for _ in range(steps):
        lengths = [rounded_up(drawn(random, mix)) for _ in range(microbatches)]
        begun = process_time()
        fresh = len({length for length in lengths if length not in known})
        of = [served(length) for length in lengths]
        if fresh:
            forms_ms.append(1e3 * (process_time() - begun) / fresh)
        program_and_memory(mixing, of, mixing.plan(of, request, None, False), request, ranks // 2)
        with uncollected():
            begun = process_time()
            plan = mixing.plan(of, request, None, False)
            ordered_ms.append(1e3 * (process_time() - begun))
            program_and_memory(mixing, of, plan, request, ranks // 2)
            planning_ms.append(1e3 * (process_time() - begun))
        gaps.append(plan.schedule.gap)
        own_s = plan.schedule.iteration_s
        for ratios, padded in (
            (faster, [max(lengths)] * microbatches),
            (faster_two, [min(LONGEST, 1 << (length - 1).bit_length()) for length in lengths]),
        ):
            other = plan_unlike(Unlike(tuple(served(length).form.costs for length in padded)))
            assert other is not None, "without a limit"
            ratios.append(other.schedule.iteration_s / own_s)
    return {
        "commit": git_commit(),
        "mix": mix,
        "ranks": ranks,
        "microbatches": microbatches,
        "steps": steps,
        "planning_ms": {"median": round(median(planning_ms), 1), "most": round(max(planning_ms), 1)},
        "ordering_ms": round(median(ordered_ms), 1),
        "new_shape_ms": round(median(forms_ms), 1),
        "gap_mean": round(mean(gaps), 4),
        "times_longest": round(mean(faster), 2),
        "times_powers_of_two": round(mean(faster_two), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mix", choices=tuple(QUANTILES), default="recipes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measured(args.ranks, args.microbatches, args.steps, args.mix, args.seed)))


if __name__ == "__main__":
    main()
