"""Parameters and gradients as views of flat tensors, and what captured steps hold on to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zbfx import InputError
from zbfx.program.messages import layout_of
from zbfx.program.reductions import Bucket
from zbfx.runtime.captured import Capture
from zbfx.runtime.flat import FlatGradients, Shards


def test_parameters_that_are_no_views_any_more_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    named = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    bucket = Bucket("bucket 0", tuple(named), tuple(layout_of(p) for p in named.values()), torch.float32)
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


def bucket_of(model: nn.Module) -> Bucket:
    named = dict(model.named_parameters())
    return Bucket("bucket 0", tuple(named), tuple(layout_of(p) for p in named.values()), torch.float32)


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_are_summed_in_flat_tensors_after_a_model_was_moved(sharded: bool) -> None:
    """Which takes what `.grad` holds to memory of its own: from then on it counts as the user's."""
    model = nn.Linear(3, 2)
    named = dict(model.named_parameters())
    shards = Shards([bucket_of(model)], named, 0, 1) if sharded else None
    gradients = FlatGradients([bucket_of(model)], named, shards)
    owners = list(gradients.owners.values())
    for step in range(1, 5):
        gradients.start()
        for view in gradients.views.values():
            view.add_(10.0**step)
        gradients.flat["bucket 0"].mul_(2.0)  # the sum over the replicas
        gradients.finish()
        if step == 2:
            for owner in owners:
                assert owner.grad is not None
                owner.grad.data = owner.grad.data.clone()  # as model.to(...) there and back does
        for owner in owners:
            assert owner.grad is not None
            assert owner.grad.unique().tolist() == [sum(2 * 10.0**k for k in range(1, step + 1))]


def test_a_captured_step_sees_that_its_tensors_have_moved() -> None:
    parameter, gradient = nn.Parameter(torch.ones(2)), torch.ones(2)
    tensors = [parameter, gradient]
    capture = Capture(None, (), torch.zeros(()), tensors=tensors, addresses=tuple(map(torch.Tensor.data_ptr, tensors)))  # type: ignore[arg-type]
    assert not capture.is_left
    before, gradient.data = gradient.data, gradient.data.clone()
    assert capture.is_left
    gradient.data = before
    assert not capture.is_left
    parameter.data = parameter.data.clone()
    assert capture.is_left
