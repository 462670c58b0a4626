"""Random numbers depend on the seed, the microbatch and the place in the model: not on where entries lie in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zbfx.rng import seeded

aten = torch.ops.aten
LAYOUTS = {
    "transposed": torch.ones(4, 3, 32).permute(1, 2, 0),
    "with gaps": torch.ones(3, 32, 8)[..., ::2],
    "transposed, with gaps": torch.ones(32, 3, 8).transpose(0, 1)[..., ::2],
    "expanded": torch.ones(3, 32, 1).expand(3, 32, 4),
}
DRAWS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "dropout": (aten.native_dropout.default, (0.4, True), {}),
    "uniform": (aten.rand_like.default, (), {}),
    "normal": (aten.randn_like.default, (), {}),
    "rows first": (aten.rand_like.default, (), {"memory_format": torch.contiguous_format}),
    "in place": (aten.bernoulli_.float, (0.4,), {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draw", DRAWS)
def test_strides_do_not_change_what_is_drawn(layout: str, draw: str) -> None:
    op, rest, options = DRAWS[draw]
    value = torch.empty_like(LAYOUTS[layout]) if draw == "in place" else LAYOUTS[layout]

    def drawn(given: Tensor) -> list[Tensor]:
        found = seeded(op, 3, 7, given, *rest, **options)
        return [found] if isinstance(found, Tensor) else list(found)

    for one, other in zip(drawn(value), drawn(value.contiguous()), strict=True):
        assert torch.equal(one, other)
        if not options:
            assert one.stride() == torch.empty_like(value).stride()
    if draw == "in place":
        assert drawn(value)[0].data_ptr() == value.data_ptr()
