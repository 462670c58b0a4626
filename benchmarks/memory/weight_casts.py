"""Casts of weights in a step under autocast, with prologues and without: how many, and how many bytes they write.

Run: python -m benchmarks.memory.weight_casts [--layers 16] [--hidden 2048] [--vocabulary 128256] [--microbatches 16]

The model is a Llama of transformers on the meta device, with float32 weights and bfloat16 computation, over two ranks.
Casts are counted in the graphs of phases, each as often as its phase runs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import zbfx
from zbfx._torch.operators import CAST
from zbfx.graphs import Phase, Role
from zbfx.passes.nodes import is_view, storage_owner, value_bytes
from zbfx.plan import Kind


@dataclass(frozen=True)
class Casts:
    """Casts of weights in one step of a pipeline: their number, and the bytes of their results."""

    count: int
    written_bytes: int


def weight_casts(pipe: zbfx.Pipeline) -> Casts:
    """The casts of parameters, or of views of them, that one step of the pipeline runs."""
    count = written_bytes = 0
    for stage in pipe.stages:
        for kind, phase in stage.phases.items():
            runs = 1 if kind is Kind.P else pipe.schedule.microbatches
            found = casts_in(phase)
            count += runs * len(found)
            written_bytes += runs * sum(map(value_bytes, found))
    return Casts(count, written_bytes)


def casts_in(phase: Phase) -> list[fx.Node]:
    inputs = phase.module.graph.find_nodes(op="placeholder")
    weights = {node for node, port in zip(inputs, phase.ports, strict=False) if port.role is Role.PARAMETER}
    casts = phase.module.graph.find_nodes(op="call_function", target=CAST)
    return [node for node in casts if storage_owner(node.args[0]) in weights and not is_view(node)]


def token_loss(output: Any, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())


def llama(layers: int, hidden: int, vocabulary: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, hidden // 64)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def compiled(
    layers: int, hidden: int, vocabulary: int, microbatches: int, tokens: int, *, prologue: bool
) -> zbfx.Pipeline:
    ids = torch.zeros(2, tokens, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return zbfx.compile(
            llama(layers, hidden, vocabulary),
            stages=2,
            microbatches=microbatches,
            example_inputs=(ids,),
            example_targets=ids,
            loss_fn=token_loss,
            schedule="zb-h2",
            check=False,
            prologue=prologue,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 16), ("hidden", 2048), ("vocabulary", 128256), ("microbatches", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=2048)
    asked = parser.parse_args()
    print("| Prologues | Casts of weights | GB written | GB held for them, by rank | Peak, GiB, by rank |")
    print("|---|---|---|---|---|")
    for prologue in (False, True):
        pipe = compiled(**vars(asked), prologue=prologue)
        casts = weight_casts(pipe)
        kept = ", ".join(f"{stage.kept_bytes / 1e9:.3g}" for stage in pipe.stages)
        peaks = ", ".join(f"{memory.peak_bytes / 2**30:.2f}" for memory in pipe.memory)
        print(
            f"| {'yes' if prologue else 'no'} | {casts.count:,} | {casts.written_bytes / 1e9:.3g} | {kept} | {peaks} |"
        )


if __name__ == "__main__":
    main()
