"""Which models of the transformers and timm libraries compile: a table of architectures, each against plain autograd.

    python benchmarks/coverage/model_zoo.py --markdown docs/models.md

Every model is built by the library from a small configuration, with random weights and in float64 where its operators
exist in float64, and returns its own loss. It is cut into four stages; one step of two microbatches must give the
gradients of plain autograd that accumulates over the same microbatches. Each model runs in a process of its own, with
a time limit, so that a crash or a hang costs one row.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks.coverage import zoo_timm
from benchmarks.coverage.zoo_cases import CASES, TIMM_CASES, Case, batch_of, model_of
from zbfx.errors import TraceError, ZbfxError

STAGES, MICROBATCHES = 4, 2
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# A gradient whose largest entry is below this part of the largest of all is zero but for rounding (the bias of a key
# projection is one): it is compared with the latter.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Row:
    """What became of one architecture; `refused` is None where its gradients are equal."""

    architecture: str
    family: str
    model: str = ""
    dtype: str = ""
    nodes: int | None = None
    traces: bool = False
    cuts: bool = False
    equal: bool = False
    error: float | None = None  # largest difference of a gradient, relative to its largest entry
    refused: str | None = None
    compile_s: float | None = None
    kinds: tuple[str, ...] = ()  # what a benchmark counts beside families


@dataclass
class Progress:
    """The fields of a row as far as they are known."""

    known: dict[str, Any] = field(default_factory=dict)

    def note(self, **fields: Any) -> None:
        self.known |= fields


def examine(case: Case, progress: Progress) -> None:
    """Compile one architecture, run a step, compare."""
    torch.manual_seed(0)
    model = model_of(case)
    shown = model.model if isinstance(model, zoo_timm.Classifier) else model
    progress.note(model=type(shown).__name__, dtype=str(case.dtype).removeprefix("torch."))
    batches = [batch_of(case, model, seed=k) for k in range(MICROBATCHES)]
    expected = plain_gradients(copy.deepcopy(model), batches)
    begun = perf_counter()
    pipe = zbfx.compile(
        model, stages=STAGES, microbatches=MICROBATCHES, example_kwargs=batches[0], schedule="zb-h1", device="cpu"
    )
    progress.note(traces=True, cuts=True, compile_s=perf_counter() - begun, nodes=len(pipe.compiled.joint.graph.nodes))
    pipe.run_local().run_split([((), batch) for batch in batches])
    error, wrong = difference(gradients(model), expected)
    progress.note(error=error)
    if wrong:
        progress.note(refused=f"not refused, but wrong: {wrong}")
    elif error > TOLERANCE[case.dtype]:
        progress.note(refused="not refused, but the gradients differ")
    else:
        progress.note(equal=True)


def plain_gradients(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | None]:
    for batch in batches:
        output = model(**batch)
        loss = output["loss"] if isinstance(output, dict) else output.loss
        (loss / len(batches)).backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every parameter's gradient; None for one that has none."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def difference(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> tuple[float, str | None]:
    """The largest relative difference, and what is wrong about which gradients are there."""
    present = {name: gradient for name, gradient in expected.items() if gradient is not None}
    for name in expected:
        if (found[name] is None) != (name not in present):
            return float("inf"), f"{name} has {'no' if found[name] is None else 'a'} gradient"
    largest = max(float(gradient.abs().max()) for gradient in present.values())
    errors = [0.0]
    for name, wanted in present.items():
        have = found[name]
        assert have is not None
        scale = float(wanted.abs().max())
        errors.append(float((have - wanted).abs().max()) / (scale if scale > ROUNDING * largest else largest))
    return max(errors), None


def reason(error: BaseException) -> str:
    """The first line of a refusal; an error that is no refusal says so, with the place that raised it."""
    text = re.sub(r"\S*/site-packages/", "", " ".join(str(error).split()))
    if isinstance(error, ZbfxError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"not a refusal: {type(error).__name__}: {text[:300]} ({Path(frame.filename).name}:{frame.lineno})"


Examine = Callable[[Case, Progress], None]


def work(case: Case, results: Connection, examine: Examine) -> None:
    """The body of a case's process: sends its row."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    progress = Progress()
    try:
        examine(case, progress)
    except BaseException as error:
        traced = progress.known.get("traces", False) or (isinstance(error, ZbfxError) and not is_trace_error(error))
        progress.note(traces=traced, refused=reason(error))
        if os.environ.get("ZOO_TRACEBACK"):
            traceback.print_exc()
    results.send(Row(case.architecture, case.family, **progress.known))


def is_trace_error(error: BaseException) -> bool:
    return isinstance(error, TraceError)


def run_apart(case: Case, limit_s: float, examine: Examine = examine, *, is_started: bool = False) -> Row:
    """The row of one case, from a process that ends at the time limit: a fork, or one that is started anew, as threads
    want it."""
    context: Any = multiprocessing.get_context("spawn" if is_started else "fork")  # a fork imports nothing
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(case, sender, examine))
    process.start()
    sender.close()
    try:
        if receiver.poll(limit_s):
            row: Row = receiver.recv()
            return row
        return Row(case.architecture, case.family, refused=f"not a refusal: nothing after {limit_s:.0f} s")
    except EOFError:
        process.join()
        return Row(case.architecture, case.family, refused=f"not a refusal: exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def shown_error(row: Row) -> str:
    if row.error is None:
        return "-"
    return "0" if row.error == 0 else f"{row.error:.0e}"


def cells(row: Row) -> list[str]:
    """One line of either table."""
    marks = ["yes" if value else "no" for value in (row.traces, row.cuts, row.equal)]
    return [row.family, row.architecture, row.model, row.dtype, *marks, shown_error(row), row.refused or ""]


HEADINGS = (
    "family",
    "architecture",
    "model",
    "dtype",
    "traces",
    "cuts at p=4",
    "gradients equal",
    "error",
    "refused because",
)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(*HEADINGS)
    for row in rows:
        shown.add_row(*cells(row))
    return shown


def versions() -> str:
    import transformers

    found = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    if zoo_timm.installed():
        from importlib.metadata import version

        found += f", timm {version('timm')}"
    return found


def summary(rows: Sequence[Row]) -> str:
    passed = sum(row.equal for row in rows)
    return f"{passed} of {len(rows)} architectures pass ({passed / max(1, len(rows)):.0%})"


def markdown(rows: Sequence[Row]) -> str:
    """The page of the docs."""
    lines = [
        "# Models that were tried",
        "",
        "Made by `python benchmarks/coverage/model_zoo.py --markdown docs/models.md`: do not edit. " + versions() + ".",
        "",
        f"{summary(rows)}.",
        "",
        "Each model is built by its library from a small configuration, unmodified, with random weights, and",
        f"returns its own loss (for timm: the cross entropy of its classes). zbfx cuts it into {STAGES} stages,",
        f"balanced, and runs a step of {MICROBATCHES} microbatches in ZB-H1 order. The gradients must be those of",
        "plain autograd that accumulates over the same microbatches: within 1e-10 of the largest entry of each in",
        "float64, 1e-5 in float32 (mixtures of experts, whose grouped product exists in no other precision on a",
        "CPU, and XGLM, which fills masks with float32's least number). *Error* is the largest such difference, 0",
        "where all bits are equal; a gradient that is zero but for rounding is compared with the largest of all.",
        "Models with batch norms and those of timm are in training mode, the others in evaluation mode, which",
        "switches dropout off; MaxViT too, whose gradients are not determined in training mode: a change of 1e-15 in",
        "the pictures changes them by as much as they are large.",
        "",
        "The library's CTC loss looks at the values of the labels and is refused, as the row of Wav2Vec2 shows; the",
        "other models of raw audio are tried with a classifier on top.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.architecture for case in (*CASES, *TIMM_CASES)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="ARCHITECTURE", help="these architectures alone")
    parser.add_argument("--limit-s", type=float, default=180.0, help="seconds that one architecture may take")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, one a line, in place of the table")
    parser.add_argument("--rows", type=Path, help="take the rows that an earlier run printed as JSON from this file")
    parser.add_argument("--markdown", type=Path, help="write the page of the docs")
    return parser.parse_args(arguments)


def rows_of_run(options: argparse.Namespace) -> list[Row]:
    """Run the architectures that were asked for, one after the other; every row is printed when it is there."""
    import transformers

    transformers.logging.set_verbosity_error()
    rows: list[Row] = []
    cases: tuple[Case, ...] = CASES
    if zoo_timm.installed():
        declared = zoo_timm.declare_operators()
        import timm

        assert timm.is_model("resnet10t"), declared
        cases = (*CASES, *TIMM_CASES)
    for case in cases:
        if options.only and case.architecture not in options.only:
            continue
        rows.append(run_apart(case, options.limit_s))
        if options.json:
            print(json.dumps(asdict(rows[-1])), flush=True)
        else:
            print(*cells(rows[-1]), sep=" | ", file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.rows:
        rows = [Row(**json.loads(line)) for line in options.rows.read_text().splitlines()]
    else:
        rows = rows_of_run(options)
    if not options.json:
        Console(width=200).print(table(rows))
        print(summary(rows), f"({versions()})")
    if options.markdown:
        options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
