"""Ranks of a pipeline on GPUs for test_gpu.py: `torchrun ... tests/gpu/gpu_worker.py <scenario> <folder>`.

A scenario is a function of the device that returns a picklable result, written to `<folder>/<rank>.pt`. Ranks share
GPUs where there are fewer.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks.gpt import GPT, GPTConfig, next_token_loss
from zbfx.comm import copies
from zbfx.comm.copies import INBOX_BYTES, SLOT_BYTES, close_lines, open_lines, room
from zbfx.comm.place import find_place
from zbfx.options import BACKENDS
from zbfx.runtime.fingerprint import fingerprints

SMALL = GPTConfig(layers=6, hidden=256, heads=4, sequence=128, vocabulary=512)
# Large enough for the device to be what steps wait for: the host pauses for some ms now and then.
STEADY = GPTConfig(layers=4, hidden=2048, heads=16, sequence=1024, vocabulary=2048)
MICROBATCHES = 6
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "interleaved-1f1b")


def model_and_batch(config: GPTConfig, rows: int, device: torch.device) -> tuple[GPT, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = GPT(config).to(device, torch.bfloat16)
    data = torch.randint(config.vocabulary, (2, rows, config.sequence), generator=torch.Generator().manual_seed(1))
    return model, (data[0].to(device), data[1].to(device))


def compiled(model: GPT, batch: tuple[Tensor, Tensor], microbatches: int, **options: Any) -> zbfx.Pipeline:
    ids, targets = batch
    rows = len(ids) // microbatches
    return zbfx.compile(
        model,
        stages=dist.get_world_size(),
        microbatches=microbatches,
        example_inputs=(ids[:rows],),
        example_targets=targets[:rows],
        loss_fn=next_token_loss,
        **options,
    )


def gradients(step: Any, *batch: Tensor) -> dict[str, Tensor]:
    """Loss and gradients of the third of three equal steps: by then every backend has captured and replayed. An
    evaluation between them changes nothing."""
    before = step.count
    for count in range(3):
        if count == 2:
            step.evaluate(*batch)
        for parameter in step.parameters():
            parameter.grad = None
        loss = step(*batch)
    assert step.count == before + 3
    step.close()
    return {"loss": loss.cpu(), **{name: p.grad.cpu() for name, p in step.named_parameters()}}


def equal(device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Loss and gradients by schedule and backend, under deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    one = compiled(model, batch, MICROBATCHES, schedule="1f1b")
    found = {"one process": gradients(one.run_local(), *batch)}
    cases = [(schedule, "cudagraph") for schedule in SCHEDULES]
    cases += [(schedule, "eager") for schedule in ("1f1b", "zb-2p")]
    cases += [("zb-2p", "inductor"), ("zb-2p", "cudagraph+inductor")]
    if dist.get_world_size() > 2:  # ranks between others, with messages both ways
        cases = [("zb-v", "cudagraph"), ("interleaved-1f1b", "cudagraph"), ("zb-2p", "eager")]
    for schedule, backend in cases:
        if dist.get_world_size() == 1 and schedule in ("zb-v", "interleaved-1f1b"):
            continue
        pipe = compiled(model, batch, MICROBATCHES, schedule=schedule, backend=backend)
        for transport in transports():
            found[f"{schedule} {backend} {transport}"] = gradients(pipe.bind(transport=transport), *batch)
    return found


def one_microbatch(device: torch.device) -> dict[str, dict[str, Tensor]]:
    """The same for steps of one microbatch: each rank waits for every message."""
    torch.use_deterministic_algorithms(True)
    model, batch = model_and_batch(SMALL, 2, device)
    found = {"one process": gradients(compiled(model, batch, 1, schedule="1f1b").run_local(), *batch)}
    for schedule, backend in product(("1f1b", "zb-v", "interleaved-1f1b"), ("eager", "cudagraph")):
        pipe = compiled(model, batch, 1, schedule=schedule, backend=backend)
        found[f"{schedule} {backend}"] = gradients(pipe.bind(), *batch)
    return found


def transports() -> tuple[str, ...]:
    """NCCL takes one process for each GPU."""
    if dist.get_world_size() == 1:
        return ("auto",)
    return ("copies",) if dist.get_world_size() > torch.cuda.device_count() else ("copies", "group")


def masters(device: torch.device) -> dict[str, dict[str, Any]]:
    """By case: losses of steps and evaluations under autocast, between which weights are written in place, and the most
    memory that a step holds beside what is predicted for it. Graphs are captured before the first write."""
    torch.use_deterministic_algorithms(True)
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    model.float()
    first = {name: value.clone() for name, value in model.state_dict().items()}

    def run(step: Any) -> list[Tensor]:
        losses = []
        for factor in (1.0, 1.0, 1.0, 2.0, 0.5):
            with torch.no_grad():
                for parameter in step.parameters():
                    parameter.mul_(factor)
                    parameter.grad = None
            losses += [step(*batch).cpu(), step.evaluate(*batch).cpu()]
        step.close()
        return losses

    def pipe_of(**options: Any) -> zbfx.Pipeline:
        model.load_state_dict(first)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return compiled(model, batch, MICROBATCHES, **options)

    found: dict[str, dict[str, Any]] = {"one process": {"losses": run(pipe_of(prologue=False).run_local())}}
    for backend in BACKENDS:
        pipe = pipe_of(schedule="zb-2p", backend=backend, costs="measure")
        assert pipe.compiled.has_prologues
        torch.cuda.synchronize(device)
        static = pipe.memory[dist.get_rank()].static
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        losses = run(pipe.bind())
        held = torch.cuda.max_memory_allocated(device) - before
        predicted = pipe.memory[dist.get_rank()].peak_bytes - static.parameters - static.batch
        found[backend] = {"losses": losses, "held": held, "predicted": predicted}
    return found


def plain(device: torch.device) -> dict[str, Tensor]:
    """The same by autograd alone."""
    torch.use_deterministic_algorithms(True)
    model, (ids, targets) = model_and_batch(SMALL, MICROBATCHES * 2, device)
    losses = []
    for rows in range(0, len(ids), 2):
        loss = next_token_loss(model(ids[rows : rows + 2]), targets[rows : rows + 2])
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    named = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": torch.stack(losses).mean().cpu(), **named}


def steady(device: torch.device) -> dict[str, Any]:
    """200 steps, NCCL as it comes: step times, and memory after 20 steps and at the end."""
    model, batch = model_and_batch(STEADY, 32, device)
    pipe = compiled(model, batch, 4, schedule="zb-2p", backend=sys.argv[3], check=False)
    step = pipe.bind()
    optimizer = torch.optim.SGD(step.parameters(), lr=1e-3)
    seconds, allocated, reserved = [], [], []
    for _ in range(200):
        dist.barrier()
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        step(*batch)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
        allocated.append(torch.cuda.memory_allocated(device))
        reserved.append(torch.cuda.memory_reserved(device))
    step.close()
    late = seconds[10:]
    return {
        "median_s": median(late),
        "slowest_s": max(late),
        "slow": sum(s > 1.5 * median(late) for s in late),
        "allocated": (allocated[19], allocated[-1]),
        "reserved": (reserved[19], reserved[-1]),
    }


def alone(device: torch.device) -> dict[str, dict[str, Tensor]]:
    return {"plain": plain(device), **equal(device)}


def optimizer(device: torch.device) -> dict[str, dict[str, Any]]:
    """Training with `PostValidated`, by case: with a barrier and without, where every step clips and where none does;
    one is profiled, and the gradients of two are infinite on one rank."""
    torch.use_deterministic_algorithms(True)
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    found: dict[str, dict[str, Any]] = {}
    settings = [(1.0, True), (1e-2, True), (1e3, True), (1.0, False)]
    cases = [("zb-h2", "cudagraph", settings), ("zb-h2", "eager", settings[:2]), ("1f1b", "cudagraph", settings[:2])]
    cases += [("zb-v", "cudagraph", settings[:2])]
    if dist.get_world_size() > 2:  # ranks between others, with messages both ways
        cases = [(schedule, "cudagraph", settings[1:2]) for schedule in ("1f1b", "zb-v", "interleaved-1f1b")]
    for schedule, backend, chosen in cases:
        pipe = compiled(model, batch, MICROBATCHES, schedule=schedule, backend=backend)
        for (max_norm, fused), sync in product(chosen, (True, False)):
            model.load_state_dict(first)
            found[f"{schedule} {backend} {max_norm} {fused} {sync}"] = validated(pipe, batch, max_norm, fused, sync)
    return found


def validated(
    pipe: zbfx.Pipeline, batch: tuple[Tensor, Tensor], max_norm: float, fused: bool, sync: bool
) -> dict[str, Any]:
    """Eight steps, of which the fifth is profiled. Gradients of the sixth are spoilt on the last rank of the pipeline,
    and of the seventh on the first: one of both begins the chain along which norms travel, so that no rank steps early
    and forwards run once."""
    step = pipe.bind()
    for parameter in step.parameters():
        parameter.grad = None
    inner = torch.optim.AdamW(step.parameters(), lr=1e-3, fused=fused)
    post = zbfx.optim.PostValidated(inner, step, max_norm=max_norm, sync=sync)
    losses = []
    for count in range(8):
        if count == 4:
            step.profile(*batch)
        else:
            losses.append(step(*batch))
        if (count, dist.get_rank()) in ((5, dist.get_world_size() - 1), (6, 0)):
            next(p.grad for p in step.parameters() if p.grad is not None).fill_(torch.inf)
        post.step()
        post.zero_grad()
    post.settle()
    step.close()
    parameters = {name: p.detach().cpu() for name, p in step.named_parameters()}
    return {"losses": torch.stack(losses).cpu(), "parameters": parameters, "counts": asdict(post.counts)}


def lines(device: torch.device) -> list[bool]:
    """Messages of all sizes, both ways at once, sent before they are received and after, out of a graph and in one."""
    sizes = [0, 1, 1000, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, INBOX_BYTES, 5 * SLOT_BYTES + 3]
    place = find_place(2, None)
    own, lined = open_lines([(0, 1), (1, 0)], place, device, "test", room())
    assert lined == {(0, 1), (1, 0)}
    outgoing, incoming = own[place.rank, 1 - place.rank], own[1 - place.rank, place.rank]

    def content(rank: int, size: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(10 * size + rank)
        return torch.randint(256, (size,), dtype=torch.uint8, device=device, generator=generator)

    sent = [content(place.rank, size) for size in sizes]
    received = [torch.empty_like(value) for value in sent]
    expected = [content(1 - place.rank, size) for size in sizes]

    def swap() -> None:
        leaving = [outgoing.transfer(value) for value in sent]
        for value in received:
            incoming.transfer(value).wait()
        for transfer in leaving:
            transfer.wait()

    def equal_at_once() -> bool:
        torch.cuda.synchronize(device)
        found = all(torch.equal(value, other) for value, other in zip(received, expected, strict=True))
        for value in received:
            value.zero_()
        return found

    time.sleep(place.rank * 0.5)
    swap()
    results = [equal_at_once()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swap()
    for turn in range(5):
        time.sleep(0.2 * ((turn + place.rank) % 2))
        graph.replay()
        results.append(equal_at_once())
    close_lines(list(own.values()), "test")
    return results


def apart(device: torch.device) -> tuple[int, int]:
    """Lines of this process, and pairs that have them, where the processes think that they run on different hosts, and
    where they have queues for fewer."""
    pairs, place = [(0, 1), (1, 0)], find_place(2, None)
    few, _ = open_lines(pairs, place, device, "test", 1)
    setattr(copies, "host", lambda: f"host {dist.get_rank()}")  # noqa: B010
    own, lined = open_lines(pairs, place, device, "test", room())
    return len(few) + len(own), len(lined)


def failing(device: torch.device) -> None:
    """Rank 1 fails in its third step, in the middle of it where actions run one by one, and lives on; rank 0 waits for
    it on its device."""
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    backend = sys.argv[3]
    step = compiled(model, batch, MICROBATCHES, schedule="zb-h1", backend=backend).bind()
    for count in range(3):
        if count == 2 and dist.get_rank() == 1:
            step.engine.runners[0].calls[-1].run = lambda box: 1 / 0
            try:
                step(*batch) if backend == "eager" else step.worker.guarded(lambda: 1 / 0)
            except zbfx.PipelineFault:
                time.sleep(60)
        step(*batch).item()


def index_out_of_bounds(box: list[Any]) -> Any:
    """A CUDA error that stays: nothing can run on the device after it."""
    values, index = torch.zeros(1, device="cuda"), torch.tensor([5], device="cuda")
    values[index].sum().item()
    raise AssertionError("a device-side assert")


def run_out(box: list[Any]) -> Any:
    return torch.empty(1 << 60, dtype=torch.uint8, device="cuda")


def die(box: list[Any]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES: dict[str, Callable[[list[Any]], Any]] = {
    "cuda error": index_out_of_bounds,
    "out of memory": run_out,
    "raise": lambda box: 1 / 0,
    "killed": die,
}


def fault(device: torch.device) -> None:
    """Rank 1 fails: a phase in its first step (while rank 0 may load, or wait) or in its third, its optimizer, or
    between calls. Rank 0 does not look at losses: it launches steps until its queue is full. What each rank raises is
    written beside when it was, and the rank's end is as its user's would be: by the exception."""
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    _, _, folder, backend, failure, place = sys.argv
    pipe = compiled(model, batch, MICROBATCHES, schedule="zb-h1", backend=backend, check=False)
    step = pipe.bind(timeout_s=120.0, transport=transports()[-1])  # NCCL where there are two GPUs
    begun = Path(folder) / "begun"
    fails_at = 0 if place == "first step" else 2
    inner = torch.optim.SGD(step.parameters(), lr=0.0)
    optimizer = zbfx.optim.PostValidated(inner, step, sync=True) if place == "optimizer" else None
    for count in range(5000):
        if count == fails_at and dist.get_rank() == 1:
            begun.write_text(str(time.time()))
            if place == "optimizer":
                setattr(inner, "step", lambda *_: FAILURES[failure]([]))  # noqa: B010
            elif place == "between calls":
                FAILURES[failure]([])
            else:
                step.engine.forget()  # captured steps are launched again
                step.engine.runners[0].calls[-1].run = FAILURES[failure]
        step(*batch)
        if optimizer is not None:
            optimizer.step()


def missing(device: torch.device) -> None:
    """Rank 1 takes part in two steps; rank 0 queues as many as it can, and waits for rank 1 no longer than allowed."""
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    backend = sys.argv[3]
    step = compiled(model, batch, MICROBATCHES, schedule="zb-h1", backend=backend).bind(timeout_s=8.0)
    for count in range(5000):
        if count == 2 and dist.get_rank() == 1:
            time.sleep(60)
        step(*batch)


class WaitsForTheDevice(TorchDispatchMode):
    """Makes the first call of every op, on every layout, wait for all that the device has to do, as loading its kernel
    may."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = f"{func}{tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype), (args, kwargs))}"
        if call not in self.seen and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
            self.seen.add(call)
        return func(*args, **(kwargs or {}))


def loading(device: torch.device) -> dict[str, list[Tensor]]:
    """Losses by case where whatever a rank calls first waits for its whole device. Where phases are compiled, their
    first calls do. All optimizer steps clip, but for the third, which is skipped: all ranks know so at once, run no
    forwards again, and tell each other why."""
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    found: dict[str, list[Tensor]] = {}
    cases = [(schedule, "eager") for schedule in ("zb-2p", "zb-v", "interleaved-1f1b")]
    for schedule, backend in (*cases, ("zb-v", "cudagraph"), ("zb-v", "inductor")):
        step = compiled(model, batch, MICROBATCHES, schedule=schedule, backend=backend).bind(timeout_s=150.0)
        for call in {id(call.phase): call for call in step.engine.runners[0].calls}.values():
            call.run = waits_once(call.run)
        inner = torch.optim.SGD(step.parameters(), lr=0.0)
        optimizer = zbfx.optim.PostValidated(inner, step, max_norm=1e-3, sync=False)
        with WaitsForTheDevice() if backend != "inductor" else nullcontext():
            losses = found[f"{schedule} {backend}"] = []
            for count in range(4):
                losses.append(step(*batch).cpu())
                for parameter in step.parameters() if count == 2 else ():
                    parameter.grad = torch.full_like(parameter, torch.inf)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.settle()
        counts = optimizer.counts
        assert (counts.clipped, counts.skipped, counts.repeated) == (3, 1, 3), counts
        step.close()
    return found


def unwaited(device: torch.device) -> dict[str, list[Tensor]]:
    """Losses by case of steps in a row in which PyTorch lets the host wait for the device nowhere. Batches in the
    host's memory are gone once a step is called."""
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    found: dict[str, list[Tensor]] = {}
    for backend, transport, place in product(("eager", "cudagraph"), transports(), ("cuda", "cpu", "pinned")):
        step = compiled(model, batch, MICROBATCHES, schedule="zb-2p", backend=backend).bind(transport=transport)
        optimizer = torch.optim.SGD(step.parameters(), lr=0.0)
        losses = [step(*batch) for _ in range(3)]
        given = [[t.cpu() if place == "cpu" else t.cpu().pin_memory() for t in batch] for _ in range(3)]
        torch.cuda.set_sync_debug_mode("error")
        for host in given:
            optimizer.zero_grad(set_to_none=False)
            losses.append(step(*(batch if place == "cuda" else host)))
            for tensor in host:
                tensor.zero_()
        torch.cuda.set_sync_debug_mode("default")
        found[f"{backend} {transport} {place}"] = [loss.cpu() for loss in losses]
        step.close()
    return found


def emptied(device: torch.device) -> dict[str, list[Tensor]]:
    """Losses by backend of steps and evaluations before which PyTorch gives back all memory that it keeps: they ask for
    it again while other ranks' messages wait."""
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    found: dict[str, list[Tensor]] = {}
    for backend, schedule in product(("eager", "cudagraph"), ("gpipe", "zb-v")):
        step = compiled(model, batch, MICROBATCHES, schedule=schedule, backend=backend).bind(timeout_s=60.0)
        losses = found[f"{backend} {schedule}"] = []
        for _ in range(4):
            torch.cuda.empty_cache()
            losses.append(step(*batch).cpu())
            torch.cuda.empty_cache()
            losses.append(step.evaluate(*batch).cpu())
        step.close()
    return found


def profiled(device: torch.device) -> dict[str, tuple[int, int, int, bool]]:
    """By backend: actions and prologues planned and profiled of all ranks, Ws beside Bs on this one, and whether losses
    before, while and after steps are profiled are equal."""
    torch.use_deterministic_algorithms(True)
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    found: dict[str, tuple[int, int, int, bool]] = {}
    estimated = compiled(model, batch, MICROBATCHES, schedule="zb-2p").schedule.costs
    costs = replace(estimated, stages=tuple(replace(c, beside_s=c.backward_input_s) for c in estimated.stages))
    for backend in BACKENDS:
        step = compiled(model, batch, MICROBATCHES, schedule="zb-2p", backend=backend, costs=costs).bind()
        losses, spans = [step(*batch).cpu()], 0
        for _ in range(2):
            spans = sum(len(rank) for rank in step.profile(*batch).spans)
            losses.append(step(*batch).cpu())
        pipe = step.engine.pipe
        planned = sum(len(order) for order in pipe.schedule.ranks) + sum(bool(stage.kept) for stage in pipe.stages)
        same = all(torch.equal(loss, losses[0]) for loss in losses)
        found[backend] = (planned, spans, len(step.engine.runners[0].besides), same)
        step.close()
    return found


def waits_once(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    waits = [torch.cuda.synchronize]

    def wrapper(box: list[Any]) -> Any:
        while waits:
            waits.pop()()
        return run(box)

    return wrapper


def started(device: torch.device) -> dict[str, Any]:
    """Warnings of binds to models with a seed for each rank, and with one; what a step says of a model that was moved,
    and its gradients once it is back, in other memory and with other values."""
    found: dict[str, Any] = {"warnings": []}
    for alike in (False, True):
        model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
        torch.manual_seed(0 if alike else dist.get_rank())
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        pipe = compiled(model, batch, MICROBATCHES, schedule="zb-h1", backend="cudagraph")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = pipe.bind()
        found["warnings"].append([str(note.message) for note in told if note.category is UserWarning])
        if not alike:
            step.close()
    found["hashes"] = [fingerprints(p.to(d) for p in model.parameters()) for d in (device, torch.device("cpu"))]
    for _ in range(3):
        step(*batch)
    model.cpu()
    try:
        step(*batch)
    except zbfx.InputError as refusal:
        found["refusal"] = str(refusal)
    blocker = [torch.full_like(p, torch.nan, device=device) for p in model.parameters()]  # in the memory of before
    model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    found["captured"] = gradients(step, *batch)
    found["eager"] = gradients(compiled(model, batch, MICROBATCHES, schedule="zb-h1").bind(), *batch)
    found["blocked"] = len(blocker)
    return found


def measured(logits: Tensor, targets: Tensor) -> Any:
    right = (logits.argmax(-1) == targets).sum()
    metrics = {"right": (right, torch.ones_like(targets).sum()), "largest": zbfx.Metric(logits.abs().amax(), "max")}
    return next_token_loss(logits, targets), metrics


def chosen(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def outputs(device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """By backend, what forwards, evaluations and steps return, four times in turn: launched, captured and replayed."""
    torch.use_deterministic_algorithms(True)
    model, (ids, targets) = model_and_batch(SMALL, MICROBATCHES * 2, device)
    found: dict[str, list[dict[str, Any]]] = {}
    for backend in BACKENDS:
        pipe = zbfx.compile(
            model,
            stages=dist.get_world_size(),
            microbatches=MICROBATCHES,
            example_inputs=(ids[:2],),
            example_targets=targets[:2],
            loss_fn=measured,
            schedule="zb-2p",
            backend=backend,
        )
        step, rows = pipe.bind(), []
        for _ in range(4):
            scores = step.forward(ids, targets, outputs=chosen, everywhere=True)
            evaluated, measured_there = step.evaluate(ids, targets), dict(step.metrics)
            values = {"scores": scores, "evaluated": evaluated, "loss": step(ids, targets), **step.metrics}
            values |= {f"evaluated {name}": value for name, value in measured_there.items()}
            rows.append({name: value.cpu() for name, value in values.items()})
        rows[-1]["captured"] = [engine.captured is not None for engine in step.worker.engines]
        step.close()
        found[backend] = rows
    return found


def double_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def unlike(device: torch.device) -> dict[str, float]:
    """By backend, the largest error of losses and gradients of steps of unlike microbatches in float64, beside steps of
    the example's."""
    found: dict[str, float] = {}
    generator, alike = torch.Generator().manual_seed(0), [48, 48]
    for backend in BACKENDS:
        torch.manual_seed(0)
        model = GPT(replace(SMALL, layers=4, hidden=64)).double().to(device)
        plain = GPT(replace(SMALL, layers=4, hidden=64)).double().to(device)
        plain.load_state_dict(model.state_dict())
        example = torch.zeros(1, 48, dtype=torch.long, device=device)
        pipe = zbfx.compile(
            model,
            stages=dist.get_world_size(),
            microbatches=2,
            example_inputs=(example,),
            example_targets=(example,),
            loss_fn=double_loss,
            backend=backend,
            check=False,
        )
        step, worst = pipe.bind(on_new_shape="symbolic"), 0.0
        for lengths in ([64, 32, 96], alike, [32], alike, [64, 32, 96], alike, [96, 32, 32, 64, 48], alike):
            ids = [torch.randint(512, (1, length + 1), generator=generator).to(device) for length in lengths]
            rows = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in ids]
            plain.zero_grad()
            expected = torch.stack([double_loss(plain(x), y) for x, y in rows]).mean()
            expected.backward()
            for parameter in step.parameters():
                parameter.grad = None
            loss = step.run_split([(row, {}) for row in rows])
            worst = max(worst, float((loss - expected.detach()).abs()))
            for name, parameter in step.named_parameters():
                right = plain.get_parameter(name).grad
                assert parameter.grad is not None, name
                assert right is not None, name
                worst = max(worst, float((parameter.grad - right).abs().max()))
        step.close()
        found[backend] = worst
    return found


def checkpointed(device: torch.device, backend: str = "cudagraph") -> dict[str, dict[str, Any]]:
    """What a captured step has after three steps, and the losses of three more. It saves that, at once and again aside
    while these steps run; where that has been saved, it loads both, after steps of its own."""
    torch.use_deterministic_algorithms(True)
    folder = Path(sys.argv[2])
    model, batch = model_and_batch(SMALL, MICROBATCHES * 2, device)
    step = compiled(model, batch, MICROBATCHES, schedule="zb-2p", backend=backend).bind()
    adamw = torch.optim.AdamW(step.parameters(), lr=1e-3)
    post = zbfx.optim.PostValidated(adamw, step, max_norm=1e3)

    def three_losses() -> Tensor:
        losses = []
        for _ in range(3):
            losses.append(step(*batch))
            post.step()
            post.zero_grad()
        return torch.stack(losses).cpu()

    def state() -> dict[str, Tensor]:
        named = dict(step.named_parameters())
        moments = {
            f"{name} {key}": adamw.state[p][key] for name, p in named.items() for key in ("exp_avg", "exp_avg_sq")
        }
        return {name: value.detach().cpu().clone() for name, value in {**named, **moments}.items()}

    is_saved = (folder / "at once").is_dir()
    three_losses()
    found = {}
    if not is_saved:
        step.save(folder / "at once", optimizer=post)
        aside = step.save(folder / "aside", async_=True, optimizer=post)
        found["saved"] = {"state": state(), "losses": three_losses(), "count": step.count}
        aside.wait()
    for name in ("at once", "aside") if is_saved else ():
        step.load(folder / name, optimizer=post)
        found[name] = {"state": state(), "losses": three_losses(), "count": step.count}
    post.settle()
    found["captured"] = {"engines": [engine.captured is not None for engine in step.worker.engines]}
    step.close()
    return found


SCENARIOS: dict[str, Callable[[torch.device], Any]] = {
    "equal": equal,
    "masters": masters,
    "steady": steady,
    "alone": alone,
    "optimizer": optimizer,
    "one microbatch": one_microbatch,
    "lines": lines,
    "apart": apart,
    "started": started,
    "failing": failing,
    "missing": missing,
    "fault": fault,
    "loading": loading,
    "unwaited": unwaited,
    "emptied": emptied,
    "profiled": profiled,
    "outputs": outputs,
    "unlike": unlike,
    "checkpointed": checkpointed,
}


def main(scenario: str, folder: str, *_: str) -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("LIMIT_S", "265")), exit=True)  # what hangs says where
    rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", rank % devices)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo" if int(os.environ["WORLD_SIZE"]) > devices else "cpu:gloo,cuda:nccl")
    result = SCENARIOS[scenario](device)
    torch.save(result, Path(folder) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
