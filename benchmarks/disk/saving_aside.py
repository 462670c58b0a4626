"""Whether training goes on while a checkpoint is written, and what is in it.

    torchrun --standalone --nproc-per-node=2 benchmarks/disk/saving_aside.py [--gib 1]

Saves a model with `step.save(async_=True)`, trains a further step at once, and reads the checkpoint. Prints when the
call returned, when the next step began and ended, and when the files were whole, in seconds from the call. Exits 1 if
the next step began after that, or if a tensor of the checkpoint is not that of the saved step, in bits.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zbfx
from zbfx.checkpoint import distributed

LAYERS = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of the whole model")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    width = int((options.gib * 2**30 / 4 / LAYERS) ** 0.5)
    folder = [tempfile.mkdtemp(dir="/var/tmp")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    rows = torch.ones(2, width)
    pipe = zbfx.compile(
        model,
        stages=dist.get_world_size(),
        microbatches=2,
        schedule="zb-h1",
        loss_fn=F.mse_loss,
        example_inputs=(rows[:1],),
        example_targets=rows[:1],
        check=False,
    )
    step = pipe.bind(weights="init", seed=0)
    optimizer = torch.optim.SGD(step.parameters(), lr=1.0)
    step(rows, rows)
    optimizer.step()
    then = {name: parameter.detach().clone() for name, parameter in step.named_parameters()}
    called_s = perf_counter()
    saved = step.save(folder[0], async_=True, optimizer=optimizer)
    begun_s = perf_counter()
    was_written = saved.is_done
    step(rows, rows)
    optimizer.step()
    ended_s = perf_counter()
    was_written_after = saved.is_done
    path = saved.wait()
    whole_s = perf_counter()
    found = {f"model.{name}": torch.empty_like(tensor) for name, tensor in then.items()}
    distributed.read_into(path, distributed.table_of(path), found)
    wrong = [name for name, tensor in then.items() if not torch.equal(found[f"model.{name}"], tensor)]
    changed = all(not torch.equal(then[name], parameter) for name, parameter in step.named_parameters())
    print(
        f"rank {dist.get_rank()} of {options.gib:g} GiB: save returned after {begun_s - called_s:.2f} s, the next step "
        f"ran from then to {ended_s - called_s:.2f} s (files whole by then: {was_written_after}), files were whole "
        f"after {whole_s - called_s:.2f} s; {len(then) - len(wrong)} of {len(then)} tensors are those of the saved step"
        f"{', all of which the next step has changed' if changed else ''}"
    )
    dist.barrier()
    step.close()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()
    return 1 if was_written or wrong or not changed else 0


if __name__ == "__main__":
    sys.exit(main())
