"""Group relative policy optimization: a policy learns from rewards of what it has sampled, over two processes.

    python examples/grpo.py

Each round hands the weights to a model that samples answers, scores them, takes the log-probabilities of the policy
before its steps from a pass of `step.forward`, and makes two steps on them. A frozen reference in the same module
keeps the policy near. Rewards are made up: the share of even tokens. The run over processes must have the losses and
metrics of the run in this process, bit for bit; the exit status is 0 if it does, and if the reward has risen. (Shao et
al. 2024, arXiv:2402.03300.) It ends with the memory that log-probabilities of a vocabulary of 128,256 take.
"""

from __future__ import annotations

import argparse
import copy
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository

import zbfx
from examples.tiny_lm import TinyLM, WithReference, chunked_log_probs, over_processes

VOCABULARY, LENGTH, PROMPT = 61, 16, 4
RANKS, MICROBATCHES, PROMPTS, GROUP = 2, 4, 8, 8  # prompts of a round, answers to each
CLIP, KL, STEPS_A_ROUND = 0.2, 0.05, 2


def loss_fn(output: dict[str, Tensor], old: Tensor, advantages: Tensor) -> Any:
    """The clipped objective of each sampled token and its distance from the reference, as (sum, count) over tokens."""
    new, reference = (output[name][:, PROMPT - 1 :] for name in ("policy", "reference"))
    ratio, gap = (new - old[:, PROMPT - 1 :]).exp(), reference - new
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    distance = gap.exp() - gap - 1
    count = torch.ones_like(old[:, PROMPT - 1 :]).sum()  # of answers that end early, a mask would count
    metrics = {
        "kl": (distance.sum(), count),
        "clipped": (((ratio - 1).abs() > CLIP).sum(), count),
        "largest ratio": zbfx.Metric(ratio.amax(), "max"),
    }
    return ((KL * distance - gain).sum(), count), metrics


def models(dtype: torch.dtype = torch.float32) -> WithReference:
    torch.manual_seed(0)
    policy = TinyLM(VOCABULARY, length=LENGTH)
    return WithReference(policy, copy.deepcopy(policy)).to(dtype)


def pipeline(model: WithReference) -> zbfx.Pipeline:
    rows, dtype = PROMPTS * GROUP // MICROBATCHES, model.policy.head.weight.dtype
    ids, old = torch.zeros(rows, LENGTH, dtype=torch.long), torch.zeros(rows, LENGTH - 1, dtype=dtype)
    return zbfx.compile(
        model,
        stages=RANKS,
        microbatches=MICROBATCHES,
        example_inputs=(ids,),
        example_targets=(old, old[:, 0]),
        loss_fn=loss_fn,
        schedule="zb-h1",
    )


def sampled(state: dict[str, Tensor], turn: int) -> tuple[Tensor, Tensor]:
    """Answers of the policy to made-up prompts, and their rewards. A serving engine would do this, elsewhere."""
    own = {name.removeprefix("policy."): value for name, value in state.items() if name.startswith("policy.")}
    sampler = TinyLM(VOCABULARY, length=LENGTH).to(next(iter(own.values())).dtype)
    sampler.load_state_dict(own)
    generator = torch.Generator().manual_seed(turn)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=generator).repeat_interleave(GROUP, 0)
    ids = sampler.generate(prompts, LENGTH, generator)
    return ids, (ids[:, PROMPT:] % 2 == 0).to(next(iter(own.values())).dtype).mean(-1)


def train(step: zbfx.runtime.step.Step, rounds: int) -> list[dict[str, float]]:
    """The loss and the metrics of each step, and the mean reward of its round."""
    optimizer = torch.optim.AdamW(step.parameters(), lr=2e-3)
    found = []
    for turn in range(rounds):
        ids, rewards = sampled(step.full_state_dict(everywhere=True), turn)
        groups = rewards.view(PROMPTS, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        old = step.forward(ids, outputs="policy", everywhere=True)
        for _ in range(STEPS_A_ROUND):
            optimizer.zero_grad()
            loss = step(ids, old, advantages)
            optimizer.step()
            metrics = {name: value.item() for name, value in step.metrics.items()}
            found.append({"loss": loss.item(), "reward": rewards.mean().item()} | metrics)
    return found


def train_rank(rounds: int, file: str) -> None:
    step = pipeline(models()).bind()
    found = train(step, rounds)
    step.close()
    if torch.distributed.get_rank() == 0:
        torch.save(found, file)


def show_peak(tokens: int = 4096, vocabulary: int = 128_256, width: int = 64, chunk: int = 128) -> None:
    """How much the process's memory grows for log-probabilities of a large vocabulary."""
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunked_log_probs(hidden, weight, torch.zeros(tokens, dtype=torch.long), chunk)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"log-probabilities of {tokens} tokens of {vocabulary:,}: {grown:.0f} MiB more, in chunks of {chunk} tokens; "
        f"all logits in float32 are {tokens * vocabulary * 4 / 2**20:.0f} MiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    alone = train(pipeline(models()).run_local(), rounds)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/losses"
        over_processes(RANKS, train_rank, rounds, file)
        together = torch.load(file)
    for k, row in enumerate(together):
        print(f"step {k + 1:2}: " + ", ".join(f"{name} {value:.4f}" for name, value in row.items()))
    print("the same in one process, bit for bit" if together == alone else "OTHER NUMBERS THAN IN ONE PROCESS")
    show_peak()
    return 0 if together == alone and together[-1]["reward"] > together[0]["reward"] + 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
