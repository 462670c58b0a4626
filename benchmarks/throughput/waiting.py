"""How much longer F, B and W of a stage take while receives of NCCL wait beside them.

    torchrun --nproc-per-node=2 -- benchmarks/throughput/waiting.py --config 1.5B --b 6 --stages 4 --out waiting.jsonl

Rank 0 times the phases of the second stage alone, and beside one and two receives, each on a communicator of its own
as channels between ranks are; rank 1 sends once the timing is over. One JSON line for each number of receives. GPUs
only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks.gpt import GPT, next_token_loss
from benchmarks.place import Place
from benchmarks.rows import machine
from benchmarks.stages import CONFIGS, batch
from benchmarks.world import World, time_limit
from zbfx.comm.process_groups import NCCL_BLOCKS, Library, new_group
from zbfx.costs.clock import captured, in_turn_s
from zbfx.costs.made_up import made_up
from zbfx.costs.measure import keeping

RECEIVES = (0, 1, 2, 0)  # the last line shows what the clock did meanwhile


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--config", choices=list(CONFIGS), default="1.5B")
    flags.add_argument("--b", type=int, default=6, help="sequences in a microbatch")
    flags.add_argument("--stages", type=int, default=4)
    flags.add_argument("--backend", default="inductor")
    flags.add_argument("--warm-s", type=float, default=2.0, help="seconds of load before each timing")
    flags.add_argument("--timeout-s", type=float, default=120.0)
    flags.add_argument("--commit", help="recorded in every row; asked from git by default")
    flags.add_argument("--out", type=Path, default=Path("waiting.jsonl"), help="rows are appended")
    return flags


@torch.no_grad()
def phases(options: argparse.Namespace, place: Place) -> tuple[dict[str, torch.cuda.CUDAGraph], list[Any]]:
    """F, B and W of the second stage, each as a graph, and the made-up values that they read."""
    with torch.device("meta"):
        model = GPT(CONFIGS[options.config]).to(place.dtype)
    ids, targets = batch(CONFIGS[options.config], options.b, place.device)
    pipe = zbfx.compile(
        model,
        stages=options.stages,
        microbatches=options.stages,
        example_inputs=(ids,),
        example_targets=targets,
        loss_fn=next_token_loss,
        device=place.device,
        backend=options.backend,
        check=False,
    )
    graphs, made = {}, []
    for kind, phase in pipe.stages[1].phases.items():
        values = [node.meta.get("val", 0) for node in phase.module.graph.find_nodes(op="placeholder")]
        made.append([made_up(value, place.device) for value in values])
        graphs[str(kind)] = captured(partial(keeping, pipe.compiler(phase), made[-1]), repetitions=1)
    return graphs, made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    world = World.from_environment("cuda")
    place = Place(world.rank, world.ranks, world.device, torch.bfloat16, timeout_s=options.timeout_s)
    graphs, _alive = phases(options, place) if world.rank == 0 else ({}, [])  # alone: no process group yet
    world.gather("compiled", None)
    payload = torch.zeros(2**20, device=world.device)
    with time_limit(options.timeout_s), world.process_group("waiting", options.timeout_s):
        timeout = timedelta(seconds=options.timeout_s)
        groups = [new_group((0, 1), timeout, Library.NCCL, NCCL_BLOCKS) for _ in range(max(RECEIVES))]
        for turn, count in enumerate((max(RECEIVES), *RECEIVES)):  # the first makes the communicators, by both ranks
            chosen = groups[:count]
            if world.rank == 0:
                receives = [dist.irecv(payload, src=1, group=group) for group in chosen]
                seconds = in_turn_s(graphs, options.warm_s) if turn else {}
            if turn:
                world.gather(f"timed/{turn}", None)
            if world.rank == 1:
                receives = [dist.isend(payload, dst=0, group=group) for group in chosen]
            for receive in receives:
                assert receive is not None, "both processes are members"
                receive.wait()
            torch.cuda.synchronize(world.device)
            if world.rank == 0 and turn:
                row = {"config": options.config, "b": options.b, "stages": options.stages, "backend": options.backend}
                row |= {"receives": count, "ms": {kind: round(1e3 * s, 3) for kind, s in seconds.items()}}
                print(json.dumps(row))
                with options.out.open("a") as file:
                    file.write(json.dumps(row | machine(place, options.commit)) + "\n")


if __name__ == "__main__":
    main()
