"""Models of peft: low-rank adapters (LoRA) around the layers of another model, whose weights have the names of before.
In: such a model without memory. Out: the model inside, and first values for its adapters. All other models pass through
untouched."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from zbfx.errors import ZbfxError

ADAPTER_PREFIX = "base_model.model."  # of names in files of adapters


def as_adapted(module: nn.Module) -> Any:
    """The module, if it is a `PeftModel`, else None. Raises `ZbfxError` for other adapters than LoRA, and for whole
    layers that are trained beside them: a checkpoint of the base model has no values of theirs."""
    library = sys.modules.get("peft")
    if library is None or not isinstance(module, library.PeftModel):
        return None
    if not isinstance(module.base_model, library.LoraModel):
        raise ZbfxError(
            f"weights= fills models of peft that have LoRA; found {type(module.base_model).__name__}. Load the base "
            f"model with from_pretrained, and then make its adapters, before compile"
        )
    beside = [name for name, part in module.named_modules() if isinstance(part, library.utils.ModulesToSaveWrapper)]
    if beside:
        raise ZbfxError(
            f"weights= fills LoRA alone; found {beside[0]} among modules_to_save. Load the base model with "
            f"from_pretrained, and then make its adapters, before compile"
        )
    return module


def refuse_adapters_alone(names: Collection[str]) -> None:
    """Raises `ZbfxError` for what `save_pretrained` writes of a `PeftModel`: it has no weights of the model inside."""
    found = [name for name in names if name.startswith(ADAPTER_PREFIX)]
    if found:
        raise ZbfxError(
            f"weights= reads the base model of adapters; found adapters, such as {found[0]}. Load both before compile: "
            f"the base model with from_pretrained, and its adapters with PeftModel.from_pretrained"
        )


def without_adapters(model: Any) -> tuple[nn.Module, Mapping[str, str]]:
    """The model inside of a `PeftModel`, which is taken apart, and by its names those in the `PeftModel`."""
    outer = {id(tensor): name for name, tensor in tensors_of(model).items()}
    inner = model.unload()
    return inner, {name: outer[id(tensor)] for name, tensor in tensors_of(inner).items()}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, under each of their names."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {**dict(module.named_parameters(remove_duplicate=False)), **buffers}


def initialize_adapters(model: Any) -> None:
    """Give the adapters of a `PeftModel` their first values, as its configuration says."""
    layer_type = sys.modules["peft"].tuners.lora.LoraLayer
    for layer in model.modules():
        if isinstance(layer, layer_type):
            for name in layer.r:
                if model.peft_config[name].init_lora_weights is False:
                    initialize_as_made(layer, name)
                    continue
                try:
                    layer.reset_lora_parameters(name, model.peft_config[name].init_lora_weights)
                except ValueError as error:
                    raise ZbfxError(
                        f"init_lora_weights={model.peft_config[name].init_lora_weights!r} needs the values of the base "
                        f"model, which weights= does not give it: use True or 'gaussian', or load the base model first"
                    ) from error


def initialize_as_made(layer: Any, name: str) -> None:
    """First values of an adapter that peft leaves as its layers are made."""
    for parts in (layer.lora_A, layer.lora_B):
        if name in parts:
            parts[name].reset_parameters()
    for tensors in (layer.lora_embedding_A, layer.lora_embedding_B):
        if name in tensors:
            nn.init.normal_(tensors[name])
