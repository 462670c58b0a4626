"""Fine-tune a causal language model of transformers over the ranks of a pipeline, from a folder into a folder.

    torchrun --nproc-per-node=2 --max-restarts=3 examples/finetune.py MODEL TEXT OUT [--lora 8] [--bf16]

MODEL is a folder of `save_pretrained`; TEXT a text that the folder's tokenizer reads, or a `.npy` of token numbers, of
which the last tenth is for evaluation. OUT gets checkpoints, losses (`losses.jsonl`) and the trained `model`; with
`--lora` its adapters. No process reads or holds more than its stages; at the end the first one gathers the model.

A process may be killed at any time: torchrun starts all again, with as many processes or others, and they go on from
the newest checkpoint, with the batches and losses of a run that nothing broke.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import zbfx

COLUMNS = (
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s  bubble {task.fields[bubble]:.1%}"),
    TimeRemainingColumn(),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank alone (package peft)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where autocast does")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1, help="of a microbatch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--schedule", default="zb-h1")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--evaluate-every", type=int, default=20, metavar="STEPS")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Text:
    """Rows of a text: `train` and `held_out` are token numbers."""

    train: Tensor
    held_out: Tensor
    length: int

    @classmethod
    def read(cls, options: argparse.Namespace) -> Text:
        if options.text.suffix == ".npy":
            tokens = torch.from_numpy(np.load(options.text).astype(np.int64))
        else:
            tokenizer = AutoTokenizer.from_pretrained(options.model)
            tokens = torch.tensor(tokenizer(options.text.read_text())["input_ids"])
        cut = len(tokens) * 9 // 10
        if len(tokens) - cut < options.length:
            raise SystemExit(f"{options.text} has {len(tokens)} tokens: too few for rows of {options.length}")
        return cls(tokens[:cut], tokens[cut:], options.length)

    def batch(self, step: int, rows: int) -> dict[str, Any]:
        """The rows of a step: the same in every process, and after a restart."""
        starts = torch.randint(
            len(self.train) - self.length + 1, (rows,), generator=torch.Generator().manual_seed(step)
        )
        return as_batch(self.train[starts[:, None] + torch.arange(self.length)])

    def evaluation(self, rows: int) -> list[dict[str, Any]]:
        """The held-out text once, but for what fills no batch of so many rows; at least one batch."""
        whole = self.held_out[: len(self.held_out) // self.length * self.length].view(-1, self.length)
        return [as_batch(part) for part in whole.split(rows) if len(part) == rows] or [
            as_batch(whole[:1].repeat(rows, 1))
        ]


def as_batch(rows: Tensor) -> dict[str, Any]:
    return {"input_ids": rows, "labels": rows}


def new_model(options: argparse.Namespace) -> Any:
    """The model, without memory: its ranks read their weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model, use_cache=False))
        if options.lora is None:
            return model
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=options.lora, lora_alpha=2 * options.lora))


def join(backend: str) -> None:
    """Meet the other processes. torchrun's store outlives a restart with all that was written into it, and addresses of
    processes that have ended are waited for: each start has names of its own."""
    told = os.environ
    store = dist.TCPStore(told["MASTER_ADDR"], int(told["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"start {told['TORCHELASTIC_RESTART_COUNT']} of {told['WORLD_SIZE']}", store)
    dist.init_process_group(backend, store=own, rank=int(told["RANK"]), world_size=int(told["WORLD_SIZE"]))


def forget_after(file: Path, count: int) -> None:
    """Take out what a run that was killed has told of steps after its last checkpoint: they come again."""
    lines = file.read_text().splitlines() if file.exists() else []
    entries = [(line, json.loads(line)) for line in lines if line.endswith("}")]  # the last one may be half written
    file.write_text("".join(f"{line}\n" for line, entry in entries if entry["step"] <= count))


def main() -> None:
    options = parse()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    join("nccl" if is_cuda else "gloo")
    text, model = Text.read(options), new_model(options)
    model.train()
    with torch.autocast(device.type, torch.bfloat16) if options.bf16 else nullcontext():
        pipe = zbfx.compile(
            model,
            stages=dist.get_world_size(),
            microbatches=options.microbatches,
            schedule=options.schedule,
            example_kwargs=text.batch(0, options.rows),
            device=device,
        )
    step = pipe.bind(weights=options.model, seed=0)
    adamw = torch.optim.AdamW(step.parameters(), lr=options.learning_rate)
    optimizer = zbfx.optim.PostValidated(adamw, step, max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    state: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler}
    checkpoints = options.out / "checkpoints"
    step.load(checkpoints, missing_ok=True, **state)

    rows = options.rows * options.microbatches
    held_out = text.evaluation(rows)
    is_first = dist.get_rank() == 0
    options.out.mkdir(parents=True, exist_ok=True)
    if is_first:
        forget_after(options.out / "losses.jsonl", step.count)
    with Progress(*COLUMNS, disable=not is_first) as progress, (options.out / "losses.jsonl").open("a") as losses:
        bubble = float(pipe.schedule.bubble_rate)
        bar = progress.add_task(
            "", total=options.steps, completed=step.count, loss=float("nan"), rate=0.0, bubble=bubble
        )

        def tell(**entry: float) -> None:
            if is_first:
                print(json.dumps({"step": step.count, **entry}), file=losses, flush=True)

        while step.count < options.steps:
            loss = float(step(**text.batch(step.count, rows)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            tell(loss=loss)
            rate = (progress.tasks[bar].speed or 0.0) * rows * options.length
            progress.update(bar, completed=step.count, loss=loss, rate=rate)
            if step.count % options.save_every == 0:
                step.save(checkpoints, keep=2, async_=True, frozen=options.lora is None, **state)
            if step.count % options.evaluate_every == 0 or step.count == options.steps:
                evaluated = [float(step.evaluate(**batch)) for batch in held_out]
                tell(held_out=sum(evaluated) / len(evaluated))
    if options.lora is None:
        step.export(options.out / "model")
    elif state_dict := step.full_state_dict():  # of the first process
        model.save_pretrained(options.out / "model", state_dict=state_dict)
    step.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
