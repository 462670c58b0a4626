"""Numbers that a forward changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.support.models import Problem
from tests.support.reference import compiled


class Counting(nn.Module):
    """Counts its forwards, and scales its output by `scale` of the count."""

    def __init__(self, scale: str) -> None:
        super().__init__()
        self.first, self.second, self.scale, self.count = nn.Linear(8, 8), nn.Linear(8, 8), scale, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        factor = {
            "annealed": min(1.0, self.count / 10),
            "late": 0.5 if self.count < 1000 else 1.0,
            "alternating": self.count % 2,
            "none": 1.0,
        }[self.scale]
        return self.second(self.first(x).tanh()) * factor


def problem(scale: str) -> Problem:
    torch.manual_seed(0)
    return Problem(Counting(scale), nn.functional.mse_loss, (torch.randn(4, 8),), (torch.randn(4, 8),))


@pytest.mark.parametrize("scale", ["annealed", "late", "alternating"])
def test_counts_that_the_output_depends_on_are_refused(scale: str) -> None:
    with pytest.raises(zbfx.TraceError) as caught:
        compiled(problem(scale), 2, 2)
    assert str(caught.value) == (
        "count changes in every forward, and what the forward computes depends on it: the graph would hold it as it "
        "was when traced. Keep it in a buffer and change that in place (self.count.add_(1)), or pass it as an input"
    )


def test_counts_for_the_log_are_not() -> None:
    counted = problem("none")
    pipe = compiled(counted, 2, 2)
    assert counted.model.count == 0
    loss = pipe.run_local()(*counted.inputs, *counted.targets)
    expected = nn.functional.mse_loss(counted.model(*counted.inputs), *counted.targets)
    torch.testing.assert_close(loss, expected.detach())
