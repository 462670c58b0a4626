"""Models of the transformers library: their names and layouts on disk are not always those of their modules, and the
library has the conversions. In: such a model without memory, stored tensors, the names wanted. Out: what the library
makes of them, and what it reports. All other models pass through untouched."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbfx import _transformers
from zbfx.checkpoint.adapters import tensors_of
from zbfx.checkpoint.stored import Stored, StoredTensor, refuse_other_kinds, refuse_other_shapes
from zbfx.errors import ZbfxError


def as_pretrained(module: nn.Module) -> Any:
    """The module, if it is a `PreTrainedModel` of the transformers library, else None."""
    library = sys.modules.get("transformers")
    return module if library is not None and isinstance(module, library.PreTrainedModel) else None


@dataclass(frozen=True)
class Loaded:
    """What the library made of stored tensors, by the names of the model's modules. Those that were wanted have values.
    `weight_conversions`: how files of the model are written back."""

    tensors: Mapping[str, Tensor]
    missing: tuple[str, ...]
    surplus: tuple[str, ...]
    weight_conversions: Any


def refuse_quantized(model: Any) -> None:
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        raise ZbfxError(
            f"weights= reads plain numbers; found {type(model).__name__} with a quantization_config. Load it with "
            f"from_pretrained before compile, or dequantize it"
        )


def load_pretrained(model: Any, contents: Stored, wanted: Collection[str]) -> Loaded:
    """Let the library rename, merge and split stored tensors for `model`, a copy on the meta device. Of what is not
    `wanted` nothing is read. Raises `ZbfxError` for tensors of other shapes, and what cannot be converted."""
    conversions, whole = _transformers.conversions_of(model), model.state_dict()
    targets = _transformers.targets(model, conversions)
    ends = {name: targets(name) for name in contents}
    refuse_other_kinds((name, contents[name], whole[end]) for name, found in ends.items() for end in found)
    parts = {name: Lazy(entry, not set(ends[name]).isdisjoint(wanted)) for name, entry in contents.items()}
    before = tensors_of(model)
    info = _transformers.load_parts(model, parts, conversions)
    refuse_other_shapes([(name, tuple(found), tuple(own)) for name, found, own in sorted(info.mismatched_keys)])
    if info.conversion_errors or info.error_msgs:
        texts = [*(f"{name}: {text.strip().splitlines()[-1]}" for name, text in info.conversion_errors.items())]
        raise ZbfxError(
            f"transformers cannot convert these weights: {'; '.join([*texts, *info.error_msgs][:3])}. Load them with "
            f"from_pretrained, and write them anew with save_pretrained"
        )
    changed = {name: tensor.detach() for name, tensor in tensors_of(model).items() if tensor is not before.get(name)}
    missing, surplus = (tuple(sorted(names)) for names in (info.missing_keys, info.unexpected_keys))
    return Loaded(changed, missing, surplus, _transformers.weight_conversions(model))


class Lazy:
    """A stored tensor as the library takes it: read as it is indexed, if it is wanted, else without memory."""

    def __init__(self, entry: StoredTensor, is_wanted: bool) -> None:
        self.entry, self.is_wanted = entry, is_wanted

    def __getitem__(self, index: Any) -> Tensor:
        if self.is_wanted:
            return self.entry.read()[index]
        dtype = self.entry.dtype if isinstance(self.entry.dtype, torch.dtype) else None
        return torch.empty(self.entry.shape, dtype=dtype, device="meta")[index]
