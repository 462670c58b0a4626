"""The architectures of `model_zoo.py`: how the libraries build each one small, and a batch for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage import zoo_timm

ROWS, LENGTH, VOCABULARY = 2, 8, 32
IMAGE, WAVE, CLASSES = 32, 800, 2
IMAGE_TOKEN = 3

# What a small model of text has in common; a configuration ignores what it does not know.
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_channels": 3,
}
SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "pad_token_id": 0,
    "ctc_zero_infinity": True,
}
STAGES4 = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "num_channels": 3, "patch_size": 4}
GROUPED = {"num_key_value_heads": 2}

Draw = Callable[..., Tensor]  # random tensors of a shape


@dataclass(frozen=True)
class Case:
    """An architecture by its name in the library, what it is configured with, and the kind of batch that it takes."""

    architecture: str
    family: str
    head: str  # the library's automatic class: AutoModelFor<head>
    config: Mapping[str, Any] = field(default_factory=dict)
    train: bool = False  # in training mode: batch norms; the model has no dropout, or it is configured to 0
    dtype: torch.dtype = torch.float64
    model: str | None = None  # the library's class, where several fit `head`
    image_tokens: int = 0  # of a row: what a picture becomes
    inputs: Callable[[Draw, Draw], dict[str, Any]] | None = None  # from tokens and numbers: a batch of its own kind


def decoder(name: str, **config: Any) -> Case:
    return Case(name, "decoder", "CausalLM", {**TEXT, **config})


def encoder(name: str, **config: Any) -> Case:
    return Case(name, "encoder", "MaskedLM", {**TEXT, **config})


def seq2seq(name: str, **config: Any) -> Case:
    return Case(name, "encoder-decoder", "Seq2SeqLM", {**ENCODER_DECODER, **config})


def experts(name: str, **config: Any) -> Case:
    """Grouped matrix products exist in float32 only on a CPU."""
    moe = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    layers = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_hidden_layers": 3}
    return Case(
        name, "mixture of experts", "CausalLM", {**TEXT, **GROUPED, **moe, **layers, **config}, dtype=torch.float32
    )


def vision(name: str, **config: Any) -> Case:
    return Case(name, "vision", "ImageClassification", {**VISION, **config})


def pixels(name: str, **config: Any) -> Case:
    return Case(name, "vision", "ImageClassification", config)


def convolutions(name: str, **config: Any) -> Case:
    """A vision model with batch norms, in training mode."""
    return Case(name, "vision", "ImageClassification", config, train=True)


def speech(name: str, head: str = "CTC", **config: Any) -> Case:
    return Case(name, "speech", head, {**SPEECH, **config} if head == "CTC" else config)


def spoken(name: str, **config: Any) -> Case:
    """A model of raw audio with a classifier on top."""
    return Case(name, "speech", "AudioClassification", {**SPEECH, "classifier_proj_size": 8, **config})


def state_space(name: str, **config: Any) -> Case:
    return Case(name, "state space", "CausalLM", {**TEXT, **config})


XGLM = {"d_model": 16, "ffn_dim": 32, "num_layers": 4, "attention_heads": 4}
T5_EXPERTS = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
MAMBA_2 = {"num_heads": 8, "head_dim": 4, "n_groups": 1, "state_size": 8, "chunk_size": 4, "expand": 2}

CASES = (
    decoder("gpt2"),
    decoder("gpt_neo", num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=4),
    decoder("gptj", rotary_dim=4),
    decoder("gpt_neox"),
    decoder("gpt_bigcode"),
    decoder("codegen", rotary_dim=4),
    decoder("opt", ffn_dim=32, word_embed_proj_dim=16),
    decoder("bloom"),
    decoder("mpt", d_model=16, n_heads=4, n_layers=4, max_seq_len=32),
    decoder("llama", **GROUPED),
    decoder("mistral", **GROUPED, sliding_window=4),
    decoder("qwen2", **GROUPED),
    decoder("qwen3", **GROUPED, head_dim=4),
    decoder("gemma", **GROUPED, head_dim=4),
    decoder("gemma2", **GROUPED, head_dim=4, sliding_window=4),
    decoder("gemma3_text", **GROUPED, head_dim=4, sliding_window=4),
    decoder("phi", partial_rotary_factor=0.5),
    decoder("phi3", **GROUPED),
    decoder("falcon"),
    decoder("stablelm", **GROUPED),
    decoder("olmo2", **GROUPED),
    decoder("cohere", **GROUPED),
    decoder("granite", **GROUPED),
    decoder("starcoder2", **GROUPED),
    decoder("smollm3", **GROUPED),
    decoder("glm4", **GROUPED, head_dim=4),
    decoder("nemotron", **GROUPED),
    Case("xglm", "decoder", "CausalLM", {**TEXT, **XGLM}, dtype=torch.float32),  # fills with float32's least number
    decoder("biogpt"),
    decoder("openai-gpt"),
    encoder("bert"),
    encoder("roberta"),
    encoder("xlm-roberta"),
    encoder("albert", embedding_size=8),
    encoder("distilbert", dim=16, hidden_dim=32, n_layers=4, n_heads=4),
    encoder("electra", embedding_size=8),
    encoder("deberta"),
    encoder("deberta-v2", relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"]),
    encoder("mpnet"),
    encoder("modernbert", global_attn_every_n_layers=2, local_attention=4, cls_token_id=1, sep_token_id=2),
    encoder("convbert", embedding_size=8, conv_kernel_size=3),
    encoder("roformer", embedding_size=16),
    encoder("squeezebert", embedding_size=16, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2),
    encoder("mobilebert", embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8),
    encoder("nystromformer", num_landmarks=8, segment_means_seq_len=8, conv_kernel_size=3),
    encoder("esm", token_dropout=False, mask_token_id=3, position_embedding_type="rotary"),
    encoder("longformer", attention_window=4),
    Case("t5", "encoder-decoder", "Seq2SeqLM", T5),
    Case("mt5", "encoder-decoder", "Seq2SeqLM", T5),
    seq2seq("bart"),
    seq2seq("mbart"),
    seq2seq("pegasus"),
    seq2seq("marian"),
    seq2seq("m2m_100"),
    seq2seq("blenderbot"),
    seq2seq("led", max_encoder_position_embeddings=32, max_decoder_position_embeddings=32, attention_window=4),
    experts("mixtral"),
    experts("qwen2_moe"),
    experts("qwen3_moe", head_dim=4),
    experts("olmoe"),
    experts("granitemoe"),
    experts("phimoe"),
    experts("deepseek_v3", **LATENT, n_group=2, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4),
    experts("gpt_oss", head_dim=4, sliding_window=4),
    Case("switch_transformers", "mixture of experts", "Seq2SeqLM", {**T5, **T5_EXPERTS}),
    vision("vit"),
    Case("deit", "vision", "ImageClassification", VISION, model="DeiTForImageClassification"),
    vision("beit"),
    vision("dinov2"),
    vision("dinov2_with_registers"),
    vision("siglip", vision_config=VISION),
    pixels("swin", embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2, patch_size=4, image_size=IMAGE),
    pixels("swinv2", embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2, patch_size=4, image_size=IMAGE),
    pixels("convnext", **STAGES4),
    pixels("convnextv2", **STAGES4),
    pixels("pvt", **STAGES4 | {"num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2], "image_size": IMAGE}),
    Case(
        "segformer",
        "vision",
        "SemanticSegmentation",
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    convolutions("resnet", embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 2, 1], layer_type="basic"),
    convolutions("regnet", embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 2, 1], groups_width=8),
    convolutions("mobilenet_v2", depth_multiplier=0.25, image_size=IMAGE, classifier_dropout_prob=0.0),
    speech("wav2vec2"),
    spoken("hubert"),
    spoken("wavlm", num_buckets=8, max_bucket_distance=16),
    spoken("unispeech"),
    spoken("sew", squeeze_factor=2),
    speech(
        "whisper", "SpeechSeq2Seq", **ENCODER_DECODER, num_mel_bins=4, max_source_positions=8, max_target_positions=16
    ),
    speech(
        "speech_to_text",
        "SpeechSeq2Seq",
        **ENCODER_DECODER,
        input_feat_per_channel=4,
        conv_channels=8,
        num_conv_layers=1,
        conv_kernel_sizes=[3],
        max_source_positions=16,
        max_target_positions=16,
    ),
    Case(
        "audio-spectrogram-transformer",
        "speech",
        "AudioClassification",
        {**VISION, "max_length": 16, "num_mel_bins": 8, "patch_size": 4, "frequency_stride": 4, "time_stride": 4},
    ),
    state_space("mamba", state_size=4, time_step_rank=4),
    state_space("mamba2", **MAMBA_2),
    state_space("falcon_mamba", state_size=4, time_step_rank=4),
    state_space(
        "bamba",
        **GROUPED,
        mamba_n_heads=8,
        mamba_d_head=4,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=4,
        attn_layer_indices=[1],
    ),
    state_space(
        "recurrent_gemma",
        **GROUPED,
        lru_width=16,
        head_dim=4,
        attention_window_size=4,
        block_types=["recurrent", "attention"],
    ),
    Case("rwkv", "state space", "CausalLM", {**TEXT, "attention_hidden_size": 16, "context_length": 16}, train=True),
    Case(
        "clip",
        "text and image",
        "ZeroShotImageClassification",
        {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16},
    ),
)


# Models of timm, where it is installed.
TIMM_CASES = tuple(
    Case(name, "vision (timm)", "timm", train=name not in zoo_timm.ILL_CONDITIONED) for name in zoo_timm.MODELS
)


def model_of(case: Case) -> nn.Module:
    """The library's model, with random weights."""
    import transformers

    if case.head == "timm":
        return zoo_timm.build(case.architecture, CLASSES).to(case.dtype).train(case.train)
    config = transformers.AutoConfig.for_model(case.architecture, **case.config)
    if case.model is not None:
        model = getattr(transformers, case.model)(config)
    else:
        model = getattr(transformers, f"AutoModelFor{case.head}").from_config(config)
    if not products_of_groups_are_operators():
        model.set_experts_implementation("batched_mm")
    return model.to(case.dtype).train(case.train)


def products_of_groups_are_operators() -> bool:
    """Whether this version of transformers multiplies groups of float32 by operators, in the backward too: 5.17 reads
    the sizes of groups there, as Python's numbers."""
    from transformers.integrations import moe

    return "def _grouped_mm_fallback_backward_fake" in inspect.getsource(moe)


def batch_of(case: Case, model: nn.Module, seed: int) -> dict[str, Any]:
    """One microbatch as the model's keyword arguments, labels included."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int, least: int = 3) -> Tensor:
        return torch.randint(least, VOCABULARY, shape, generator=generator)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=case.dtype)

    if case.inputs is not None:
        return case.inputs(tokens, numbers)
    classes = getattr(getattr(model, "config", None), "num_labels", CLASSES)
    match case.head:
        case "timm":
            size = zoo_timm.image_size(case.architecture)
            labels = torch.randint(classes, (ROWS,), generator=generator)
            return {"pixel_values": numbers(ROWS, 3, size, size), "labels": labels}
        case "CausalLM":
            ids = tokens(ROWS, LENGTH)
            return {"input_ids": ids, "labels": ids}
        case "MaskedLM":
            ids, mask = tokens(ROWS, LENGTH), torch.ones(ROWS, LENGTH, dtype=torch.long)
            mask[1, LENGTH - 1 - seed :] = 0
            labels = torch.where((tokens(ROWS, LENGTH) < VOCABULARY // 2) & (mask == 1), ids, -100)
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}
        case "Seq2SeqLM":
            mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
            mask[1, LENGTH - 1 - seed :] = 0
            return {"input_ids": tokens(ROWS, LENGTH), "attention_mask": mask, "labels": tokens(ROWS, LENGTH - 2)}
        case "ImageClassification":
            labels = torch.randint(classes, (ROWS,), generator=generator)
            return {"pixel_values": numbers(ROWS, 3, IMAGE, IMAGE), "labels": labels}
        case "SemanticSegmentation":
            labels = torch.randint(classes, (ROWS, IMAGE, IMAGE), generator=generator)
            return {"pixel_values": numbers(ROWS, 3, IMAGE, IMAGE), "labels": labels}
        case "ZeroShotImageClassification":
            pixels = numbers(ROWS, 3, IMAGE, IMAGE)
            return {"input_ids": tokens(ROWS, LENGTH), "pixel_values": pixels, "return_loss": True}
        case "ImageTextToText":
            ids = torch.cat([torch.full((ROWS, case.image_tokens), IMAGE_TOKEN), tokens(ROWS, LENGTH, least=4)], dim=1)
            pixels = numbers(ROWS, 3, IMAGE, IMAGE)
            return {"input_ids": ids, "pixel_values": pixels, "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100)}
        case "CTC":
            return {"input_values": numbers(ROWS, WAVE), "labels": tokens(ROWS, 4)}
        case "AudioClassification":
            labels = torch.randint(classes, (ROWS,), generator=generator)
            is_raw = "conv_dim" in case.config
            return {"input_values": numbers(ROWS, WAVE) if is_raw else numbers(ROWS, 16, 8), "labels": labels}
        case "SpeechSeq2Seq":
            if case.architecture == "whisper":
                return {"input_features": numbers(ROWS, 4, 16), "labels": tokens(ROWS, 6)}
            return {"input_features": numbers(ROWS, 16, 4), "labels": tokens(ROWS, 6)}
    raise AssertionError(f"no batch for {case.head}")
