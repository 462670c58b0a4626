"""Which models of transformers go from a folder through a pipeline into a folder: each beside plain transformers.

    python benchmarks/coverage/disk_zoo.py [--workers 32] [--only gpt2 mixtral]

The library saves a small model with random weights. A second one, on the meta device, gets them over three ranks in
one process, trains two steps, and is exported. What `from_pretrained` makes of that must have the loss and logits that
the trained pipeline evaluates, and the tensors, in bits, and outputs of a plain model with the `full_state_dict`. Each
model runs in a process of its own, with a time limit, `--workers` of them at a time. Prints a row for each, and counts
them, by family and by kind; `--rows FILE...` counts those of earlier runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks.coverage.disk_cases import MORE_CASES
from benchmarks.coverage.model_zoo import Progress, Row, run_apart, versions
from benchmarks.coverage.seen_cases import SEEN_CASES
from benchmarks.coverage.zoo_cases import CASES, Case, batch_of, model_of

STAGES, MICROBATCHES, STEPS = 3, 2, 2
# Of a loss and of logits, relative; the library computes many losses in float32.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-6}
MORE = (*MORE_CASES, *SEEN_CASES)
ALL = (*CASES, *MORE)


def examine(case: Case, progress: Progress) -> None:
    """Raises where anything differs."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    plain: Any = model_of(case)
    progress.note(model=type(plain).__name__, dtype=str(case.dtype).removeprefix("torch."), kinds=kinds_of(plain))
    with tempfile.TemporaryDirectory() as root:
        plain.save_pretrained(f"{root}/base")
        with torch.device("meta"):
            model: Any = model_of(case)
        batches = [batch_of(case, plain, seed=k) for k in range(MICROBATCHES)]
        pipe = zbfx.compile(
            model,
            stages=STAGES,
            microbatches=MICROBATCHES,
            example_kwargs=batches[0],
            schedule="zb-h1",
            device="cpu",
            check=False,
        )
        progress.note(traces=True, cuts=True)
        step = pipe.run_local(weights=f"{root}/base", seed=0)
        optimizer = torch.optim.SGD(step.parameters(), lr=0.01)
        for _ in range(STEPS):
            step.run_split([((), batch) for batch in batches])
            optimizer.step()
            optimizer.zero_grad()
        step.export(f"{root}/out", max_shard_size="20KB")
        loaded, info = type(model).from_pretrained(f"{root}/out", output_loading_info=True, dtype=case.dtype)
        assert not any(info.values()), f"from_pretrained reports {info}"
        compare(step, loaded.eval(), plain, batches, progress)


@torch.no_grad()
def compare(step: Any, loaded: nn.Module, plain: nn.Module, batches: list[dict[str, Any]], progress: Progress) -> None:
    """The trained pipeline, what was exported, and a plain model with the whole state."""
    before = plain.eval()(**batches[0])["loss"].item()
    plain.load_state_dict(step.full_state_dict())
    outputs = [loaded(**batch) for batch in batches]
    expected = sum(output["loss"].double() for output in outputs) / len(batches)
    joined = {name: joint(batches, name) for name in batches[0]}
    with_logits = isinstance(outputs[0].get("logits"), Tensor)
    evaluated = step.evaluate(**joined, outputs="logits") if with_logits else (step.evaluate(**joined), None)
    found, logits = evaluated[0].double(), evaluated[1]
    error = float(abs(found - expected) / abs(expected))
    progress.note(error=error)
    if before == outputs[0]["loss"].item():
        progress.note(refused="not refused, but two steps changed nothing")
    elif error > TOLERANCE[outputs[0]["loss"].dtype]:
        progress.note(refused=f"not refused, but the pipeline evaluates {found:.9g}, the exported model {expected:.9g}")
    elif with_logits and unlike({"logits": logits}, {"logits": joint(outputs, "logits")}, exactly=False):
        progress.note(refused="not refused, but the logits of the pipeline differ")
    elif wrong := unlike(loaded.state_dict(), plain.state_dict(), exactly=True):
        progress.note(refused=f"not refused, but {wrong} differ in bits")
    elif different := unlike(outputs[0], plain(**batches[0]), exactly=False):
        progress.note(refused=f"not refused, but {different} differ")
    else:
        progress.note(equal=True)


def joint(batches: Sequence[Mapping[str, Any]], name: str) -> Any:
    values = [batch[name] for batch in batches]
    return torch.cat(values) if isinstance(values[0], Tensor) and values[0].ndim else values[0]


def unlike(found: Mapping[str, Any], expected: Mapping[str, Any], *, exactly: bool) -> list[str]:
    """The entries that differ, of those that are tensors."""
    wrong = []
    for name, value in expected.items():
        if isinstance(value, Tensor):
            is_same = torch.equal(found[name], value)
            close = TOLERANCE.get(value.dtype, 0.0) * float(value.abs().max()) if value.numel() else 0.0
            if not is_same and (exactly or not torch.allclose(found[name], value, rtol=0.0, atol=close)):
                wrong.append(name)
    return wrong


def kinds_of(model: Any) -> tuple[str, ...]:
    """Of these a model of any family may be one."""
    is_tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    found = {"tied": is_tied, "encoder-decoder": bool(model.config.is_encoder_decoder)}
    return tuple(kind for kind, holds in found.items() if holds)


def is_present(case: Case) -> bool:
    """Whether the installed version of transformers has this architecture."""
    import transformers

    return case.architecture in transformers.CONFIG_MAPPING


def families_of(row: Row) -> set[str]:
    return {row.family, *row.kinds}


def summary(rows: Sequence[Row], absent: Sequence[Case]) -> list[str]:
    """What passed, by family and kind; at last the line with the sum."""
    families = Counter(family for row in rows for family in families_of(row))
    passed = Counter(family for row in rows if row.equal for family in families_of(row))
    lines = [f"{passed[family]:4} of {count:3} {family}" for family, count in sorted(families.items())]
    if absent:
        names = ", ".join(case.architecture for case in absent)
        lines.append(f"{len(absent):4} skipped, which this version of transformers does not have: {names}")
    return [*lines, f"{sum(row.equal for row in rows)} of {len(rows)} models pass ({versions()})"]


def rows_of(cases: Sequence[Case], workers: int, limit_s: float) -> Iterator[Row]:
    """The rows of all cases, each as soon as it is known."""
    with ThreadPoolExecutor(workers) as threads:
        try:
            runs = [threads.submit(run_apart, case, limit_s, examine, is_started=True) for case in cases]
            for run in as_completed(runs):
                yield run.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ARCHITECTURE", help="these architectures alone")
    parser.add_argument("--more", action="store_true", help="those of disk_cases.py and seen_cases.py alone")
    parser.add_argument("--part", default="0/1", help="K/N: the Kth of N parts of the table")
    parser.add_argument("--workers", type=int, default=1, help="how many models at a time")
    parser.add_argument("--limit-s", type=float, default=180.0, help="seconds that one architecture may take")
    parser.add_argument("--rows", type=Path, nargs="+", help="sum up rows that earlier runs printed")
    options = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    if options.rows:
        lines = [line for path in options.rows for line in path.read_text().splitlines() if line.startswith("{")]
        known = {(row["architecture"], row["family"]): Row(**row) for row in map(json.loads, lines)}
        print(*summary(list(known.values()), []), sep="\n")
        return 0
    part, parts = map(int, options.part.split("/"))
    chosen = [
        case for case in (MORE if options.more else ALL) if not options.only or case.architecture in options.only
    ][part::parts]
    present = [case for case in chosen if is_present(case)]
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, stop)
    try:
        for row in rows_of(present, options.workers, options.limit_s):
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {len(rows)} of {len(present)}")
    print(*summary(rows, [case for case in chosen if not is_present(case)]), sep="\n", flush=True)
    return 0 if len(rows) == len(present) and all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
