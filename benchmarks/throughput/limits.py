"""The bubble-free limit: a rank's own work for m microbatches, with nothing to wait for and one launch each.

Forward and whole (unsplit) backward of the rank's stages, gradients accumulated, no communication, captured as a
CUDA graph and replayed m times. A pipeline is at best as fast as its slowest rank by this measure.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.gpt import GPTConfig, next_token_loss
from benchmarks.measure import Runnable, reset_peak, synchronize
from benchmarks.place import Place, own_pieces
from benchmarks.stages import CONFIGS, GPTStage, LayerCosts, Piece, batch, stage
from benchmarks.throughput.cases import Case

WARMUP = 3


def limit(case: Case, place: Place) -> Runnable:
    """Replays of this rank's forward and backward, m of them a step."""
    reset_peak(place.device)
    counts, own = own_pieces(case, place, stages_per_rank=1, style="loop")
    stages = [stage(CONFIGS[case.config], piece, place.device, place.dtype) for piece in own.values()]
    works = [work(module, case, place) for module in stages]

    def microbatch() -> None:
        for run in works:
            run()

    replay = captured(microbatch, place.device)

    def step() -> None:
        for _ in range(case.m):
            replay()

    return Runnable(step, [parameter for module in stages for parameter in module.parameters()], counts)


def work(module: GPTStage, case: Case, place: Place) -> Callable[[], None]:
    """One microbatch's forward and backward of a stage on fixed inputs."""
    config = CONFIGS[case.config]
    ids, targets = batch(config, case.b, place.device)
    shape = (case.b, config.sequence, config.hidden)
    generator = torch.Generator(place.device).manual_seed(0)
    hidden, gradient = (
        torch.randn(shape, generator=generator, device=place.device, dtype=place.dtype) for _ in range(2)
    )
    loss_gradient = torch.tensor(1 / case.m, device=place.device)
    inputs = ids if module.piece.first else hidden.requires_grad_()

    def forward(x: Tensor) -> Tensor:
        output = module(x)
        return next_token_loss(output, targets) if module.piece.last else output

    if case.backend == "inductor":
        place.fresh_compiler(f"limit {case.config} {case.b} {module.piece}")
        forward = torch.compile(forward, dynamic=False)

    def run() -> None:
        inputs.grad = None  # written, not accumulated: the gradient of an input is sent, never summed
        torch.autograd.backward(forward(inputs), loss_gradient if module.piece.last else gradient)

    return run


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`run` as one CUDA graph; on a CPU `run` itself."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def layer_costs(name: str, b: int, place: Place) -> LayerCosts:
    """Embeddings and head in blocks, timed on this device as CUDA graphs of forward and backward."""
    config: GPTConfig = CONFIGS[name]
    case = Case("limit", name, b, 1, "bubble-free", "eager", "even")

    def seconds(piece: Piece) -> float:
        run = captured(work(stage(config, piece, place.device, place.dtype), case, place), place.device)
        return median(timed(run, place.device) for _ in range(10))

    block_s = seconds(Piece(0, 1, first=False, last=False))
    embedding_s = seconds(Piece(0, 1, first=True, last=False)) - block_s
    head_s = seconds(Piece(0, 1, first=False, last=True)) - block_s
    return LayerCosts(max(0.0, embedding_s / block_s), max(0.0, head_s / block_s))


def timed(run: Callable[[], None], device: torch.device, repeats: int = 5) -> float:
    """Mean seconds of `run`, started `repeats` times back to back."""
    synchronize(device)
    begun = perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (perf_counter() - begun) / repeats
