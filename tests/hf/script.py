"""A script of transformers' `Trainer`, which tests run with `Trainer` and with `PipelineTrainer`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

from zbfx.hf import PipelineTrainer

LENGTH = 12
STEPS = 20


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens of which some do not count, more in some rows than in others."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(0, 48, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.labels = self.tokens.clone()
        for row, labels in enumerate(self.labels):
            labels[: row % 5] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def arguments(folder: Path | str, **options: Any) -> transformers.TrainingArguments:
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 4,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 10,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(**(chosen | options))


def trainer(kind: type[Any], folder: Path | str, model: Any, options: dict[str, Any], **more: Any) -> Any:
    """65 rows: the last step of an epoch has fewer microbatches, the last of these fewer rows."""
    return kind(model, arguments(folder, **options), train_dataset=Rows(65, 1), eval_dataset=Rows(11, 2), **more)


def measured(found: transformers.EvalPrediction) -> dict[str, float]:
    """Metrics of all rows that were evaluated: how many tokens were foreseen, and how far logits spread."""
    logits, labels = torch.as_tensor(found.predictions), torch.as_tensor(found.label_ids)
    assert logits.shape == (*labels.shape, 48)
    counted = labels[:, 1:] != -100
    right = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"right": right[counted].double().mean().item(), "spread": logits.double().std().item()}


def history(run: Any) -> dict[str, list[float]]:
    """What was logged: by name, in the order of steps."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "eval_spread")
    return {name: [entry[name] for entry in run.state.log_history if name in entry] for name in names}


@contextmanager
def launched(rank: int, ranks: int) -> Iterator[None]:
    """What torchrun tells a process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 1}
    with patch.dict(os.environ, {name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "localhost"}):
        yield


def over_ranks(rank: int, ranks: int, folder: str) -> dict[str, list[float]]:
    """A scenario: the script with a pipeline over processes."""
    with launched(rank, ranks):
        options: dict[str, Any] = {"schedule": "zb-h1"}
        run = trainer(PipelineTrainer, folder, llama(), {}, compile_options=options, compute_metrics=measured)
        run.train()
        run.save_model(f"{folder}/final")
        assert run.step is not None
        run.step.close()
        return history(run)


def with_adapters() -> Any:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return peft.get_peft_model(llama(), config)


class Regression(nn.Module):
    """Its loss is a mean, whatever the number of items in the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = self.layers(x)[:, 0]
        loss = {} if labels is None else {"loss": nn.functional.mse_loss(found, labels)}
        return {**loss, "logits": found}


class Points(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum()}
