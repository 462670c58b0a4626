"""Documents of unlike lengths, packed and not padded, by a collator of transformers, over two processes.

    python examples/packed.py

`DataCollatorWithFlattening` puts documents in a row, with positions that begin anew in each. A Llama of transformers
makes a block-diagonal mask of these: no document sees another. A microbatch is a pack of some documents, as long as
they are together, and a step has as many packs as its documents fill. The loss of every step must be that of the
documents one by one in plain PyTorch; the exit status is 0 if it is, and if the loss has come down.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository

import zbfx
from examples.tiny_lm import over_processes

VOCABULARY, RANKS, TOKENS = 61, 2, 48  # of a pack, at most
Document = list[int]
Pack = tuple[tuple[Tensor], dict[str, Tensor]]  # labels; what the model takes


def made_up(step: int) -> list[Document]:
    """The documents of a step, which count up by a number of their own."""
    random = Random(step)
    return [
        [(first + k * by) % VOCABULARY for k in range(random.choice((3, 5, 8, 13, 21, 34)))]
        for first, by in [(random.randrange(VOCABULARY), random.randint(1, 3)) for _ in range(random.randint(8, 14))]
    ]


def packs(documents: Sequence[Document]) -> list[Pack]:
    """The longest first, each into the first pack with room."""
    filled: list[list[Document]] = []
    for document in sorted(documents, key=len, reverse=True):
        room = next((pack for pack in filled if sum(map(len, pack)) + len(document) <= TOKENS), None)
        if room is None:
            filled.append([document])
        else:
            room.append(document)
    collate = DataCollatorWithFlattening()
    rows = [collate([{"input_ids": document} for document in pack]) for pack in filled]
    return [((row.pop("labels"),), row) for row in rows]


def loss_fn(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """By tokens. The collator's label of each document's first token is -100: nothing before it tells of it."""
    following = labels[:, 1:].flatten()
    total = F.cross_entropy(output["logits"][:, :-1].flatten(0, 1), following, ignore_index=-100, reduction="sum")
    return total, (following != -100).sum()


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def pipeline(model: nn.Module) -> zbfx.Pipeline:
    (labels,), inputs = packs(made_up(0))[0]
    return zbfx.compile(
        model, stages=RANKS, microbatches=4, example_kwargs=inputs, example_targets=labels, loss_fn=loss_fn
    )


def train(step: zbfx.runtime.step.Step, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(step.parameters(), lr=3e-3)
    losses = []
    for k in range(steps):
        optimizer.zero_grad()
        losses.append(step.run_split(packs(made_up(k))).item())
        optimizer.step()
    return losses


def train_plainly(model: nn.Module, steps: int) -> list[float]:
    """Each document by itself, in this process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for k in range(steps):
        optimizer.zero_grad()
        rows = [torch.tensor([document]) for document in made_up(k)]
        found = [loss_fn(model(input_ids=row), row) for row in rows]
        loss = torch.stack([total for total, _ in found]).sum() / sum(int(count) for _, count in found)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def train_rank(steps: int, file: str) -> None:
    step = pipeline(model_of()).bind(on_new_shape="symbolic")
    losses = train(step, steps)
    step.close()
    if torch.distributed.get_rank() == 0:
        torch.save(losses, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    plain = train_plainly(model_of(), steps)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/losses"
        over_processes(RANKS, train_rank, steps, file)
        packed = torch.load(file)
    for k, (one, other) in enumerate(zip(packed, plain, strict=True)):
        lengths = [inputs["input_ids"].shape[1] for _, inputs in packs(made_up(k))]
        print(f"step {k + 1:2}: loss {one:.4f}, document by document {other:.4f}; packs of {lengths} tokens")
    equal = all(abs(one - other) < 1e-4 * abs(other) for one, other in zip(packed, plain, strict=True))
    print("the losses of documents one by one" if equal else "OTHER LOSSES THAN DOCUMENTS ONE BY ONE")
    return 0 if equal and packed[-1] < 0.9 * packed[0] else 1


if __name__ == "__main__":
    sys.exit(main())
