"""Direct preference optimization: a policy learns from pairs of answers, beside a frozen reference, over two processes.

    python examples/dpo.py

Policy and reference are one module, cut together over the ranks; the reference has no backward. The pairs are made up:
of two answers, the one with more small tokens is preferred. The run over processes must have the losses and metrics of
the run in this process, bit for bit; the exit status is 0 if it does, and if the policy has come to prefer most of
what it should. (Rafailov et al. 2023, arXiv:2305.18290.)
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository

import zbfx
from examples.tiny_lm import TinyLM, WithReference, over_processes

BETA, VOCABULARY, LENGTH, PROMPT = 0.5, 61, 16, 4
RANKS, MICROBATCHES, PAIRS = 2, 4, 4  # pairs of a microbatch: one after the other, the preferred answer first


def made_up(step: int) -> Tensor:
    """A batch of pairs, (2 * pairs, length): even rows are preferred to the odd rows after them, with one prompt."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (2 * PAIRS * MICROBATCHES, LENGTH), generator=generator)
    good, bad = ids[::2], ids[1::2]
    bad[:, :PROMPT] = good[:, :PROMPT]
    good[:, PROMPT:] //= 2
    return ids


def loss_fn(output: dict[str, Tensor]) -> Any:
    """-log sigmoid of how much more the policy prefers the better answer than the reference does, and metrics."""
    answers = {name: log_probs[:, PROMPT - 1 :].sum(-1) for name, log_probs in output.items()}
    gain = BETA * (answers["policy"] - answers["reference"])
    margin = gain[::2] - gain[1::2]
    metrics = {
        "accuracy": ((margin > 0).sum(), torch.ones_like(margin).sum()),
        "margin": margin.mean(),
        "largest margin": zbfx.Metric(margin.amax(), "max"),
        "pairs": zbfx.Metric((margin == margin).sum(), "sum"),
    }
    return -F.logsigmoid(margin).mean(), metrics


def pair_of_models(dtype: torch.dtype = torch.float32) -> WithReference:
    torch.manual_seed(0)
    policy = TinyLM(VOCABULARY, length=LENGTH)
    return WithReference(policy, copy.deepcopy(policy)).to(dtype)


def pipeline(model: WithReference) -> zbfx.Pipeline:
    example = (made_up(0)[: 2 * PAIRS],)
    return zbfx.compile(
        model, stages=RANKS, microbatches=MICROBATCHES, example_inputs=example, loss_fn=loss_fn, schedule="zb-h1"
    )


def train(step: zbfx.runtime.step.Step, steps: int) -> list[dict[str, float]]:
    """The loss and the metrics of each step."""
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
    found = []
    for k in range(steps):
        optimizer.zero_grad()
        loss = step(made_up(k))
        optimizer.step()
        found.append({"loss": loss.item()} | {name: value.item() for name, value in step.metrics.items()})
    return found


def train_rank(steps: int, file: str) -> None:
    step = pipeline(pair_of_models()).bind()
    found = train(step, steps)
    step.close()
    if torch.distributed.get_rank() == 0:
        torch.save(found, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    pipe = pipeline(pair_of_models())
    print(pipe.schedule)
    alone = train(pipe.run_local(), steps)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/losses"
        over_processes(RANKS, train_rank, steps, file)
        together = torch.load(file)
    for k, row in enumerate(together):
        print(f"step {k + 1:2}: " + ", ".join(f"{name} {value:.4f}" for name, value in row.items()))
    print("the same in one process, bit for bit" if together == alone else "OTHER NUMBERS THAN IN ONE PROCESS")
    return 0 if together == alone and together[-1]["accuracy"] > 0.7 else 1


if __name__ == "__main__":
    sys.exit(main())
