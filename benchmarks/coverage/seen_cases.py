"""Further architectures of `disk_zoo.py`: models of text and images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.coverage.disk_cases import CROSSED, GENERATED, SHORT_BERT
from benchmarks.coverage.zoo_cases import (
    CLASSES,
    ENCODER_DECODER,
    GROUPED,
    IMAGE,
    IMAGE_TOKEN,
    LENGTH,
    ROWS,
    T5,
    TEXT,
    VISION,
    VOCABULARY,
    Case,
    Draw,
)

PATCHES = 16  # of a picture
TEXT_OF_IMAGES = {**TEXT, **GROUPED, "model_type": "llama", "max_position_embeddings": 64}
SEEN = {**VISION, "model_type": "clip_vision_model"}
SEEN_WHOLE = {**VISION, "model_type": "siglip_vision_model"}  # no token for the whole picture


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
    ids = {"input_ids": tokens(ROWS, LENGTH), "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long)}
    return {**ids, "visual_embeds": numbers(ROWS, 4, 12), "labels": answers}


QUERIED = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
QUERIED = {**QUERIED, "vocab_size": VOCABULARY, "encoder_hidden_size": 16, "cross_attention_frequency": 1}
WRITTEN = {**TEXT, "model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 2}
TOWERS = {"text_config": {**TEXT, "model_type": "bert"}, "vision_config": {**VISION, "model_type": "vit"}}
QUANTIZED = {
    "embed_dim": 8,
    "num_embeddings": 16,
    "latent_channels": 8,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
}
QUANTIZED |= {"num_patches": 16, "projection_dim": 16, "image_token_embed_dim": 16, "num_res_blocks": 1}

SEEN_CASES: tuple[Case, ...] = (
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
