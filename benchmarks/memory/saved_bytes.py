"""What stages hold from F to B (M_B) and from B to W (M_W), at every level of recomputation.

    python benchmarks/memory/saved_bytes.py --out saved_bytes.jsonl

Small models in bfloat16 on the meta device, without dropout, cut into 4 stages. A row is one stage at one level:
bytes of a microbatch, and the same a layer in units of s b h (tokens of a microbatch times the hidden size) where the
stage has whole layers and nothing else; None where it also has embeddings or a head. Rows of a U-Net have bytes alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpt import GPT, GPTConfig, next_token_loss
from benchmarks.report import append_row, environment
from zbfx.costs import estimate
from zbfx.passes.canonicalize import canonicalize
from zbfx.passes.extract import extract
from zbfx.passes.partition import partition
from zbfx.passes.recompute import LEVELS, recompute
from zbfx.passes.split import split
from zbfx.trace.tracer import trace

STAGES, LAYERS = 4, 8  # as many layers a stage: 2
ROWS, SEQUENCE, HIDDEN, HEADS, VOCABULARY = 2, 128, 256, 4, 512
UNETS = (16, 32, 64)  # channels of its levels
PIXELS = 64


@dataclass(frozen=True)
class Example:
    """A model, what a microbatch is, where its stages begin; `sbh`: tokens times hidden size, None without tokens."""

    model: nn.Module
    loss_fn: Callable[..., Tensor] | None
    inputs: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    targets: tuple[Tensor, ...]
    cuts: tuple[str, ...]
    sbh: int | None


def tokens() -> Tensor:
    return torch.zeros(ROWS, SEQUENCE, dtype=torch.long)


def second_third_fourth(layers: str) -> tuple[str, ...]:
    return tuple(f"{layers}.{LAYERS // STAGES * k}" for k in range(1, STAGES))


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    return next_token_loss(output.logits, targets)


def gpt() -> Example:
    model = GPT(GPTConfig(LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY))
    cuts = second_third_fourth("blocks")
    return Example(model, next_token_loss, (tokens(),), {}, (tokens(),), cuts, ROWS * SEQUENCE * HIDDEN)


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    cuts = second_third_fourth("transformer.h")
    model = GPT2LMHeadModel(config)
    return Example(model, logits_loss, (tokens(),), {}, (tokens(),), cuts, ROWS * SEQUENCE * HIDDEN)


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    cuts = second_third_fourth("model.layers")
    model = LlamaForCausalLM(config)
    return Example(model, logits_loss, (tokens(),), {}, (tokens(),), cuts, ROWS * SEQUENCE * HIDDEN)


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    kwargs = {"input_ids": tokens(), "labels": tokens()}
    cuts = second_third_fourth("bert.encoder.layer")
    return Example(BertForMaskedLM(config), None, (), kwargs, (), cuts, ROWS * SEQUENCE * HIDDEN)


def vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        image_size=PIXELS,
        patch_size=8,
    )
    pixels = torch.zeros(ROWS, 3, PIXELS, PIXELS, dtype=torch.bfloat16)
    kwargs = {"pixel_values": pixels, "labels": torch.zeros(ROWS, dtype=torch.long)}
    patches = (PIXELS // 8) ** 2 + 1
    model = ViTForImageClassification(config)
    name = next(name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == LAYERS)
    return Example(model, None, (), kwargs, (), second_third_fourth(name), ROWS * patches * HIDDEN)


class Double(nn.Sequential):
    """Twice a convolution, a batch norm and a ReLU."""

    def __init__(self, before: int, after: int) -> None:
        parts = (
            part
            for first, second in ((before, after), (after, after))
            for part in (nn.Conv2d(first, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU())
        )
        super().__init__(*parts)


class UNet(nn.Module):
    """Down and up, with a skip connection at each of the upper levels."""

    def __init__(self, first: int, second: int, third: int) -> None:
        super().__init__()
        self.down_1, self.down_2, self.bottom = Double(3, first), Double(first, second), Double(second, third)
        self.up_2, self.up_1 = Double(third + second, second), Double(second + first, first)
        self.head = nn.Conv2d(first, 3, 1)

    def forward(self, x: Tensor) -> Tensor:  # (batch, 3, height, width) -> the same
        level_1 = self.down_1(x)
        level_2 = self.down_2(F.max_pool2d(level_1, 2))
        x = F.interpolate(self.bottom(F.max_pool2d(level_2, 2)), scale_factor=2.0)
        x = F.interpolate(self.up_2(torch.cat([x, level_2], 1)), scale_factor=2.0)
        return self.head(self.up_1(torch.cat([x, level_1], 1)))


def unet() -> Example:
    image = torch.zeros(ROWS, 3, PIXELS, PIXELS, dtype=torch.bfloat16)
    return Example(UNet(*UNETS), F.mse_loss, (image,), {}, (image,), ("down_2", "bottom", "up_1"), None)


MODELS = {"gpt": gpt, "gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "unet": unet}


def rows(name: str) -> Iterator[dict[str, Any]]:
    """A row for every level and stage of one model."""
    with torch.device("meta"):
        example = MODELS[name]()
        example.model.bfloat16()
    joint, _ = trace(
        example.model,
        example.loss_fn,
        example.inputs,
        example.kwargs,
        example.targets,
        device=torch.device("cpu"),
    )
    seconds = partial(estimate.node_s, hardware=estimate.CPU)
    link = estimate.CPU.link_bytes_per_s
    stages = range(STAGES)
    divided = split(partition(canonicalize(joint), stages, seconds=seconds, bytes_per_s=link, cuts=list(example.cuts)))
    for level in LEVELS:
        for stage in extract(recompute(divided, [level] * STAGES, in_flight=STAGES, random=True)):
            whole = example.sbh is not None and 0 < stage.index < STAGES - 1
            unit = (example.sbh or 0) * LAYERS // STAGES
            yield {
                "model": name,
                "recompute": str(level),
                "stage": stage.index,
                "m_b_bytes": stage.saved_bytes,
                "m_w_bytes": stage.weight_saved_bytes,
                "m_b_sbh": round(stage.saved_bytes / unit, 2) if whole else None,
                "m_w_sbh": round(stage.weight_saved_bytes / unit, 2) if whole else None,
            }


def table(found: Sequence[dict[str, Any]]) -> Table:
    """One line a model and level: KiB of every stage, and s b h bytes a layer of the second."""
    shown = Table("model", "recompute", "M_B of stages, KiB", "M_W of stages, KiB", "M_B, s b h a layer", "M_W")
    for name, level in dict.fromkeys((row["model"], row["recompute"]) for row in found):
        stages = [row for row in found if (row["model"], row["recompute"]) == (name, level)]
        sizes = [" ".join(f"{row[key] / 1024:.0f}" for row in stages) for key in ("m_b_bytes", "m_w_bytes")]
        layer = ["" if stages[1][key] is None else f"{stages[1][key]:g}" for key in ("m_b_sbh", "m_w_sbh")]
        shown.add_row(name, level, *sizes, *layer)
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=Path, help="append the rows, one JSON object a line")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    where = environment()
    found = [row for name in options.models for row in rows(name)]
    for row in found:
        if options.out:
            append_row(options.out, row | where)
        else:
            print(json.dumps(row | where))
    Console(width=140, stderr=True).print(table(found))


if __name__ == "__main__":
    main()
