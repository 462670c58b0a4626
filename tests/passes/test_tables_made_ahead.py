"""What a model computes ahead of its layers, where an evaluation is another graph than training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.models import Problem, squares
from tests.support.reference import compiled

WIDTH, LAYERS = 4, 6


class Tables(nn.Module):
    """Layers of two kinds, each with a table of its own, both made before the first layer by a product, as rotary
    tables are. In training the layers draw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for name in ("early", "late"):
            self.register_buffer(name, torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(WIDTH, dtype=x.dtype)[None]
        tables = [(positions @ self.get_buffer(name)).cos() for name in ("early", "late")]
        for index, layer in enumerate(self.layers):
            x = functional.dropout(layer(x) * tables[index >= LAYERS - 2], 0.5, self.training)
        return x


def test_layers_of_the_last_stage_alone_read_a_table() -> None:
    torch.manual_seed(0)
    model = Tables().double()
    problem = Problem(model, squares, (torch.randn(2, WIDTH, dtype=torch.float64),))
    pipe = compiled(problem, 3, 2, cuts=["layers.2", "layers.4"], check=False)
    step = pipe.run_local()
    found = step.evaluate(*problem.inputs)
    halves = zip(*(t.chunk(2) for t in problem.inputs), strict=True)
    expected = torch.stack([squares(model.eval()(*half)) for half in halves]).mean()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
