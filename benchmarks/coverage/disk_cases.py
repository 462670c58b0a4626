"""Further architectures of `disk_zoo.py`, beside those of `zoo_cases.py`: mixtures of experts, encoder-decoders, models
with tied weights, and models of text and images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.coverage.zoo_cases import (
    GROUPED,
    IMAGE_TOKEN,
    LATENT,
    T5,
    TEXT,
    VISION,
    Case,
    decoder,
    experts,
    seq2seq,
)

PATCHES = 16  # of a picture
TEXT_OF_IMAGES = {**TEXT, **GROUPED, "model_type": "llama", "max_position_embeddings": 64}
SEEN = {**VISION, "model_type": "clip_vision_model"}
SEEN_WHOLE = {**VISION, "model_type": "siglip_vision_model"}  # no token for the whole picture


def tied(name: str, **config: Any) -> Case:
    return replace(decoder(name, **GROUPED, tie_word_embeddings=True, **config), family="decoder, tied")


def looking(name: str, image_tokens: int = PATCHES, **config: Any) -> Case:
    """A model of text that looks at pictures."""
    given = {"text_config": TEXT_OF_IMAGES, "vision_config": SEEN, "image_token_id": IMAGE_TOKEN}
    chosen = {**given, "image_token_index": IMAGE_TOKEN, **config}
    return Case(name, "text and image", "ImageTextToText", chosen, image_tokens=image_tokens)


def paired(name: str, **config: Any) -> Case:
    """Text and pictures in one space."""
    chosen = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16, **config}
    return Case(name, "text and image", "ZeroShotImageClassification", chosen)


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
    looking("llava"),
    looking("vipllava", vision_feature_layers=[-2, -3]),
    looking("aya_vision", image_tokens=4, downsample_factor=2, vision_config=SEEN_WHOLE),
    looking("internvl", image_tokens=4, vision_config={**VISION, "model_type": "internvl_vision"}),
    looking(
        "paligemma",
        projection_dim=16,
        vision_config=SEEN_WHOLE,
        text_config={**TEXT_OF_IMAGES, "model_type": "gemma", "head_dim": 4},
    ),
    looking(
        "gemma3",
        image_tokens=4,
        mm_tokens_per_image=4,
        vision_config=SEEN_WHOLE,
        text_config={**TEXT_OF_IMAGES, "model_type": "gemma3_text", "head_dim": 4},
    ),
    looking(
        "cohere2_vision", image_tokens=4, vision_config=SEEN_WHOLE, downsample_factor=2, alignment_intermediate_size=32
    ),
    paired("siglip", vision_config=VISION),
    paired("chinese_clip"),
    paired("altclip", text_config={**TEXT, "project_dim": 16}),
    paired("clipseg"),
    paired("metaclip_2"),
    paired("blip"),
)
