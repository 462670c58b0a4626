"""Further architectures of `disk_zoo.py`, beside those of `zoo_cases.py`: mixtures of experts, encoder-decoders, models
with tied weights, and models of text and images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.coverage.zoo_cases import (
    CLASSES,
    ENCODER_DECODER,
    GROUPED,
    IMAGE,
    IMAGE_TOKEN,
    LATENT,
    LENGTH,
    ROWS,
    T5,
    TEXT,
    VISION,
    VOCABULARY,
    WAVE,
    Case,
    Draw,
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


def dual(name: str, model: str, **config: Any) -> Case:
    """As `paired`, of which the library has no automatic class."""
    return replace(paired(name, **config), model=model)


def captioned(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    return {"pixel_values": numbers(ROWS, 3, IMAGE, IMAGE), "labels": tokens(ROWS, 6)}


def instructed(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    """A picture of 4 tokens, and a text for what looks at it."""
    ids = torch.cat([torch.full((ROWS, 4), IMAGE_TOKEN), tokens(ROWS, LENGTH, least=4)], dim=1)
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    seen = {"pixel_values": numbers(ROWS, 3, IMAGE, IMAGE), "qformer_input_ids": tokens(ROWS, LENGTH)}
    return seen | {"input_ids": ids, "labels": labels}


def in_patches(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    """Rows of patches, each behind its row and column."""
    places = torch.cartesian_prod(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0)).expand(ROWS, -1, -1)
    return {"flattened_patches": torch.cat([places, numbers(ROWS, PATCHES, 12)], dim=2), "labels": tokens(ROWS, 6)}


def boxes(tokens: Draw) -> Tensor:
    corners = [tokens(ROWS, LENGTH, 2), VOCABULARY + tokens(ROWS, LENGTH, 2)]
    return torch.cat(corners, dim=2)


def page(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    """A text of which each word has a place on a page, and labels of words."""
    pixels, words = numbers(ROWS, 3, IMAGE, IMAGE), {"input_ids": tokens(ROWS, LENGTH), "bbox": boxes(tokens)}
    return {"pixel_values": pixels, "labels": tokens(ROWS, LENGTH, least=0) % CLASSES, **words}


def page_read(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    """A page as above, with places between 0 and 1, and a text to write."""
    found = page(tokens, numbers)
    return found | {"bbox": found["bbox"].to(found["pixel_values"].dtype) / 64, "labels": tokens(ROWS, 6)}


def regions(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    """A question about regions of a picture."""
    places = torch.sigmoid(numbers(ROWS, 4, 4))
    seen = {"visual_feats": numbers(ROWS, 4, 12), "visual_pos": places}
    return {"input_ids": tokens(ROWS, LENGTH), "labels": tokens(ROWS, least=0) % CLASSES, **seen}


def embedded(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    """A question about a picture whose regions another model has embedded, with how good each answer is."""
    answers = torch.softmax(numbers(ROWS, CLASSES), dim=1)
    ids = {"input_ids": tokens(ROWS, LENGTH), "attention_mask": torch.ones(ROWS, LENGTH + 4, dtype=torch.long)[:, 4:]}
    return {**ids, "visual_embeds": numbers(ROWS, 4, 12), "labels": answers}


def translated(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    """As many tokens as there are to read."""
    return {"input_ids": tokens(ROWS, LENGTH), "labels": tokens(ROWS, LENGTH)}


def heard(tokens: Draw, numbers: Draw) -> dict[str, Any]:
    return {"input_values": numbers(ROWS, 2 * WAVE), "labels": tokens(ROWS, 6)}


QUERIED = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
QUERIED = {**QUERIED, "vocab_size": VOCABULARY, "encoder_hidden_size": 16, "cross_attention_frequency": 1}
WRITTEN = {**TEXT, "model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 2}
TOWERS = {"text_config": {**TEXT, "model_type": "bert"}, "vision_config": {**VISION, "model_type": "vit"}}
GEMMA = {**TEXT, **GROUPED, "head_dim": 4, "num_hidden_layers": 2, "model_type": "t5_gemma_module"}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
GENERATED = {"decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 2}
CROSSED = {"is_decoder": True, "add_cross_attention": True}
SHORT_BERT = {**TEXT, "model_type": "bert", "num_hidden_layers": 2}
QUANTIZED = {
    "embed_dim": 8,
    "num_embeddings": 16,
    "latent_channels": 8,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
}
QUANTIZED |= {"num_patches": 16, "projection_dim": 16, "image_token_embed_dim": 16, "num_res_blocks": 1}
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
    looking("deepseek_vl", vision_config=SEEN_WHOLE),
    looking(
        "janus",
        vision_config={**VISION, "num_image_tokens": PATCHES, "projection_dim": 16, "mlp_ratio": 2},
        vq_config=QUANTIZED,
    ),
    looking(
        "got_ocr2",
        image_tokens=4,
        image_seq_length=4,
        text_config={**TEXT_OF_IMAGES, "model_type": "qwen2"},
        vision_config={
            **VISION,
            "output_channels": 16,
            "patch_size": 4,
            "window_size": 2,
            "global_attn_indexes": [1, 3],
            "mlp_dim": 32,
        },
    ),
    looking(
        "blip-2", image_tokens=4, num_query_tokens=4, qformer_config=QUERIED, vision_config=VISION, text_config=WRITTEN
    ),
    replace(
        looking("instructblip", num_query_tokens=4, qformer_config=QUERIED, vision_config=VISION, text_config=WRITTEN),
        inputs=instructed,
    ),
    Case("git", "text and image", "ImageTextToText", {**TEXT, "vision_config": VISION}),
    looking(
        "ovis2",
        vision_config={**VISION, "vocab_size": 16, "num_visual_indicator_tokens": 5},
        text_config={**TEXT_OF_IMAGES, "model_type": "qwen2"},
        visual_indicator_token_ids=[27, 28, 29, 30, 31],
        vocab_size=VOCABULARY,
        hidden_size=16,
    ),
    looking(
        "florence2",
        image_tokens=2,
        text_config={**ENCODER_DECODER, "model_type": "bart"},
        vision_config={
            "depths": [1, 1, 1, 1],
            "embed_dim": [8, 8, 16, 16],
            "num_heads": [1, 1, 2, 2],
            "num_groups": [1, 1, 2, 2],
            "window_size": 4,
            "drop_path_rate": 0.0,
            "projection_dim": 16,
        },
    ),
    replace(
        looking(
            "aria",
            image_tokens=4,
            text_config={
                **TEXT_OF_IMAGES,
                "model_type": "aria_text",
                "moe_num_experts": 4,
                "moe_num_shared_experts": 1,
            },
            vision_config={**VISION, "model_type": "idefics3_vision"},
            projector_patch_to_query_dict={PATCHES: 4},
        ),
        dtype=torch.float32,
    ),
    Case(
        "vision-encoder-decoder",
        "text and image",
        "ImageTextToText",
        {
            "encoder": {**VISION, "model_type": "vit", "num_hidden_layers": 2},
            "decoder": {**SHORT_BERT, **CROSSED},
            **GENERATED,
        },
        inputs=captioned,
    ),
    Case(
        "pix2struct",
        "text and image",
        "ImageTextToText",
        {
            "text_config": {**T5, "hidden_size": 16},
            "vision_config": {**VISION, "patch_embed_hidden_size": 12, "d_kv": 8, "d_ff": 32, "seq_len": PATCHES},
        },
        inputs=in_patches,
    ),
    paired(
        "align",
        vision_config={
            "image_size": IMAGE,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.5,
            "hidden_dim": 64,  # of which a quarter is left
            "in_channels": [32, 16],
            "out_channels": [16, 64],
            "kernel_sizes": [3, 3],
            "strides": [1, 2],
            "num_block_repeats": [1, 1],
            "expand_ratios": [1, 2],
        },
    ),
    dual(
        "bridgetower",
        "BridgeTowerForContrastiveLearning",
        hidden_size=64,  # as many heads as it has 64s
        num_attention_heads=2,
        num_hidden_layers=2,
        contrastive_hidden_size=16,
        logit_scale_init_value=2.6592,
        text_config={**TEXT, "hidden_size": 64, "num_hidden_layers": 2},
        vision_config={**VISION, "hidden_size": 64, "num_hidden_layers": 2},
    ),
    dual("vision-text-dual-encoder", "VisionTextDualEncoderModel", **TOWERS),
    dual(
        "groupvit",
        "GroupViTModel",
        projection_intermediate_dim=16,
        vision_config={
            **VISION,
            "depths": [2, 1, 1],
            "num_group_tokens": [8, 4, 0],
            "num_output_groups": [8, 4, 0],
        },
    ),
    Case(
        "layoutlmv3",
        "text and image",
        "TokenClassification",
        {
            **TEXT,
            **VISION,
            "input_size": IMAGE,
            "coordinate_size": 3,
            "shape_size": 2,
            "max_2d_position_embeddings": 80,
        },
        inputs=page,
    ),
    Case(
        "udop",
        "text and image",
        "Seq2SeqLM",
        {**T5, "image_size": IMAGE, "patch_size": 8, "max_2d_position_embeddings": 80},
        model="UdopForConditionalGeneration",
        inputs=page_read,
    ),
    Case(
        "visual_bert",
        "text and image",
        "QuestionAnswering",
        {**TEXT, "visual_embedding_dim": 12, "num_labels": CLASSES},
        model="VisualBertForQuestionAnswering",
        inputs=embedded,
    ),
    Case(
        "lxmert",
        "text and image",
        "QuestionAnswering",
        {
            **TEXT,
            "visual_feat_dim": 12,
            "num_qa_labels": CLASSES,
            "num_labels": CLASSES,
            "l_layers": 2,
            "x_layers": 1,
            "r_layers": 1,
        },
        model="LxmertForQuestionAnswering",
        inputs=regions,
    ),
)
