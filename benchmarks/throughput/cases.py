"""What the throughput benchmark runs: every case by name, in order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

SYSTEMS = ("limit", "zbfx", "torch")


@dataclass(frozen=True, slots=True)
class TorchSchedule:
    """A schedule of torch.distributed.pipelining: its name there, stages on each rank, and their placement.

    Schedules with a `split_backward` refuse compiled stages. `checkpoint`: every block keeps its input alone, and is
    computed again in the backward.
    """

    name: str
    stages_per_rank: int
    placement: str  # "loop" or "v"
    split_backward: bool
    checkpoint: bool = False


TORCH_SCHEDULES = {
    "GPipe": TorchSchedule("GPipe", 1, "loop", False),
    "1F1B": TorchSchedule("1F1B", 1, "loop", False),
    "ZB1P": TorchSchedule("InterleavedZeroBubble", 1, "loop", True),
    "Interleaved1F1B": TorchSchedule("Interleaved1F1B", 2, "loop", False),
    "InterleavedZeroBubble": TorchSchedule("InterleavedZeroBubble", 2, "loop", True),
    "ZBVZeroBubble": TorchSchedule("ZBVZeroBubble", 2, "v", True),
    "DualPipeV": TorchSchedule("DualPipeV", 2, "v", True),
    "1F1B+checkpoint": TorchSchedule("1F1B", 1, "loop", False, checkpoint=True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the benchmark: `m` microbatches of `b` sequences through one system.

    `split` is where the layers are cut: "bal" for equal load, "even" for equal numbers of blocks, "13+11" for these
    numbers of blocks, "auto" for zbfx's own cuts, "rebalanced" for those that it makes from measured stages. A zbfx
    `schedule` reads `name[@memory limit][*stages per rank][+recompute][-][/transport]`, for example "auto@1x" or
    "1f1b+full"; "auto@60%" limits every rank to this share of what the largest holds in 1F1B; "-" keeps W and B one
    after the other; "/group" sends messages over NCCL.
    """

    system: str
    config: str
    b: int
    m: int
    schedule: str
    backend: str
    split: str

    @property
    def name(self) -> str:
        return f"{self.system} {self.config} b={self.b} m={self.m} {self.schedule} {self.backend} {self.split}"


@dataclass(frozen=True, slots=True)
class ZbfxSchedule:
    """What the text of a zbfx schedule says."""

    name: str
    mem_limit: str | None
    stages_per_rank: int | None
    recompute: str | None
    overlap: bool | None
    transport: str = "auto"

    @classmethod
    def parse(cls, text: str) -> ZbfxSchedule:
        match = re.fullmatch(r"([^@*+/]+?)(?:@([^*+/]+?))?(?:\*(\d+))?(?:\+(\w+))?(-)?(?:/(\w+))?", text)
        if match is None:
            raise ValueError(
                f"a zbfx schedule reads name[@memory limit][*stages per rank][+recompute][-][/transport]; "
                f"found {text!r}"
            )
        stages = int(match[3]) if match[3] else None
        return cls(match[1], match[2], stages, match[4], False if match[5] else None, match[6] or "auto")


class Choices(Protocol):
    """The flags that say which cases to run; lists in the order in which they were given."""

    config: str
    b: int
    m: Sequence[int]
    systems: Sequence[str]
    splits: Sequence[str]
    limit_backends: Sequence[str]
    torch_schedules: Sequence[str]
    torch_backends: Sequence[str]
    zbfx_schedules: Sequence[str]
    zbfx_backends: Sequence[str]
    zbfx_splits: Sequence[str]
    only: Sequence[str]
    first: Sequence[str]


def expand(choices: Choices) -> list[Case]:
    """Every case, numbers of microbatches innermost: neighbours share compiled code. `first` moves matches forward."""
    cases = [
        Case(system, choices.config, choices.b, m, schedule, backend, split)
        for system in choices.systems
        for schedule, backend, split in variants(system, choices)
        for m in choices.m
    ]
    if choices.only:
        cases = [case for case in cases if any(re.search(pattern, case.name) for pattern in choices.only)]
    return sorted(cases, key=lambda case: priority(case, choices.first))


def variants(system: str, choices: Choices) -> Iterator[tuple[str, str, str]]:
    """(schedule, backend, split) of one system."""
    if system == "limit":
        yield from product(["bubble-free"], choices.limit_backends, choices.splits)
    elif system == "zbfx":
        yield from product(choices.zbfx_schedules, choices.zbfx_backends, choices.zbfx_splits)
    else:
        for schedule, backend, split in product(choices.torch_schedules, choices.torch_backends, choices.splits):
            if backend == "eager" or not TORCH_SCHEDULES[schedule].split_backward:
                yield schedule, backend, split


def priority(case: Case, first: Sequence[str]) -> int:
    """The position of the first pattern that finds something in the case's name."""
    return next((index for index, pattern in enumerate(first) if re.search(pattern, case.name)), len(first))
