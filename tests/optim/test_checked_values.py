"""Checks of a model's values while an optimizer step waits for its verdict: weights that are taken back break none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Problem, mean_squares, numbers
from tests.support.reference import compiled, default_dtype
from zbfx import PipelineFault
from zbfx.optim import PostValidated

MAX_NORM, LARGEST = 0.3, 6.0


class Checked(nn.Module):
    """The first stage gets small gradients and checks what it makes, the second gets large ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        with torch.no_grad():
            self.second.weight.mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._check_tensor_all(h.abs() < LARGEST, lambda: "h is large")
        return self.second(h)


@pytest.mark.parametrize("rate", [100.0, 1e5])
def test_a_check_on_weights_that_are_taken_back_is_none(rate: float) -> None:
    """A step that is not clipped would break the check; what breaks it after a step that is, raises."""
    with default_dtype(torch.float64):
        losses: list[list[float]] = []
        for validated in (False, True):
            batch = numbers(8, 6).double(), 10 * numbers(8, 6, seed=2).double()
            problem = Problem(Checked(), mean_squares, batch[:1], batch[1:])
            step = compiled(problem, 2, 4, cuts=["second"], check=False).run_local()
            optimizer = torch.optim.SGD(step.parameters(), lr=rate)
            wrapped = PostValidated(optimizer, step, max_norm=MAX_NORM, sync=False) if validated else optimizer
            found = [step(*batch).item()]
            small = problem.model.get_parameter("first.weight").grad
            assert small is not None
            assert 0 < small.norm() < MAX_NORM
            if not validated:
                nn.utils.clip_grad_norm_(problem.model.parameters(), MAX_NORM)
            wrapped.step()
            wrapped.zero_grad()
            if rate > 1e4:
                with pytest.raises(PipelineFault, match=r"^rank 0, step 1, action F0.0 .*: RuntimeError: h is large"):
                    step(*batch)
                continue
            losses.append([*found, step(*batch).item()])
            if isinstance(wrapped, PostValidated):
                assert wrapped.counts.rolled_back == 1
        assert losses[:1] == [pytest.approx(found, rel=1e-12) for found in losses[1:]]
