"""The architectures of `model_zoo.py` that timm builds, small, where it is installed (it needs torchvision)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIMM_IMAGE = 64
SMALL = {"img_size": TIMM_IMAGE, "depth": 4}
ONE_EACH = (1, 1, 1, 1)

# Name -> what makes it small. Dropout and stochastic depth are 0.
MODELS: dict[str, Mapping[str, Any]] = {
    "resnet10t": {},
    "resnext50_32x4d": {"layers": ONE_EACH},
    "seresnet18": {},
    "resnetv2_50": {"layers": ONE_EACH},
    "res2net50_14w_8s": {"layers": ONE_EACH},
    "regnetx_002": {},
    "mobilenetv2_050": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
    "rexnet_100": {},
    "hardcorenas_a": {},
    "hgnet_tiny": {},
    "starnet_s1": {},
    "convnext_atto": {},
    "convnextv2_atto": {},
    "inception_next_atto": {},
    "mambaout_femto": {},
    "vit_tiny_patch16_224": SMALL,
    "deit_tiny_patch16_224": SMALL,
    "beit_base_patch16_224": {**SMALL, "embed_dim": 48, "num_heads": 4},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 4},
    "swin_tiny_patch4_window7_224": {"img_size": TIMM_IMAGE, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 2, 1)},
    "swinv2_tiny_window8_256": {"img_size": TIMM_IMAGE, "window_size": 2, "embed_dim": 24, "depths": (1, 1, 2, 1)},
    "cait_xxs24_224": SMALL,
    "xcit_nano_12_p16_224": SMALL,
    "pit_ti_224": {"img_size": TIMM_IMAGE},
    "levit_128s": {"img_size": TIMM_IMAGE},
    "coat_tiny": {"img_size": TIMM_IMAGE},
    "davit_tiny": {"depths": ONE_EACH, "embed_dims": (24, 24, 48, 48), "num_heads": (2, 2, 4, 4)},
    "edgenext_xx_small": {},
    "mobilevit_xxs": {},
    "fastvit_t8": {},
    "pvt_v2_b0": {},
    "maxvit_rmlp_pico_rw_256": {"img_size": TIMM_IMAGE},
    "coatnet_pico_rw_224": {"img_size": TIMM_IMAGE},
}

# In training mode, a change of 1e-15 in the pictures changes these models' gradients by as much as they are large.
ILL_CONDITIONED = {"maxvit_rmlp_pico_rw_256"}


class Classifier(nn.Module):
    """A model with the loss that timm leaves to the caller."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.model(pixel_values), labels)}


def installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("timm", "torchvision"))


def declare_operators() -> torch.library.Library:
    """Names of operators that torchvision expects to find: wheels built for GPUs do not load them beside a torch for
    CPUs, and no model here runs one."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return library


def build(name: str, classes: int) -> nn.Module:
    """The library's model, with random weights and its loss; its class is shown as the library's."""
    import timm

    options = {"num_classes": classes, "drop_rate": 0.0, "drop_path_rate": 0.0, **MODELS[name]}
    return Classifier(timm.create_model(name, **options))


def image_size(name: str) -> int:
    return int(MODELS[name].get("img_size", TIMM_IMAGE))
