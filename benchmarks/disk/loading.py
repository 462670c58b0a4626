"""How much memory a rank takes to load its stage of a model that is larger.

    torchrun --standalone --nproc-per-node=2 benchmarks/disk/loading.py [--gib 1.5]

Writes a model as safetensors, and gives a rank one eighth of it, the other one the rest. Prints, for each rank, what
its stage has, and by how much the process's anonymous memory (RssAnon) grew at most while `bind(weights=folder)` ran.
Exits 1 if that is more than 1.2 times the stage, and more than the stage and its largest tensor.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import zbfx

LAYERS = 16
MIB = 1 << 20


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Peak:
    """The largest value of this process's anonymous memory, looked at every millisecond."""

    def __init__(self) -> None:
        self.begun = self.largest = anonymous_bytes()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self) -> None:
        while not self.done.is_set():
            self.largest = max(self.largest, anonymous_bytes())
            time.sleep(0.001)

    def growth(self) -> int:
        self.done.set()
        self.thread.join()
        return max(self.largest, anonymous_bytes()) - self.begun


def model_of(width: int) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.5, help="of the whole model")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    width = int((options.gib * 2**30 / 4 / LAYERS) ** 0.5)
    folder = [tempfile.mkdtemp(dir="/var/tmp")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    file = Path(folder[0]) / "model.safetensors"
    if dist.get_rank() == 0:
        save_file({f"{layer}.weight": torch.randn(width, width) for layer in range(LAYERS)}, file)
    try:
        rows = torch.zeros(1, width)
        pipe = zbfx.compile(
            model_of(width),
            stages=2,
            microbatches=2,
            schedule="1f1b",
            loss_fn=F.mse_loss,
            example_inputs=(rows,),
            example_targets=rows,
            cuts=[str(LAYERS // 8)],
            check=False,
        )
        dist.barrier()
        peak = Peak()
        step = pipe.bind(weights=folder[0])
        growth = peak.growth()
        stage = sum(parameter.nbytes for parameter in step.parameters())
        largest = max(parameter.nbytes for parameter in step.parameters())
        is_small = growth <= max(1.2 * stage, stage + largest)
        print(
            f"rank {dist.get_rank()}: a stage of {stage / MIB:.0f} MiB of {options.gib * 1024:.0f}, its largest "
            f"tensor {largest / MIB:.0f}; anonymous memory grew by {growth / MIB:.0f} MiB, {growth / stage:.2f} times "
            f"the stage"
        )
        step.close()
    finally:
        if dist.get_rank() == 0:
            file.unlink()
            file.parent.rmdir()
    dist.destroy_process_group()
    return 0 if is_small else 1


if __name__ == "__main__":
    sys.exit(main())
