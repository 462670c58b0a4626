"""Files and command lines that are not what they should be: each ends in a clear error, or in a right result.

python benchmarks/proofs/fuzz_files.py --count 20000 --seed 0

Mutates plans on disk (bytes; and the JSON of their text, with a hash that fits, as a hostile writer would), cost
tables, orders and command lines of less than 100,000 actions. Prints a table by kind: refused, done, and wrong, which
is another exception than `ZbfxError`, a plan that computes something else, over 10 seconds of the processor, or over
1 GB. Exits 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zbfx
from zbfx.cli import main as command
from zbfx.errors import ZbfxError
from zbfx.plans.files import Contents, read_plan, write_plan

MOST_S, MOST_WAITED_S, MOST_BYTES = 10, 120, 10**9
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**30,
    0.5,
    -0.0,
    1e308,
    "",
    "F",
    "x" * 1000,
    [],
    {},
    [[]],
    {"a": 1},
]
COSTS = {
    "stages": [{"t_f": 2.0, "t_b": 3.0, "t_w": 5.0, "m_b": 4.0, "m_w": 1.0} for _ in range(3)],
    "t_comm": 7.0,
}
ORDERS = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"  # as torch writes them
LINES = [
    ["plan", "--costs", "{costs}", "--microbatches", "4", "--schedule", "zb-h1", "--budget", "0.05"],
    ["plan", "--costs", "{costs}", "--microbatches", "6", "--json", "--mem-limit", "2x", "--budget", "0.05"],
    ["show", "--costs", "{costs}", "--microbatches", "3", "--schedule", "1f1b", "--width", "80"],
    ["compare", "--costs", "{costs}", "--microbatches", "2", "--budget", "0.05"],
    ["plan", "--costs", "{costs}", "--microbatches", "2", "--order", "{orders}", "--budget", "0.05"],
]
WORDS = [
    "",
    "-",
    "--",
    "0",
    "-1",
    "1e9",
    "nan",
    "inf",
    "10000",  # three stages: 90,000 actions
    "zb-v",
    "ilp",
    "auto",
    "--json",
    "--help",
    "2x",
    "1,2,3",
    "é",
]


class OutOfTime(BaseException):
    """A case took longer than it may."""


def expire(*_: object) -> None:
    raise OutOfTime


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of a document: what holds it, and its key or index."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(entries):
        yield value, key
        yield from places(entry)


def changed(document: Any, draw: random.Random) -> Any:
    """A copy of a document with some entries changed, dropped, doubled or taken from elsewhere in it."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        found = list(places(document))
        if not found:
            break
        owner, key = draw.choice(found)
        other, elsewhere = draw.choice(found)
        how = draw.randrange(5)
        if how == 0:
            owner[key] = copy.deepcopy(draw.choice(ODD))  # which later changes write
        elif how == 1:
            del owner[key]
        elif how == 2:
            owner[key] = copy.deepcopy(other[elsewhere])
        elif how == 3 and isinstance(owner, list):
            owner.insert(key, copy.deepcopy(owner[key]))
        elif isinstance(owner[key], int | float):
            owner[key] = owner[key] + draw.choice((-1, 1, 1000, 0.5))
        else:
            owner[key] = [owner[key]]
    return document


def cut(content: bytes, draw: random.Random) -> bytes:
    """Bytes changed, dropped, or doubled."""
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 3, 20))):
        place = draw.randrange(max(1, len(found)))
        how = draw.randrange(4)
        if how == 0:
            found[place : place + 1] = bytes([draw.randrange(256)])
        elif how == 1:
            del found[place : place + draw.choice((1, 10, 1000, len(found)))]
        elif how == 2:
            found[place:place] = found[: draw.randrange(1, 100)]
        else:
            found[place:place] = draw.randbytes(draw.randrange(1, 20))
    return bytes(found)


class Fuzz:
    """The files that are right, and the cases made of them in a folder."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.model, self.x = folder, Model(), torch.randn(4, 6)
        self.pipe = zbfx.compile(
            self.model,
            stages=2,
            microbatches=2,
            example_inputs=(self.x[:2],),
            example_targets=self.x[:2],
            loss_fn=nn.functional.mse_loss,
            schedule="zb-h1",
            check=False,
        )
        self.pipe.save(folder / "right.plan")
        self.right = (folder / "right.plan").read_bytes()
        self.contents: Contents = read_plan(folder / "right.plan")
        self.expected = self.losses(self.pipe)
        self.file = folder / "case"

    def losses(self, pipe: zbfx.Pipeline) -> Tensor:
        self.model.zero_grad()
        loss = pipe.run_local(seed=1)(self.x, self.x)
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat([loss[None], *gradients])

    def load(self) -> zbfx.Pipeline:
        return zbfx.load_plan(self.file, self.model, nn.functional.mse_loss)

    def plan_bytes(self, draw: random.Random) -> None:
        self.file.write_bytes(cut(self.right, draw))
        assert torch.equal(self.losses(self.load()), self.expected), "other results than the plan that was saved"

    def plan_text(self, draw: random.Random) -> None:
        tensors = [torch.frombuffer(bytearray(octets), dtype=torch.uint8) for octets in self.contents.octets]
        write_plan(self.file, changed(self.contents.document, draw), tensors)
        self.load()

    def plan_graphs(self, draw: random.Random) -> None:
        """One of the fields of what was compiled: most of a text are the nodes of graphs."""
        document = copy.deepcopy(self.contents.document)
        fields = document["compiled"]["record"][1]
        name = draw.choice([*fields])
        document["compiled"]["record"][1][name] = changed([fields[name]], draw)
        if draw.random() < 0.8 and len(document["compiled"]["record"][1][name]) == 1:
            document["compiled"]["record"][1][name] = document["compiled"]["record"][1][name][0]
        tensors = [torch.frombuffer(bytearray(octets), dtype=torch.uint8) for octets in self.contents.octets]
        write_plan(self.file, document, tensors)
        self.load()

    def costs_text(self, draw: random.Random) -> None:
        self.file.write_text(json.dumps(changed(COSTS, draw)))
        self.run(LINES[draw.randrange(3)])

    def costs_bytes(self, draw: random.Random) -> None:
        self.file.write_bytes(cut(json.dumps(COSTS).encode(), draw))
        self.run(LINES[draw.randrange(2)])

    def orders(self, draw: random.Random) -> None:
        self.file.write_text(json.dumps({**COSTS, "stages": COSTS["stages"][:2]}))  # type: ignore[index]
        (self.folder / "orders.csv").write_bytes(cut(ORDERS.encode(), draw))
        self.run(LINES[4])

    def lines(self, draw: random.Random) -> None:
        self.file.write_text(json.dumps(COSTS))
        line = list(draw.choice(LINES[:4]))
        for _ in range(draw.choice((1, 1, 2, 4))):
            place, how = draw.randrange(len(line)), draw.randrange(3)
            if how == 0 and line[place] != "--costs":
                line[place] = draw.choice(WORDS)
            elif how == 1:
                line.insert(place, draw.choice(WORDS))
            elif line[place] != "--budget":
                del line[place]
            if not line:
                break
        self.run(line)

    def run(self, line: Sequence[str]) -> None:
        """A command; status 2 is a mistake of the request that was told."""
        given = [
            word.format(costs=self.file, orders=self.folder / "orders.csv") if "{" in word else word for word in line
        ]
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            try:
                status = command(given)
            except SystemExit as error:  # of argparse
                status = int(error.code or 0)
        if status:
            assert status == 2, f"status {status}"
            assert errors.getvalue(), "a failure without a word"
            raise ZbfxError(errors.getvalue())


KINDS: dict[str, Callable[[Fuzz, random.Random], None]] = {
    "bytes of a plan": Fuzz.plan_bytes,
    "text of a plan": Fuzz.plan_text,
    "a part of a plan": Fuzz.plan_graphs,
    "text of a cost table": Fuzz.costs_text,
    "bytes of a cost table": Fuzz.costs_bytes,
    "an order": Fuzz.orders,
    "a command line": Fuzz.lines,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*KINDS])
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    for bound in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(bound, expire)
    table: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    longest, before = 0.0, held()
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        for number in range(options.count):
            kind = options.only or [*KINDS][number % len(KINDS)]
            begun, most = time.process_time(), held()
            signal.setitimer(signal.ITIMER_PROF, MOST_S)
            signal.alarm(MOST_WAITED_S)
            try:
                KINDS[kind](fuzz, random.Random(f"{options.seed} {number}"))
                verdict = "done"
            except ZbfxError:
                verdict = "refused"
            except (Exception, OutOfTime) as error:
                verdict = "wrong"
                print(f"case {number}, {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)
            longest = max(longest, time.process_time() - begun)
            if held() - max(before, most) > MOST_BYTES:
                verdict = "wrong"
                print(f"case {number}, {kind}: {held() - most:,} bytes", flush=True)
            table[kind][verdict] += 1
    print(f"{'kind':24}{'refused':>9}{'done':>9}{'wrong':>9}")
    for kind, counts in table.items():
        print(f"{kind:24}" + "".join(f"{counts[verdict]:9}" for verdict in ("refused", "done", "wrong")))
    grown = held() - before
    print(f"{options.count} cases, seed {options.seed}: longest {longest:.1f} s, memory grew by {grown / 1e6:.0f} MB")
    return 1 if any(counts["wrong"] for counts in table.values()) else 0


def held() -> int:
    """The most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
