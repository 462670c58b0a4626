"""docs/frameworks.md is true: its scripts train as plain loops do."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.documents import blocks
from tests.support.pool import Launch
from tests.support.scripts import run_as

RANKS = 2


def run_anew(rank: int, ranks: int, script: str, folder: str) -> str:
    """What a script prints, where nothing is left of what accelerate has met before in this process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        return run_as(rank, script, (), folder)[0]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def plain_losses() -> tuple[list[float], float]:
    """The last loss of each epoch, and that of all rows at last."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    next(iter(loader))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        losses.append(loss.item())
    return losses, F.mse_loss(model(data.tensors[0]), data.tensors[1]).item()


def printed(launch: Launch, block: int, folder: Path) -> str:
    (folder / "script.py").write_text(blocks("docs/frameworks.md", "python")[block])
    found: dict[int, Any] = launch(RANKS, run_anew, RANKS, "script.py", str(folder))
    return "".join(found.values())


@pytest.mark.slow
def test_accelerate(launch: Launch, tmp_path: Path) -> None:
    losses, _ = plain_losses()
    found = re.findall(r"epoch \d: loss ([\d.]+)", printed(launch, 0, tmp_path))
    assert [float(loss) for loss in found] == pytest.approx(losses, abs=1e-4), "the main process alone prints"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model.safetensors", "script.py"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs the package lightning")
def test_lightning(launch: Launch, tmp_path: Path) -> None:
    found = re.findall(r"rank \d, 8 steps: loss ([\d.]+)", printed(launch, 1, tmp_path))
    assert len(found) == RANKS
    assert float(found[0]) == pytest.approx(plain_losses()[1], abs=1e-2)
