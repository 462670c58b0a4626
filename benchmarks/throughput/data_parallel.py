"""What sums of gradients over replicas cost: zbfx with the last Ws whole and bucket by bucket, torch's DDP and FSDP2.

    torchrun --nproc-per-node=2 --max-restarts=20 -- benchmarks/throughput/data_parallel.py --ranks 1 \\
        --config 350M --b 2 --m 8
    torchrun --nproc-per-node=4 --max-restarts=20 -- benchmarks/throughput/data_parallel.py --ranks 2 \\
        --config 350M --b 2 --m 8

write one JSON line per case to `--out` (data_parallel.jsonl). There are as many replicas as pipelines of `--ranks`
ranks fit into the processes; each has a batch of `m` microbatches of `b` sequences. `exposed_ms` is how much longer a
step is than that of the same system with every replica for itself ("alone"), `planned_exposed_ms` what the plan says.
With several ranks torch runs 1F1B of torch.distributed.pipelining over stages in DDP or FSDP2, with one it accumulates
gradients in a loop; both synchronise at the last microbatch. A case that hangs takes one restart. Over gloo, without
GPUs: `--device cpu --config small --b 1 --backends eager`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks.gpt import GPT, GPTConfig, next_token_loss
from benchmarks.measure import Measured, Runnable, measure, reset_peak, step_ms
from benchmarks.stages import CONFIGS, batch, layers_per_stage, pieces, stage
from benchmarks.throughput.cases import Case
from benchmarks.throughput.compare import Benchmark, numbers, run_flags, words
from benchmarks.throughput.ours import materialize
from benchmarks.throughput.peers import mean_loss
from benchmarks.world import World
from zbfx.comm.channels import Channels
from zbfx.comm.place import find_place
from zbfx.costs.estimate import Link
from zbfx.costs.links import measured_link
from zbfx.replicas import replicated

SIZES = CONFIGS | {"small": GPTConfig(layers=6, hidden=256, heads=4, sequence=128, vocabulary=1024)}
ZBFX, TORCH = ("alone", "whole", "clustered"), ("alone", "ddp", "fsdp2")


@dataclass(frozen=True, slots=True)
class ReplicaCase:
    """One row: `sums` says what becomes of gradients ("alone": nothing), `backend` how zbfx runs its programs."""

    system: str
    sums: str
    schedule: str
    backend: str
    config: str
    b: int
    m: int
    replicas: int
    ranks: int

    @property
    def name(self) -> str:
        return (
            f"{self.system} {self.config} {self.replicas} x {self.ranks} b={self.b} m={self.m} {self.schedule} "
            f"{self.backend} {self.sums}"
        )


@dataclass(frozen=True, slots=True)
class ReplicaRow(ReplicaCase):
    """Times in milliseconds, as in `benchmarks/rows.py`; memory per process in GiB."""

    step_ms: float | None = None
    slowest_ms: float | None = None
    exposed_ms: float | None = None
    planned_exposed_ms: float | None = None
    sums_mib: list[float] | None = None  # of each rank
    buckets: list[int] | None = None
    trailing: list[int] | None = None  # Ws that run bucket by bucket
    link_gb_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_gib: list[float | None] | None = None
    loss: float | None = None
    build_s: float | None = None
    error: str | None = None
    commit: str = ""
    device: str = ""
    dtype: str = ""
    torch: str = ""
    nccl: str | None = None


def expand(options: argparse.Namespace, world: int) -> list[ReplicaCase]:
    replicas = world // options.ranks
    found = []
    for m in options.m:
        size = (options.config, options.b, m, replicas, options.ranks)
        for schedule in options.schedules:
            for backend in options.backends:
                found += [ReplicaCase("zbfx", sums, schedule, backend, *size) for sums in ZBFX]
        found += [ReplicaCase("torch", sums, "1F1B" if options.ranks > 1 else "-", "eager", *size) for sums in TORCH]
    return [case for case in found if case.system in options.systems]


class ReplicaBenchmark(Benchmark):
    """The cases of one run on this process's rank. `alone_ms`: steps without sums, by system, schedule and size."""

    def __init__(self, options: argparse.Namespace, world: World) -> None:
        super().__init__(options, world, expand(options, world.ranks))
        self.replicas = world.ranks // options.ranks
        self.place = replace(self.place, rank=world.rank % options.ranks, ranks=options.ranks)
        self.alone_ms: dict[ReplicaCase, float] = {}
        self.planned: dict[str, Any] = {}
        self.links: dict[int, Link] = {}

    def row(self, index: int, **results: Any) -> ReplicaRow:
        return ReplicaRow(**asdict(self.cases[index]), **results, **self.machine)

    def mesh(self, sums: str) -> DeviceMesh:
        names = ("apart" if sums == "alone" else "dp", "pp")
        return init_device_mesh(self.world.device.type, (self.replicas, self.place.ranks), mesh_dim_names=names)

    def build(self, case: Any) -> Runnable:
        self.planned = {}
        replica = self.world.rank // self.place.ranks
        ids, targets = batch(SIZES[case.config], self.replicas * case.m * case.b, self.world.device)
        own = (ids.chunk(self.replicas)[replica], targets.chunk(self.replicas)[replica])
        build = self.ours if case.system == "zbfx" else self.looped if case.ranks == 1 else self.pipelined
        return build(case, *own)

    def ours(self, case: ReplicaCase, ids: Tensor, targets: Tensor) -> Runnable:
        with torch.device("meta"):
            model = GPT(SIZES[case.config]).to(self.place.dtype)
        pipe = zbfx.compile(
            model,
            stages=case.ranks,
            microbatches=case.m,
            example_inputs=(ids[: case.b],),
            example_targets=targets[: case.b],
            loss_fn=next_token_loss,
            schedule=case.schedule,
            backend=case.backend,
            costs=self.options.costs,
            device=self.world.device,
        )
        reset_peak(self.world.device)
        materialize(model, pipe, self.place)
        mesh = self.mesh(case.sums)
        if case.sums != "alone":
            link = self.link(mesh, case.ranks)
            compiled = replicated(pipe.compiled, self.replicas, link, cluster=case.sums == "clustered")
            pipe = replace(pipe, compiled=compiled)
            found = pipe.compiled.reductions
            self.planned = {
                "planned_exposed_ms": pipe.compiled.exposed_s * 1e3,
                "sums_mib": [sum(bucket.size_bytes for bucket in r.buckets) / 2**20 for r in found],
                "buckets": [len(r.buckets) for r in found],
                "trailing": [r.trailing for r in found],
                "link_gb_per_s": link.bytes_per_s / 1e9,
            }
        independent = ("apart",) if case.sums == "alone" else ()
        step = pipe.bind(mesh, timeout_s=self.place.timeout_s, independent=independent)
        close = getattr(step, "close", lambda: None)
        return Runnable(lambda: step(ids, targets), list(step.parameters()), close=close)

    def link(self, mesh: DeviceMesh, ranks: int) -> Link:
        """The sums over these replicas, timed once: plans compare under one figure."""
        if ranks not in self.links:
            channels = Channels(find_place(ranks, mesh), self.world.device, dist.constants.default_pg_timeout)
            self.links[ranks] = measured_link(channels)
        return self.links[ranks]

    def looped(self, case: ReplicaCase, ids: Tensor, targets: Tensor) -> Runnable:
        """Gradients accumulated over the microbatches in a loop."""
        mesh = self.mesh(case.sums)
        module = self.wrapped(case, mesh, 0)
        share = 1 / case.m

        def step() -> Tensor:
            losses = []
            for k, (x, y) in enumerate(zip(ids.chunk(case.m), targets.chunk(case.m), strict=True)):
                last = k == case.m - 1
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(last)
                    module.set_is_last_backward(last)
                if isinstance(module, DistributedDataParallel) and not last:
                    with module.no_sync():
                        loss = next_token_loss(module(x), y) * share
                        loss.backward()
                else:
                    loss = next_token_loss(module(x), y) * share
                    loss.backward()
                losses.append(loss.detach())
            return torch.stack(losses).sum()

        return Runnable(step, list(module.parameters()))

    def pipelined(self, case: ReplicaCase, ids: Tensor, targets: Tensor) -> Runnable:
        """1F1B of torch over the ranks, whose stages synchronise over the replicas as they are wrapped."""
        config, rank, device = SIZES[case.config], self.place.rank, self.world.device
        mesh = self.mesh(case.sums)

        def hidden(width: int) -> Tensor:
            shape = (case.b, config.sequence, width)
            return torch.empty(shape, dtype=self.place.dtype, device="meta", requires_grad=True)

        first, last = rank == 0, rank == case.ranks - 1
        group = mesh.get_group("pp")
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # created lazily in a pipeline, it can deadlock
        pipeline_stage = PipelineStage(
            self.wrapped(case, mesh, rank),
            rank,
            case.ranks,
            device,
            input_args=(ids[: case.b].to("meta") if first else hidden(config.hidden),),
            output_args=(hidden(config.vocabulary if last else config.hidden),),
            group=group,
        )
        share = mean_loss(Case("torch", case.config, case.b, case.m, case.schedule, case.backend, "even"), device)
        schedule = Schedule1F1B(pipeline_stage, case.m, loss_fn=share, scale_grads=False)

        def step() -> Tensor | None:
            losses: list[Tensor] = []
            inputs = (ids,) if first else ()
            schedule.step(*inputs, target=targets if last else None, losses=losses, return_outputs=False)
            return torch.stack(losses).sum() if losses else None

        return Runnable(step, list(pipeline_stage.submod.parameters()))

    def wrapped(self, case: ReplicaCase, mesh: DeviceMesh, rank: int) -> Any:
        """This rank's blocks, in DDP or FSDP2 over the replicas, or as they are."""
        reset_peak(self.world.device)
        config = SIZES[case.config]
        weights = self.place.costs.get((case.config, case.b))
        counts = (
            [config.layers // case.ranks + (r < config.layers % case.ranks) for r in range(case.ranks)]
            if weights is None
            else layers_per_stage(config.layers, list(range(case.ranks)), weights)
        )
        module: nn.Module = stage(config, pieces(counts)[rank], self.world.device, self.place.dtype)
        if case.sums == "ddp":
            on_gpu = self.world.device.type == "cuda"
            ids = [self.world.device] if on_gpu else None
            return DistributedDataParallel(
                module, device_ids=ids, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
            )
        if case.sums == "fsdp2":
            for block in module.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
            return fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        return module

    def measure(self, index: int, runnable: Runnable) -> dict[str, Any]:
        case = self.cases[index]
        options = {"warmup": self.options.warmup, "repeats": self.options.repeats, "keep_gradients": False}
        measured = self.together(f"run/{index}", index, lambda: measure(runnable, self.world.device, **options))
        runnable.close()
        everyone = [Measured(**entry) for entry in self.world.gather(f"measured/{index}", asdict(measured))]
        (median_ms, slowest_ms), alone = step_ms(everyone), replace(case, sums="alone")
        if case.sums == "alone":
            self.alone_ms[case] = median_ms
        before_ms = self.alone_ms.get(alone)
        losses = [one.loss for one in everyone if one.loss is not None]
        return self.planned | {
            "step_ms": median_ms,
            "slowest_ms": slowest_ms,
            "exposed_ms": None if before_ms is None or case.sums == "alone" else median_ms - before_ms,
            "tokens_per_s": self.replicas * case.m * case.b * SIZES[case.config].sequence / median_ms * 1e3,
            "peak_gib": [one.peak_gib for one in everyone],
            # Systems of one replica each report its own loss.
            "loss": sum(losses) / len(losses) if losses else None,
        }


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--ranks", type=int, default=1, help="of each pipeline; replicas are the processes over these")
    flags.add_argument("--config", choices=list(SIZES), default="350M")
    flags.add_argument("--b", type=int, default=2, help="sequences in a microbatch")
    flags.add_argument("--microbatches", "--m", dest="m", type=numbers, default=[8], metavar="8,16")
    flags.add_argument("--systems", type=words, default=["zbfx", "torch"])
    flags.add_argument("--schedules", type=words, default=["zb-h1"], help="of zbfx")
    flags.add_argument("--backends", type=words, default=["eager", "cudagraph"], help="of zbfx")
    flags.add_argument("--costs", default="measure", help="what zbfx plans from: measure or estimate")
    flags.add_argument("--warmup", type=int, default=3)
    flags.add_argument("--repeats", type=int, default=10)
    run_flags(flags, "data_parallel.jsonl")
    flags.add_argument("--list", action="store_true", help="print the cases and stop")
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.list:
        print("\n".join(case.name for case in expand(options, int(os.environ.get("WORLD_SIZE", 2 * options.ranks)))))
        return
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    ReplicaBenchmark(options, World.from_environment(options.device)).run()


if __name__ == "__main__":
    main()
