"""Small models for the tests, each with a loss and a batch of random data: what a user would hand to `zbfx.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTConfig

ROWS = 2  # rows of a microbatch


@dataclass(frozen=True)
class Problem:
    """A model with its loss, and a full batch cut along dimension 0: `targets` go to the loss."""

    model: nn.Module
    loss_fn: Callable[..., Tensor] | None
    inputs: tuple[Any, ...] = ()
    targets: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Maker = Callable[[int], Problem]  # number of microbatches -> a problem, the same every time


def squares(output: Tensor) -> Tensor:
    """A loss without targets."""
    return (output * output).mean()


def mean_squares(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in the precision of the logits: (batch, sequence, vocabulary), (batch, sequence) -> scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.get_default_dtype())


def ids(*shape: int, vocabulary: int, seed: int = 1) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def gpt(microbatches: int) -> Problem:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, hidden=16, heads=2, sequence=8, vocabulary=24))
    tokens = ids(ROWS * microbatches, 9, vocabulary=24)
    return Problem(model, token_loss, (tokens[:, :-1],), (tokens[:, 1:],))


def mlp(microbatches: int, width: int = 8, layers: int = 6) -> Problem:
    torch.manual_seed(0)
    blocks = [block for _ in range(layers) for block in (nn.Linear(width, width), nn.Tanh())]
    rows = ROWS * microbatches
    return Problem(nn.Sequential(*blocks), mean_squares, (numbers(rows, width),), (numbers(rows, width, seed=2),))


def mixed(microbatches: int) -> Problem:
    """Three layers with a buffer that is written, dropout, and a frozen weight."""
    torch.manual_seed(0)
    norm, dropout = nn.BatchNorm1d(6), nn.Dropout(0.1)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh(), nn.Linear(6, 6), dropout, nn.Tanh(), nn.Linear(6, 6))
    model[0].weight.requires_grad_(False)
    rows = ROWS * microbatches
    return Problem(model, mean_squares, (numbers(rows, 6),), (numbers(rows, 6, seed=2),))


class Mirrored(nn.Module):
    """Layers down and up again; each one's output skips to its mirror, over all stages between them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skipped.append(x)
        for layer in self.up:
            x = torch.tanh(layer(x + skipped.pop()))
        return x


def mirrored(microbatches: int, width: int = 6, depth: int = 4) -> Problem:
    torch.manual_seed(0)
    rows = ROWS * microbatches
    return Problem(Mirrored(width, depth), mean_squares, (numbers(rows, width),), (numbers(rows, width, seed=2),))


class ConvBlock(nn.Module):
    def __init__(self, before: int, after: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm = norm(after)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Three levels down and up; every level's output skips to its mirror on the way up."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.down_1, self.down_2 = ConvBlock(2, 4, norm), ConvBlock(4, 8, norm)
        self.bottom = ConvBlock(8, 8, norm)
        self.expand = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.up_2, self.up_1 = ConvBlock(16, 4, norm), ConvBlock(8, 4, norm)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        level_1 = self.down_1(x)
        level_2 = self.down_2(F.max_pool2d(level_1, 2))
        x = self.expand(self.bottom(F.max_pool2d(level_2, 2)))
        x = self.up_2(torch.cat([x, level_2], dim=1))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.head(self.up_1(torch.cat([x, level_1], dim=1)))


def unet(microbatches: int, norm: Callable[[int], nn.Module]) -> Problem:
    torch.manual_seed(0)
    rows = ROWS * microbatches
    return Problem(UNet(norm), mean_squares, (numbers(rows, 2, 8, 8),), (numbers(rows, 2, 8, 8, seed=2),))


def unet_group_norm(microbatches: int) -> Problem:
    return unet(microbatches, lambda channels: nn.GroupNorm(2, channels))


def unet_batch_norm(microbatches: int) -> Problem:
    return unet(microbatches, nn.BatchNorm2d)


def encoder_decoder(microbatches: int) -> Problem:
    """torch's own Transformer: the encoder's output is read by every decoder layer."""
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
    rows = ROWS * microbatches
    source, target = numbers(rows, 5, 8), numbers(rows, 4, 8, seed=2)
    return Problem(model, mean_squares, (source, target), (numbers(rows, 4, 8, seed=3),))


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    """`token_loss` of what a transformers model returns (its own loss is computed in float32)."""
    return token_loss(output.logits, targets)


def gpt2(microbatches: int) -> Problem:
    """The head is tied to the token embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    tokens = ids(ROWS * microbatches, 9, vocabulary=32)
    return Problem(GPT2LMHeadModel(config), logits_loss, (tokens[:, :-1],), (tokens[:, 1:],))


def llama(microbatches: int, **options: Any) -> Problem:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **options,
    )
    tokens = ids(ROWS * microbatches, 9, vocabulary=32)
    return Problem(LlamaForCausalLM(config), logits_loss, (tokens[:, :-1],), (tokens[:, 1:],))


def llama_without_cache(microbatches: int) -> Problem:
    return llama(microbatches, use_cache=False)


def bert(microbatches: int) -> Problem:
    """Masked language model with padding: an attention mask and labels by keyword."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    rows = ROWS * microbatches
    tokens, mask = ids(rows, 8, vocabulary=32), torch.ones(rows, 8, dtype=torch.long)
    mask[1::2, 5:] = 0
    labels = torch.where(ids(rows, 8, vocabulary=3, seed=2) == 0, tokens, -100)
    return Problem(
        BertForMaskedLM(config), None, kwargs={"input_ids": tokens, "attention_mask": mask, "labels": labels}
    )


def t5(microbatches: int) -> Problem:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        dropout_rate=0.0,
    )
    rows = ROWS * microbatches
    tokens, targets = ids(rows, 7, vocabulary=32), ids(rows, 6, vocabulary=32, seed=2)
    return Problem(
        T5ForConditionalGeneration(config),
        logits_loss,
        targets=(targets,),
        kwargs={"input_ids": tokens, "decoder_input_ids": targets.roll(1, 1)},
    )


def vit(microbatches: int) -> Problem:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    rows = ROWS * microbatches
    labels = ids(rows, vocabulary=2)
    return Problem(
        ViTForImageClassification(config), None, kwargs={"pixel_values": numbers(rows, 3, 8, 8), "labels": labels}
    )


def mixtral(microbatches: int) -> Problem:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=16,
    )
    tokens = ids(ROWS * microbatches, 9, vocabulary=32)
    return Problem(MixtralForCausalLM(config), logits_loss, (tokens[:, :-1],), (tokens[:, 1:],))


MODELS: dict[str, Maker] = {
    "gpt": gpt,
    "mlp": mlp,
    "unet-group-norm": unet_group_norm,
    "unet-batch-norm": unet_batch_norm,
    "encoder-decoder": encoder_decoder,
    "gpt2": gpt2,
    "llama": llama,
    "llama-without-cache": llama_without_cache,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mixtral": mixtral,
}
OF_TRANSFORMERS = (gpt2, llama, llama_without_cache, bert, t5, vit, mixtral)  # need that package
