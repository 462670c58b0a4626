"""Models of the transformers library on the meta device, and others, that tests fill from disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import zbfx

VOCABULARY = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "use_cache": False,
}


def tied_llama() -> Any:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    """Files have a tensor for each expert, the model one for all."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=3,
        n_head=2,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


class Table(nn.Module):
    """Has a table that no file holds."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.register_buffer("table", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.uniform_(0.5, 1.5)
            self.table.copy_(torch.linspace(-1.0, 1.0, len(self.table)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.table


def plain() -> nn.Module:
    """Tied weights, a table, statistics that forwards write, and a parameter that nothing reads."""
    model = nn.Sequential(
        nn.Linear(6, 6), Table(6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 6), Table(6), nn.Tanh(), nn.Linear(6, 6)
    )
    model[7].weight = model[0].weight
    model.register_parameter("unread", nn.Parameter(torch.full((3,), 2.0)))
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def tokens(rows: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(seed))


def language_pipe(model: nn.Module, stages: int, **options: Any) -> zbfx.Pipeline:
    """Two microbatches of two rows."""
    example = {"input_ids": tokens(2), "labels": tokens(2)}
    return zbfx.compile(model, stages=stages, microbatches=2, example_kwargs=example, check=False, **options)


def plain_pipe(
    model: nn.Module, stages: int, microbatches: int = 2, example: Tensor | None = None, **options: Any
) -> zbfx.Pipeline:
    rows = torch.zeros(2, 6) if example is None else example
    return zbfx.compile(
        model,
        stages=stages,
        microbatches=microbatches,
        loss_fn=F.mse_loss,
        example_inputs=(rows,),
        example_targets=rows,
        check=False,
        **options,
    )


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, under each of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of tensors that are not equal in bits, or that only one of the two has."""
    return [
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not same_bits(found[name], expected[name])
    ]


def same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return one.is_meta or torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
