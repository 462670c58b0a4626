"""Views, random ops, sizes and arithmetic of single nodes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Problem, gpt, numbers
from tests.support.reference import traced, traced_model
from zbfx.passes.nodes import (
    QUERIES_AT,
    flops,
    is_random,
    is_view,
    storage_owner,
    stored_bytes,
    value_bytes,
    with_all_heads,
)

aten = torch.ops.aten


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x @ self.weight).split(3, 1)
        noisy = nn.functional.dropout(left.t().t(), 0.5)
        return (noisy * right.reshape(-1).view(2, 3)).sum()


def test_views_share_the_storage_of_what_they_look_at() -> None:
    joint = traced(Problem(Parts(), None, (numbers(2, 4),)))
    product = next(node for node in joint.graph.nodes if node.target is aten.mm.default)
    views = [node for node in joint.graph.nodes if is_view(node) and storage_owner(node) is product]
    assert {str(node.target).rsplit(".", 1)[0] for node in views} >= {"aten.split", "aten.t"}
    assert stored_bytes([product, *views]) == value_bytes(product) == 2 * 6 * 4


@pytest.mark.slow
def test_random_ops_are_known() -> None:
    joint = traced(Problem(Parts(), None, (numbers(2, 4),)))
    assert [str(node.target) for node in joint.graph.nodes if is_random(node)] == ["aten.native_dropout.default"]
    assert not any(is_random(node) for node in traced_model(gpt).graph.nodes)


def test_attention_with_dropout_is_random() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = x @ self.weight
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum()

    joint = traced(Problem(Attention(), None, (numbers(2, 3, 4),)))
    assert any(is_random(node) for node in joint.graph.nodes)


@pytest.mark.parametrize(("rows", "width"), [(2, 8), (3, 16)])
def test_arithmetic_of_a_matrix_product(rows: int, width: int) -> None:
    joint = traced(Problem(nn.Linear(width, width), lambda y: y.sum(), (numbers(rows, width),)))
    products = [node for node in joint.graph.nodes if flops(node)]
    assert [flops(node) for node in products] == [2 * rows * width * width] * 2


class Grouped(nn.Module):
    """Attention of 4 heads of queries over 2 of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        q = (x @ self.weight).unflatten(-1, (4, 4)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q[:, :2], q[:, 2:], is_causal=True, enable_gqa=True).sum()


def test_arithmetic_of_attention_with_grouped_heads() -> None:
    """A product of queries and keys and one with the values, for every head of queries; five in the backward."""
    joint = traced(Problem(Grouped(), None, (numbers(2, 3, 16),)))
    found = [flops(node) for node in joint.graph.nodes if node.target in QUERIES_AT]
    product = 2 * (2 * 4) * 3 * 3 * 4
    assert found == [2 * product, 5 * product]
    assert with_all_heads([numbers(2, 4, 3, 4), numbers(2, 2, 3, 4), numbers(2, 2, 3, 4)], 0)[1:] == [(2, 4, 3, 4)] * 2
