"""GPT and the tied GPT-2 under every schedule as replicas of pipelines, beside one process.

    python -m tests.processes.sweep 2 4

trains two replicas of four ranks, and rank 0 prints the largest differences: minutes.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any

from tests.processes.replicas_worker import every_pipeline, in_double_precision, pipelines
from tests.support.models import gpt, gpt2
from tests.support.pool import Pool
from zbfx.schedule import names


@in_double_precision
def sweep(rank: int, replicas: int, ranks: int) -> dict[str, Any]:
    prepared = pipelines(replicas, ranks, gpt, names()) | pipelines(replicas, ranks, gpt2, names())
    return every_pipeline(prepared, replicas, ranks, rank, verbose=True)


def main() -> None:
    from tests.processes.sweep import sweep  # under the name by which other processes find it

    replicas, ranks = map(int, sys.argv[1:])
    with closing(Pool()) as pool:
        pool.launch(replicas * ranks, sweep, replicas, ranks, limit_s=1200)


if __name__ == "__main__":
    main()
