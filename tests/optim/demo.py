"""The demo's GPT, trained in one process with a barrier in the optimizer and without.

    python -m tests.optim.demo --steps 200

takes the demo's flags, and prints how many steps were clipped and whether all losses are equal in bits.
"""

from __future__ import annotations

import sys

from examples import train_gpt as demo
from zbfx.optim import PostValidated
from zbfx.optim.state import Counts

MAX_NORM = 0.6  # about as large as the norms of the demo's gradients


def losses(job: demo.Job, *, sync: bool) -> tuple[list[float], Counts]:
    step = demo.compiled(job, "zb-h1").run_local()
    inner = demo.new_optimizer(job, step.parameters())
    optimizer = PostValidated(inner, step, max_norm=MAX_NORM, sync=sync)
    found = []
    for ids, targets in demo.batches(job, demo.read_text()):
        found.append(step(ids, targets).item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.settle()
    return found, optimizer.counts


def main() -> None:
    job = demo.parse(sys.argv[1:])
    runs = {sync: losses(job, sync=sync) for sync in (True, False)}
    for sync, (found, counts) in runs.items():
        print(f"{'barrier' if sync else 'without'}: loss {found[0]:.6f} to {found[-1]:.6f}, {counts}")
    print(f"losses of all {job.steps} steps equal in bits: {runs[True][0] == runs[False][0]}")


if __name__ == "__main__":
    main()
