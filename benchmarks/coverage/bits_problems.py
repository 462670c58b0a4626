"""The models of `same_bits.py` by name: its own, and small ones of the transformers library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
from torch import Tensor

from benchmarks.coverage import bits_models as own
from benchmarks.coverage.bits_models import LENGTH, VOCABULARY, WIDTH, Maker, Problem, ids, next_tokens, numbers


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    """`token_loss` of what a model of the transformers library returns."""
    return own.token_loss(output.logits, targets)


def gpt2(rows: int) -> Problem:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=4, n_head=2)
    return next_tokens(GPT2LMHeadModel(config), rows, logits_loss)


# What the small models of the transformers library have in common.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


def llama(rows: int) -> Problem:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_hidden_layers=4, num_key_value_heads=2)
    return next_tokens(LlamaForCausalLM(config), rows, logits_loss)


def mixtral(rows: int) -> Problem:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2, **experts)
    return next_tokens(MixtralForCausalLM(config), rows, logits_loss)


def bert(rows: int) -> Problem:
    """Labels and a mask by keyword; the model computes its loss."""
    from transformers import BertConfig, BertForMaskedLM

    tokens, mask = ids(rows, LENGTH), torch.ones(rows, LENGTH, dtype=torch.long)
    mask[1::2, 4:] = 0
    labels = torch.where(ids(rows, LENGTH, limit=3, seed=2) == 0, tokens, -100)
    model = BertForMaskedLM(BertConfig(**SIZES, num_hidden_layers=4))
    return Problem(rows, model, None, kwargs={"input_ids": tokens, "attention_mask": mask, "labels": labels})


def t5(rows: int) -> Problem:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2
    )
    targets = ids(rows, LENGTH, seed=2)
    kwargs = {"input_ids": ids(rows, LENGTH), "decoder_input_ids": targets.roll(1, 1)}
    return Problem(rows, T5ForConditionalGeneration(config), logits_loss, targets=(targets,), kwargs=kwargs)


def vit(rows: int) -> Problem:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, hidden_dropout_prob=0.1))
    return Problem(rows, model, None, kwargs={"pixel_values": numbers(rows, 3, 8, 8), "labels": ids(rows, limit=2)})


MAKERS: tuple[Maker, ...] = (
    own.mlp,
    own.summed,
    own.dropout,
    own.batch_norm,
    own.double,
    own.frozen,
    own.gpt,
    own.tied,
    own.tied_dropout,
    own.cast_inside,
    own.cast_outside,
    own.mixed_dtypes,
    own.skips,
    own.shared_module,
    own.side_losses,
    own.several_outputs,
    own.trained_loss,
    own.written_buffers,
    own.recurrent,
    own.conv_group_norm,
    own.conv_batch_norm,
    own.encoder_decoder,
    gpt2,
    llama,
    mixtral,
    bert,
    t5,
    vit,
)
MODELS: Mapping[str, Maker] = {make.__name__.replace("_", "-"): make for make in MAKERS}


def problem(name: str, rows: int) -> Problem:
    """A model of `MODELS` with the parameters of seed 0, and a batch."""
    torch.manual_seed(0)
    return MODELS[name](rows)
