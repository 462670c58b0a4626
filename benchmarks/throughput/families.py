"""Unmodified models of the transformers library at the sizes that people train, for benchmarks on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A model, its batches, and how plain PyTorch compiles it: block by block, with its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.device], Batch]  # of so many rows
    rows: int  # of a microbatch
    cut: str  # the submodule that begins the second of two stages
    blocks: Callable[[nn.Module], Sequence[nn.Module]]

    def compiled(self, model: Any) -> None:
        """Compile the blocks and the loss in place, as a training script does; hooks of the blocks are not compiled."""
        for block in self.blocks(model):
            block.forward = torch.compile(block.forward)
        model.loss_function = torch.compile(model.loss_function)


def language_batch(vocabulary: int, length: int) -> Callable[[int, torch.device], Batch]:
    def made(rows: int, device: torch.device) -> Batch:
        generator = torch.Generator().manual_seed(rows)
        ids = torch.randint(vocabulary, (rows, length), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids}

    return made


def image_batch(size: int, labels: int) -> Callable[[int, torch.device], Batch]:
    def made(rows: int, device: torch.device) -> Batch:
        generator = torch.Generator().manual_seed(rows)
        pixels = torch.randn(rows, 3, size, size, generator=generator).to(device)
        return {"pixel_values": pixels, "labels": torch.randint(labels, (rows,), generator=generator).to(device)}

    return made


def decoder(
    build: Callable[[Mapping[str, Any]], nn.Module], layers: int, vocabulary: int, length: int, **sizes: Any
) -> Family:
    """A language model with a tied head and 8 heads of keys and values, which `build` makes of its sizes."""
    whole = {
        "num_hidden_layers": layers, "num_key_value_heads": 8, "vocab_size": vocabulary, "tie_word_embeddings": True,
        "max_position_embeddings": length, "use_cache": False, **sizes,
    }  # fmt: skip
    cut = f"model.layers.{layers // 2}"
    return Family(lambda: build(whole), language_batch(vocabulary, length), 2, cut, layers_of)


def llama(layers: int = 16, hidden: int = 2048, vocabulary: int = 128256, length: int = 2048) -> Family:
    """The shape of Llama-3.2-1B: 1.24B parameters."""

    def build(sizes: Mapping[str, Any]) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**sizes))

    own = {"intermediate_size": 4 * hidden, "num_attention_heads": 32, "head_dim": hidden // 32}
    return decoder(build, layers, vocabulary, length, hidden_size=hidden, **own)


def qwen3(layers: int = 16, hidden: int = 2048, vocabulary: int = 151936, length: int = 2048) -> Family:
    """A Qwen3 of 1.1B parameters, with norms of heads."""

    def build(sizes: Mapping[str, Any]) -> nn.Module:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        return Qwen3ForCausalLM(Qwen3Config(**sizes))

    own = {"intermediate_size": 3 * hidden, "num_attention_heads": 16, "head_dim": hidden // 16}
    return decoder(build, layers, vocabulary, length, hidden_size=hidden, **own)


def vit(layers: int = 24, hidden: int = 1024, size: int = 224) -> Family:
    """ViT-L/16: 304M parameters."""

    def build() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config: dict[str, Any] = {
            "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64, "image_size": size, "patch_size": 16, "num_labels": 1000,
        }  # fmt: skip
        return ViTForImageClassification(ViTConfig(**config))

    with torch.device("meta"):
        names = [name for name, module in build().named_modules() if type(module).__name__.endswith("Layer")]
    return Family(build, image_batch(size, 1000), 128, names[layers // 2], lambda model: modules_named(model, names))


def layers_of(model: Any) -> Sequence[nn.Module]:
    return list(model.model.layers)


def modules_named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    return [model.get_submodule(name) for name in names]


FAMILIES: Mapping[str, Callable[[], Family]] = {"llama": llama, "qwen3": qwen3, "vit": vit}
TINY: Mapping[str, Callable[[], Family]] = {
    "llama": lambda: llama(4, 64, 96, 16),
    "qwen3": lambda: qwen3(4, 64, 96, 16),
    "vit": lambda: vit(4, 64, 32),
}
