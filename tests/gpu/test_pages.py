"""What the page on GPUs shows runs on GPUs, as torchrun starts it: captured, compiled, with losses of plain PyTorch.

Run: pytest -m gpu tests/gpu/test_pages.py (skipped without CUDA; one GPU is enough, two are two ranks).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.support.documents import blocks, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices")]

PLAIN = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for _ in range(3):
    plain = nn.functional.cross_entropy(model(inputs), targets)
    plain.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{type(step.worker.launch).__name__} {float(loss):.6f} {float(plain):.6f}\\n", end="")
"""


def test_the_page_on_gpus_runs(tmp_path: Path) -> None:
    page = "".join(blocks("docs/gpus.md", "python"))
    made = page[page.index("torch.manual_seed(0)") : page.index("pipe = ")]
    (tmp_path / "train.py").write_text(page + made + PLAIN)
    ranks = min(2, torch.cuda.device_count())
    printed = run(["torchrun", "--standalone", f"--nproc-per-node={ranks}", "train.py"], tmp_path)
    found = re.findall(r"^(\w+) (\d\.\d+) (\d\.\d+)$", printed, re.MULTILINE)
    assert len(found) == ranks
    for launched, loss, plain in found:
        assert launched == "Captured"
        assert float(loss) == pytest.approx(float(plain), rel=1e-3)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
