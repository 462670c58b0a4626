"""Parameters as views of flat tensors (ZeRO-1). Run: pytest tests/test_flat.py (CPU, one process)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zbfx import InputError
from zbfx.flat import Shards
from zbfx.messages import layout_of
from zbfx.reductions import Bucket


def test_parameters_that_are_no_views_any_more_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    named = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    bucket = Bucket("bucket 0", tuple(named), tuple(layout_of(p) for p in named.values()))
    shards = Shards([bucket], named, 0, 2)
    shards.check(named)
    assert all(torch.equal(p, before[name]) for name, p in named.items())
    shards.flat["bucket 0"].mul_(2.0)
    assert all(torch.equal(p, before[name] * 2) for name, p in named.items())
    model.load_state_dict(before)  # in place
    shards.check(named)
    model.double().float()
    with pytest.raises(InputError) as caught:
        shards.check(named)
    assert str(caught.value) == (
        "with zero=1 parameters are views of flat tensors; found weight, bias in memory of their own, as after "
        "model.to(...) or parameter.data = ...: bind the pipeline again, or copy values in place"
    )
