"""Random steps of unlike microbatches against plain autograd in float64.

    python benchmarks/coverage/fuzz_unlike.py --count 1000 --seed 0 --workers 2

A case is a decoder over 1 to 4 ranks, by a schedule by hand or searched, with the mean of losses or a loss by tokens.
It takes `STEPS` steps of 1 to 3 microbatches for each rank, of lengths drawn from the deciles of
`benchmarks/planner/unlike.py`, an eighth as long. Every fourth case runs over gloo, a process for each rank. Loss and
every gradient must be within 1e-10. A third of the cases has a limit in bytes: what the planner counts, and over gloo
the storages that a rank really holds, must be within it; steps that it refuses are counted. A fifth pads to buckets.
`--workers` cases run at once, in processes that stay; one that hangs ends after `LIMIT_S`. Prints one JSON line for
each failure, and a summary at the end, at Ctrl-C and at SIGTERM.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks.gpt import GPT, GPTConfig
from benchmarks.kept import Kept, over_processes
from benchmarks.planner.unlike import drawn
from tests.support.live_bytes import LiveBytes

STEPS, SHORTER, LONGEST, TOLERANCE, VOCABULARY, IGNORED = 10, 8, 64, 1e-10, 24, -100
LIMIT_S = 240.0  # for a case
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "auto")
Row = tuple[tuple[Tensor, Tensor], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """What a seed decides."""

    seed: int
    ranks: int
    microbatches: int
    schedule: str
    by_tokens: bool
    on_new_shape: str
    in_processes: bool
    room: float | None  # the limit, by what the compiled pipeline holds
    bucket: int | None  # lengths are padded to multiples of this

    @classmethod
    def of(cls, seed: int) -> Case:
        random = Random(seed)
        ranks = random.randint(1, 4)
        return cls(
            seed,
            ranks,
            random.randint(ranks, 2 * ranks),
            random.choice(SCHEDULES),
            random.random() < 0.5,
            "symbolic" if random.random() < 0.8 else "recompile",
            seed % 4 == 3 and ranks > 1,
            random.uniform(1.1, 3.0) if random.random() < 1 / 3 else None,
            random.choice((4, 16)) if random.random() < 0.2 else None,
        )

    def steps(self) -> Iterator[list[Row]]:
        random = Random(self.seed + 1)
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(STEPS):
            lengths = [
                min(LONGEST, 1 + drawn(random, "recipes") // SHORTER) for _ in range(random.randint(1, 3 * self.ranks))
            ]
            ids = [torch.randint(VOCABULARY, (1, length + 1), generator=generator) for length in lengths]
            yield [((row[:, :-1], row[:, 1:]), {}) for row in ids]

    def loss_fn(self, logits: Tensor, targets: Tensor) -> Any:
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
        count = (targets != IGNORED).sum()
        return (total, count) if self.by_tokens else total / count

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return GPT(GPTConfig(layers=4, hidden=16, heads=2, sequence=LONGEST, vocabulary=VOCABULARY)).double()

    @property
    def buckets(self) -> zbfx.Buckets | None:
        if self.bucket is None:
            return None
        by = self.bucket
        pad = {"inputs[0]": (1, 0), "targets[0]": (1, IGNORED)}
        return zbfx.Buckets(pad, rounded=lambda length: by * -(-length // by), most=LONGEST)

    def compiled(self, model: nn.Module) -> zbfx.Pipeline:
        if self.room is None:
            return self.within(None, model)
        held = max(memory.peak_bytes for memory in self.within(None, model).memory)
        return self.within(int(self.room * held), model)

    def within(self, limit: int | None, model: nn.Module) -> zbfx.Pipeline:
        ids = torch.randint(VOCABULARY, (1, 24))
        return zbfx.compile(
            model,
            stages=self.ranks,
            microbatches=self.microbatches,
            example_inputs=(ids,),
            example_targets=(ids,),
            loss_fn=self.loss_fn,
            schedule="auto" if limit else self.schedule,
            mem_limit=limit,
            check=False,
        )


def expected(case: Case, model: nn.Module, rows: list[Row]) -> Tensor:
    model.zero_grad()
    found = [case.loss_fn(model(ids), targets) for (ids, targets), _ in rows]
    if case.by_tokens:
        loss: Tensor = sum(total for total, _ in found) / sum(count for _, count in found)
    else:
        loss = torch.stack(found).mean()
    loss.backward()
    return loss.detach()


@dataclass(frozen=True)
class Outcome:
    """The largest difference of a loss or a gradient; how many steps the limit refused; the most of the limit that was
    held."""

    error: float
    refused: int = 0
    share: float = 0.0


def outcome_of(case: Case, *, binds: bool = False) -> Outcome:
    """Of this process, over the case's steps."""
    model = case.model()
    plain, pipe, worst, refused, share = copy.deepcopy(model), case.compiled(model), 0.0, 0, 0.0
    options: dict[str, Any] = {"on_new_shape": case.on_new_shape, "buckets": case.buckets}
    step = pipe.run_local(**options) if not binds else pipe.bind(timeout_s=60.0, **options)
    limits = pipe.schedule.mem_limit if case.room is not None else None
    with closing(step):
        own = dict(step.named_parameters())
        wanted = dict(plain.named_parameters())
        for index, rows in enumerate(case.steps()):
            for parameter in own.values():
                parameter.grad = None
            step.plan_split(rows)  # traces, whose tensors are not counted; so does the first step's look at padding
            counted = LiveBytes() if binds and limits is not None and index else nullcontext()
            try:
                with counted:
                    loss = step.run_split(rows)
            except zbfx.InputError as error:
                if limits is None or "stays within mem_limit" not in str(error):
                    raise
                refused += 1
                continue
            if limits is not None:
                share = max(share, held_share(step, limits, counted))
            worst = max(worst, abs(float(loss - expected(case, plain, rows))))
            for name, parameter in own.items():
                found, right = parameter.grad, wanted[name].grad
                assert found is not None, f"no gradient of {name}"
                assert right is not None, "every parameter has one"
                worst = max(worst, float((found - right).abs().max()))
    return Outcome(worst if share <= 1 else float("inf"), refused, share)


def held_share(step: Any, limits: tuple[float, ...], counted: Any) -> float:
    """What ranks of this process hold of their limits: as it was planned, and what was live, if that was counted."""
    planned = step.pipelines[-1].memory
    share = max(memory.peak_bytes / limits[memory.rank] for memory in planned)
    if isinstance(counted, LiveBytes):
        weights = sum(parameter.nbytes for parameter in step.parameters())
        share = max(share, (weights + counted.peak) / limits[step.engine.runners[0].rank])
    return share


def rank_of_case(given: tuple[int, int, str]) -> tuple[Outcome, str | None]:
    seed, rank, file = given
    torch.set_num_threads(1)
    case = Case.of(seed)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=case.ranks, timeout=timedelta(seconds=60)
    )
    try:
        return outcome_of(case, binds=True), None
    except Exception as error:
        return Outcome(float("inf")), f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()


@dataclass
class Crew:
    """Processes that run the ranks of cases over gloo, one case after the other."""

    ranks: list[Kept] = field(default_factory=list)

    def run(self, case: Case) -> tuple[Outcome, str | None]:
        """The worst of all ranks, and what went wrong; after that, the next case gets other processes."""
        self.ranks += [Kept.start() for _ in range(case.ranks - len(self.ranks))]
        own = self.ranks[: case.ranks]
        with TemporaryDirectory() as folder:
            for rank, kept in enumerate(own):
                kept.ask(rank_of_case, (case.seed, rank, f"{folder}/store"))
            try:
                found = [kept.connection.recv() for kept in own]
            except (EOFError, OSError):
                found = [(Outcome(float("inf")), "a process of a rank ended")]
        texts = [text for _, text in found if text is not None]
        if texts:
            self.end()
        outcomes = [outcome for outcome, _ in found]
        worst = Outcome(max(one.error for one in outcomes), outcomes[0].refused, max(one.share for one in outcomes))
        return worst, texts[0] if texts else None

    def end(self) -> None:
        while self.ranks:
            self.ranks.pop().end()


CREW = Crew()  # of this process


def run_case(seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    case, begun = Case.of(seed), perf_counter()
    try:
        outcome, text = CREW.run(case) if case.in_processes else (outcome_of(case), None)
    except Exception as failure:
        outcome, text = Outcome(float("inf")), f"{type(failure).__name__}: {failure}"
    return {**vars(case), **vars(outcome), "text": text, "seconds": round(perf_counter() - begun, 1)}


def cut_off(seed: int, text: str) -> dict[str, Any]:
    return {**vars(Case.of(seed)), **vars(Outcome(float("inf"))), "text": text, "seconds": LIMIT_S}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--workers", type=int, default=1, help="cases at once")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    counts, worst, failed, begun = Counter[str](), 0.0, list[int](), perf_counter()
    refused = limited = padded = 0
    share = 0.0
    seeds = range(args.seed, args.seed + -(-args.count // STEPS))
    outcomes = over_processes(run_case, seeds, args.workers, LIMIT_S, cut_off)
    with suppress(KeyboardInterrupt), closing(outcomes):
        for found in outcomes:
            counts[f"{'gloo' if found['in_processes'] else 'one process'}, {found['ranks']} ranks"] += STEPS
            worst, refused = max(worst, found["error"]), refused + found["refused"]
            share, limited = max(share, found["share"]), limited + STEPS * (found["room"] is not None)
            padded += STEPS * (found["bucket"] is not None)
            if found["error"] > TOLERANCE:
                failed.append(found["seed"])
                print(json.dumps(found), flush=True)
    steps, seconds = sum(counts.values()), round(perf_counter() - begun, 1)
    limits = {"steps": limited, "refused": refused, "held_at_most": round(share, 3)}
    told = {"steps": steps, "worst": worst, "failed": failed, "seconds": seconds, "within_limits": limits}
    summary = {**told, "padded": padded, **dict(sorted(counts.items()))}
    print(json.dumps(summary), flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
