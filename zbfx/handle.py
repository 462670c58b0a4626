"""`Pipeline`: what `compile` made of a model. It shows, saves, and binds itself to processes, which gives a `Step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbfx._torch.compiling import uncompiled
from zbfx.arguments import compared, whole_number
from zbfx.checkpoint.stored import kind_of_weights
from zbfx.comm.channels import Channels
from zbfx.comm.together import on_all_ranks, waiting
from zbfx.compiled import Compiled
from zbfx.costs.links import measured_link
from zbfx.documents import write_text
from zbfx.errors import ZbfxError
from zbfx.graphs import Stage
from zbfx.memory.predict import MemoryReport, RankMemory
from zbfx.plan import CostTable
from zbfx.plans.saved import save_plan
from zbfx.program.boxed import Compiler
from zbfx.program.codegen import Program
from zbfx.replicas import replicated
from zbfx.report import subject
from zbfx.runtime.bind import bound_step, local_step, process_place
from zbfx.runtime.buckets import Buckets
from zbfx.runtime.options import BindOptions, StepOptions
from zbfx.runtime.ranks import AllHere, OneOfMany
from zbfx.runtime.step import Step
from zbfx.runtime.timeline import Profile
from zbfx.schedule.schedule import Schedule
from zbfx.show.page import page
from zbfx.trace.guard import Source
from zbfx.variants import Variants


@dataclass(frozen=True, repr=False)
class Pipeline:
    """A compiled pipeline, ready to run: `run_local` in this process, `bind` over torch.distributed.
    `schedule` prints as a grid; `programs[rank].code` is what a rank does; `stages[i].phases["F"].module.code` is what
    an action computes. `compiled` has everything that the model was made into, `source` the model itself."""

    compiled: Compiled
    source: Source
    compiler: Compiler

    @property
    def model(self) -> nn.Module:
        return self.source.model

    @property
    def schedule(self) -> Schedule:
        return self.compiled.schedule

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.compiled.stages

    @property
    def programs(self) -> tuple[Program, ...]:
        return self.compiled.programs

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """What each rank holds in a step, at every action, by storages (`zbfx.memory`)."""
        return self.compiled.memory

    @property
    def costs(self) -> CostTable:
        """Seconds and bytes of every stage and edge, estimated or measured, and the rank of each stage."""
        return self.schedule.costs

    @property
    def device(self) -> torch.device:
        return self.compiled.device

    @property
    def backend(self) -> str:
        return self.compiled.options.backend

    def memory_report(self) -> MemoryReport:
        """A record that prints what each rank holds: static parts, the peak, and what is live at the peak."""
        return MemoryReport(self.memory, self.schedule.mem_limit)

    def report(
        self, path: str | PathLike[str], *, profile: Profile | None = None, compare: Sequence[str] | None = None
    ) -> None:
        """Write a page on this pipeline to `path`: one file, which needs no network (`docs/report.md`).

        It has the timeline of all ranks to zoom into, the cause of every idle second, what ranks hold, the cut, the
        programs. `profile`, what `step.profile` returned, adds a measured step. `compare` names the schedules that the
        pipeline's is compared with, planned for the same costs; None: all by hand that its stages can run.
        """
        write_text(path, page(subject(self.compiled, profile, compare)))

    def save(self, file: str | PathLike[str], *, namespaces: Sequence[str] = ()) -> None:
        """Write the plan to a file: the cut, costs, the schedule, the graphs of all stages. `zbfx.load_plan` makes this
        pipeline of it and of the model again, in any process, without tracing or planning (`docs/plans.md`).

        The file is data; nothing in it is executed. `namespaces` are those of further operators that the model calls
        (`torch.library`). Raises `ZbfxError` for what a file cannot hold: DTensor parameters, a schedule that is a
        function, arguments of classes of your own, functions of Python that a pass put into a graph.
        """
        with self.source.modes.fixed():
            save_plan(self.compiled, self.source, Path(file), tuple(namespaces))

    @uncompiled
    def run_local(
        self,
        *,
        weights: Any = None,
        seed: int | None = None,
        on_nonfinite: str = "keep",
        on_new_shape: str = "refuse",
        buckets: Buckets | None = None,
    ) -> Step:
        """A step that runs every rank in this process, one after the other: the same results, without a launcher.

        `seed` fixes the random numbers; by default they follow `torch.manual_seed`. `on_nonfinite` says what becomes
        of a step whose losses or gradients are not finite: "keep" (nothing is checked), "drop" its gradients, "raise".
        `on_new_shape`: "refuse" a batch of other shapes than the example's, "recompile", once per shape, or "symbolic":
        trace once with symbols for the sizes that change, and put in the numbers of every further shape; where the
        model's code does not allow that, it is compiled like "recompile", and the notes of its schedule say why.
        `buckets` (`zbfx.Buckets`): `run_split` pads microbatches to few lengths.
        """
        with self.source.modes.fixed():
            options, ranks = StepOptions(seed, on_nonfinite, on_new_shape, buckets), AllHere()
            options.check()
            variants = Variants(self.compiled, self.source, ranks, symbolic=options.is_symbolic)
            return local_step(self.compiled, self.source, ranks, options, variants, weights)

    def replicated(self, replicas: int) -> Pipeline:
        """This pipeline as one of several replicas, with gradients summed over them: what `bind` with a mesh runs."""
        whole_number("replicas", replicas, "how many pipelines train on different data")
        return replace(self, compiled=replicated(self.compiled, replicas))

    @uncompiled
    def bind(
        self,
        rank_or_mesh: int | DeviceMesh | None = None,
        *,
        weights: Any = None,
        timeout_s: float = 600.0,
        seed: int | None = None,
        on_nonfinite: str = "keep",
        on_new_shape: str = "refuse",
        zero: int = 0,
        transport: str = "auto",
        independent: tuple[str, ...] = (),
        check_batches: int = 0,
        checksums: bool = False,
        survive: bool = False,
        buckets: Buckets | None = None,
    ) -> Step:
        """This process's part of the pipeline, over torch.distributed (call `init_process_group` first).

        The pipeline's ranks are the processes of torch.distributed; a rank, if given, must be this process's. A
        `DeviceMesh` of all processes has, in any order, the dimension "pp" of the ranks and, where they are meant, "dp"
        and "tp". Along "dp" are replicas: each gets a batch of its own, loss and gradients are those of one process
        with the batches of all (appendix A of the paper), and so are the random numbers. Along "tp" are the shards of a
        model with DTensor parameters (or collectives of its own), which take the same batch. Other dimensions are
        refused, unless `independent` names them: pipelines along those know nothing of each other.

        Moves the parameters of this rank's stages to the pipeline's device, checks that all ranks hold the same plan
        and all replicas the same values, creates and warms the communicators, and makes parameters and buffers that
        several ranks hold equal. Warns (`UserWarning`) where ranks have different values of a tensor, for each stage
        starts from those of the rank that runs it; that takes a CPU core about half a second per GB of the model.
        `timeout_s` bounds every wait for another rank; ranks whose calls differ end sooner (`zbfx.comm.history`).
        `seed` fixes the random numbers; by default they follow rank 0's `torch.manual_seed`. `on_nonfinite` (one
        verdict for all ranks), `on_new_shape` and `buckets` as in `run_local`.

        `weights` gives this rank's parameters and buffers their values, for a model on the meta device. What others
        own is neither read nor made. It is a folder (or file) of safetensors, a folder of `step.save` or of
        torch.distributed.checkpoint, a mapping of names to tensors, or "init": the modules' own initialisers, with
        draws that follow `seed` and depend on neither ranks, cuts nor replicas. Models of the transformers library are
        filled as `from_pretrained` does it: names are converted, what is missing is initialised, and what is no part of
        the model left out, both with a warning (`UserWarning`). Others are filled strictly, as by `load_state_dict`.
        Other shapes and quantised numbers are refused, and so is a tensor that stays empty. Nothing is unpickled. None:
        the model has its values.

        `zero=1` (ZeRO-1) leaves each replica the optimizer's state of a part of the parameters: `step.parameters()` are
        flat shards then, for an optimizer that works element by element, and the model's own parameters have their new
        values once the next step, or `step.collect()`, has collected them.

        `transport` says how messages travel between ranks: "copies", by the copy engines of GPUs of one host, into
        inboxes of 32 MiB for each rank that sends to this one; "group", by torch.distributed (NCCL, gloo); "auto",
        copies between ranks that reach each other's memory in every replica. On GPUs a step whose other ranks fail, or
        which takes longer than `timeout_s`, compiling included, ends this process at once (`os._exit`): nothing else
        ends a wait of the device.

        `check_batches=N` compares the batches of a pipeline's ranks in every Nth step, by hashes that ranks tell each
        other without waiting: a rank that was given another one ends the pipeline (`PipelineFault`) some steps later,
        with rank, step and argument. The first batch is compared always, before it runs.

        `checksums=True` lets every message of a step travel with checksums of its bits. The rank that receives other
        bits than were sent ends the pipeline (`PipelineFault`), with rank and message. It costs about a millisecond per
        MB on each side, on GPUs also waits for the device, and is refused with backend="cudagraph". Sums over replicas
        carry none.

        `survive=True` lets training go on when processes end: those of the same rank in other replicas compute for
        them, and the step that failed runs again, from memory (`docs/faults.md`, with what it needs). Every step then
        ends with a meeting of all processes.

        Raises `ZbfxError` if torch.distributed is not initialised, has another number of ranks, or if plans or the
        values of replicas differ.
        """
        with self.source.modes.fixed():
            on_mesh, device = isinstance(rank_or_mesh, DeviceMesh), self.device.type
            how = (timeout_s, zero, transport, independent, check_batches, checksums, survive)
            options = BindOptions(seed, on_nonfinite, on_new_shape, buckets, *how, on_mesh, device)
            finding = partial(process_place, self.compiled, self.source, rank_or_mesh, options)
            place = on_all_ranks("bind", finding, compared(options) | {"weights": kind_of_weights(weights)})
            with waiting(place.name, "the other ranks in bind, one of which"):
                timeout = timedelta(seconds=timeout_s)
                channels = Channels(place, self.device, timeout, transport, checks=checksums)
                ranks = OneOfMany(channels, check_batches)
            with ranks.binding():
                measures = self.compiled.options.measures and ranks.replicas > 1
                link = measured_link(ranks.channels) if measures else None
                compiled = replicated(self.compiled, ranks.replicas, link)
                compiled = compiled.sharded() if zero else compiled
                variants = Variants(compiled, self.source, ranks, symbolic=options.is_symbolic)
                return bound_step(compiled, self.source, self.compiler, ranks, options, variants, weights)

    def __repr__(self) -> str:
        stages, ranks, microbatches = len(self.stages), len(self.programs), self.schedule.microbatches
        return f"Pipeline({self.schedule.name}: {stages} stages on {ranks} ranks, {microbatches} microbatches)"

    def __deepcopy__(self, memo: object) -> Pipeline:
        raise ZbfxError("a pipeline holds graphs with fake tensors and cannot be copied; call zbfx.compile again")

    def __reduce__(self) -> str:
        raise ZbfxError("a pipeline holds graphs with fake tensors and cannot be pickled; call zbfx.compile again")
