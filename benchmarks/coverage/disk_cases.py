"""Further architectures of `disk_zoo.py`, beside those of `zoo_cases.py`: mixtures of experts, encoder-decoders, and
models with tied weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.coverage.zoo_cases import (
    GROUPED,
    LATENT,
    LENGTH,
    ROWS,
    T5,
    TEXT,
    VOCABULARY,
    WAVE,
    Case,
    Draw,
    decoder,
    experts,
    seq2seq,
)


def tied(name: str, **config: Any) -> Case:
    return replace(decoder(name, **GROUPED, tie_word_embeddings=True, **config), family="decoder, tied")


def translated(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    """As many tokens as there are to read."""
    return {"input_ids": tokens(ROWS, LENGTH), "labels": tokens(ROWS, LENGTH)}


def heard(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    return {"input_values": numbers(ROWS, 2 * WAVE), "labels": tokens(ROWS, 6)}


GEMMA = {**TEXT, **GROUPED, "head_dim": 4, "num_hidden_layers": 2, "model_type": "t5_gemma_module"}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
GENERATED = {"decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 2}
CROSSED = {"is_decoder": True, "add_cross_attention": True}
SHORT_BERT = {**TEXT, "model_type": "bert", "num_hidden_layers": 2}
UNITS = {
    f"{part}_{what}": value
    for part in ("encoder", "decoder", "t2u_encoder", "t2u_decoder", "speech_encoder")
    for what, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
}

MORE_CASES: tuple[Case, ...] = (
    experts("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1),
    experts("glm4_moe", head_dim=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1),
    experts("granitemoeshared", shared_intermediate_size=16),
    experts("hunyuan_v1_moe", moe_topk=2, head_dim=4),
    experts("dots1", head_dim=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1),
    experts("deepseek_v2", **LATENT, n_group=1, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4),
    experts("flex_olmo"),
    experts("lfm2_moe", layer_types=["conv", "full_attention", "conv"], num_dense_layers=1),
    experts("minimax", head_dim=4, layer_types=["full_attention"] * 3),
    experts("minimax_m2", head_dim=4),
    experts("jetmoe", kv_channels=4, num_key_value_heads=2),
    experts("qwen3_next", head_dim=4, layer_types=["full_attention"] * 3),
    experts("afmoe", head_dim=4, num_dense_layers=1, num_shared_experts=1, layer_types=["full_attention"] * 3),
    experts("exaone_moe", head_dim=4, n_group=1, topk_group=1),
    tied("llama4_text"),
    tied("llama"),
    tied("mistral"),
    tied("qwen2"),
    tied("qwen3", head_dim=4),
    tied("olmo"),
    tied("olmo3", sliding_window=4),
    tied("exaone4", head_dim=4),
    tied("helium", head_dim=4),
    tied("seed_oss", head_dim=4),
    tied("ministral", head_dim=4),
    tied("arcee", head_dim=4),
    tied("ernie4_5", head_dim=4),
    Case("umt5", "encoder-decoder", "Seq2SeqLM", T5),
    Case("longt5", "encoder-decoder", "Seq2SeqLM", {**T5, "local_radius": 4}),
    seq2seq("bigbird_pegasus", attention_type="original_full"),
    seq2seq("blenderbot-small"),
    seq2seq("mvp"),
    seq2seq("plbart"),
    seq2seq("pegasus_x", num_global_tokens=2, block_size=4),
    Case(
        "dbrx",
        "mixture of experts",
        "CausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 32,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
        dtype=torch.float32,
    ),
    experts(
        "jamba", use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4
    ),
    experts("granitemoehybrid", **MAMBA, layer_types=["mamba", "attention", "mamba"], shared_intermediate_size=16),
    experts("glm4_moe_lite", **LATENT, n_group=1, topk_group=1, num_key_value_heads=4),
    experts(
        "longcat_flash",
        **LATENT,
        num_layers=2,
        ffn_hidden_size=32,
        expert_ffn_hidden_size=16,
        zero_expert_num=2,
        moe_topk=2,
        head_dim=4,
        num_key_value_heads=4,
    ),
    experts("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    experts("solar_open", head_dim=4),
    experts(
        "nemotron_h",
        layers_block_type=["mamba", "attention", "moe", "mamba"],
        head_dim=4,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=4,
        n_groups=1,
        chunk_size=4,
        use_mamba_kernels=False,
        moe_shared_expert_intermediate_size=16,
    ),
    experts("qwen3_5_moe_text", head_dim=8, layer_types=["full_attention"] * 3),
    experts("llama4_text", head_dim=4, interleave_moe_layer_step=1, intermediate_size_mlp=32, attention_chunk_size=16),
    seq2seq(
        "nllb-moe",
        num_experts=4,
        expert_capacity=16,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        router_dtype="float32",
    ),
    replace(  # it fills with float32's least number
        seq2seq("fsmt", src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY),
        dtype=torch.float32,
        inputs=translated,
    ),
    Case(
        "prophetnet",
        "encoder-decoder",
        "Seq2SeqLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            **{f"num_{part}_layers": 2 for part in ("encoder", "decoder")},
            **{f"num_{part}_attention_heads": 2 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
        },
        inputs=translated,  # of padded rows its loss is not a number
    ),
    Case("t5gemma", "encoder-decoder", "Seq2SeqLM", {"encoder": GEMMA, "decoder": GEMMA, "vocab_size": VOCABULARY}),
    Case(
        "encoder-decoder",
        "encoder-decoder",
        "Seq2SeqLM",
        {"encoder": SHORT_BERT, "decoder": {**SHORT_BERT, **CROSSED}, **GENERATED},
    ),
    Case(
        "seamless_m4t",
        "encoder-decoder",
        "Seq2SeqLM",
        {**TEXT, **UNITS, "speech_encoder_intermediate_size": 32, "decoder_start_token_id": 2, "t2u_vocab_size": 32},
        model="SeamlessM4TForTextToText",
    ),
    Case(
        "moonshine",
        "speech",
        "SpeechSeq2Seq",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 32,
            "pad_token_id": 0,
            **{f"{part}_num_hidden_layers": 2 for part in ("encoder", "decoder")},
            **{f"{part}_num_attention_heads": 2 for part in ("encoder", "decoder")},
        },
        inputs=heard,
    ),
)
