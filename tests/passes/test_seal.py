"""Graphs of phases as inductor gets them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # as inductor runs operators

from tests.support.models import Problem, squares
from tests.support.reference import compiled
from zbfx.passes.operators import ADD_PRODUCT, ADD_ROWS
from zbfx.passes.seal import sealed


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.float32, torch.bfloat16)])
def test_rows_of_an_embedding_are_added_as_its_dense_gradient_is(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    wide, narrow = dtypes
    indices = torch.tensor([[3, 1, 3], [0, 3, 5]])
    rows, gradient = torch.randn(2, 3, 4).to(narrow), torch.randn(7, 4).to(wide)
    rows[0, 1, 0] = float("nan")
    dense = torch.ops.aten.embedding_dense_backward(rows.to(wide), indices, 7, 5, False)
    expected = gradient + dense
    ADD_ROWS(gradient, rows, indices, 5)
    tolerance = 1e-14 if wide is torch.float64 else 1e-6
    torch.testing.assert_close(gradient, expected, equal_nan=True, rtol=tolerance, atol=0)


def test_operators_run_on_fake_tensors_of_two_dtypes() -> None:
    with FakeTensorMode():
        gradient, factor = torch.empty(4, 4), torch.empty(4, 4, dtype=torch.bfloat16)
        assert ADD_PRODUCT(gradient, factor, factor) is None
        assert ADD_ROWS(gradient, factor, torch.zeros(4, dtype=torch.long), -1) is None
    assert (gradient.shape, gradient.dtype) == ((4, 4), torch.float32)


@pytest.mark.parametrize("by_frequency", [False, True])
def test_no_gradient_is_as_large_as_the_vocabulary(by_frequency: bool) -> None:
    model = nn.Sequential(nn.Embedding(50, 4, scale_grad_by_freq=by_frequency), nn.Linear(4, 4))
    problem = Problem(model, squares, (torch.arange(6),))
    phases = compiled(problem, 1, 1, check=False).stages[0].phases
    graphs = [sealed(phase.module.graph) for phase in phases.values()]
    targets = [node.target for graph in graphs for node in graph.nodes]
    assert targets.count(ADD_ROWS) == (0 if by_frequency else 1)
    assert targets.count(torch.ops.aten.embedding_dense_backward.default) == (1 if by_frequency else 0)
