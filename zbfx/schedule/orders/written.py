"""Orders that were written down: by hand, by a function of the user's, by `plan --json`, by torch.

Takes   actions and texts in any iterables, one per rank; a file.
Gives   an order of actions per rank, unchecked; the placement that orders stand for.
Raises  `ZbfxError` for what is no order; `InvalidSchedule` for orders that no placement has.
Source  the CSV is that of `torch.distributed.pipelining` (`_dump_csv`), of torch 2.13: a row per rank, actions like
        `0F1`, with I for B, W for W and B for BW; `(0F1;3B0)OVERLAP_F_B` for two beside each other.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from zbfx.documents import read_json, shown
from zbfx.errors import InvalidSchedule, ZbfxError
from zbfx.plan import Action, Kind
from zbfx.schedule.orders.handmade import Orders

Entry = Action | str
TORCH_KINDS = {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW}
TORCH_ACTION = re.compile(r"(\d+)(F|I|B|W)(\d+)")
TORCH_TRANSFER = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")
TORCH_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_orders(orders: Iterable[Iterable[Entry] | str]) -> Orders:
    """The orders in an iterable with one entry per rank: actions, text like "F0.0 F0.1 B0.0", or both. Raises
    `ZbfxError` for anything else."""
    if isinstance(orders, str | Mapping) or not isinstance(orders, Iterable):
        raise ZbfxError(f"a schedule gives one order of actions per rank, in a list; found {type(orders).__name__}")
    return tuple(map(read_order, orders))


def read_order(order: Iterable[Entry] | str) -> tuple[Action, ...]:
    if isinstance(order, str):
        return tuple(map(Action.parse, order.split()))
    if isinstance(order, Action) or not isinstance(order, Iterable):
        raise ZbfxError(f"an order is a list of actions, or text like 'F0.0 F0.1 B0.0'; found {order!r}"[:200])
    return tuple(action for entry in order for action in read_actions(entry))


def read_actions(entry: Entry) -> tuple[Action, ...]:
    if isinstance(entry, str):
        return read_order(entry)
    if not isinstance(entry, Action) or not isinstance(entry.kind, Kind):
        raise ZbfxError(f"an order is made of actions, or of text like 'F0.3'; found {entry!r}"[:200])
    return (entry,)


def placement_of_orders(orders: Orders) -> tuple[int, ...]:
    """Stage -> the rank that runs it. Raises `InvalidSchedule` where stages are missing, or run on two ranks."""
    owners: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for stage in {action.stage for action in order}:
            if stage in owners:
                raise InvalidSchedule(
                    f"a stage runs on one rank: found actions of stage {stage} on ranks {owners[stage]} and {rank}"
                )
            owners[stage] = rank
    if not owners:
        raise InvalidSchedule("a schedule runs at least one action; found none")
    missing = next(stage for stage in count() if stage not in owners)
    if missing < len(owners):
        raise InvalidSchedule(f"a schedule runs all stages from 0 to the last; found no action of stage {missing}")
    return tuple(owners[stage] for stage in range(len(owners)))


def from_torch_csv(path: str | PathLike[str]) -> Orders:
    """The orders in a CSV file of torch.distributed.pipelining, with or without its transfers, which are left out: zbfx
    makes its own. Of two actions beside each other the first runs first. Raises `ZbfxError` with row and column."""
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    if not any(any(row) for row in rows):
        raise ZbfxError(f"{path}: expected a row of actions like 0F1 for each rank; found none")
    return tuple(
        tuple(action for column, cell in enumerate(row) for action in from_torch(cell, f"{path}, row {rank}, {column}"))
        for rank, row in enumerate(rows)
    )


def from_torch(text: str, where: str) -> tuple[Action, ...]:
    text = text.strip()
    if not text or TORCH_TRANSFER.fullmatch(text):
        return ()
    if pair := TORCH_PAIR.fullmatch(text):
        return tuple(action for part in pair[1].split(";") for action in from_torch(part, where))
    if action := TORCH_ACTION.fullmatch(text):
        return (Action(TORCH_KINDS[action[2]], int(action[1]), int(action[3])),)
    raise ZbfxError(f"{where}: expected an action of torch like 0F1, 0I1, 0W1 or 0B1; found {text!r}")


def from_json(path: str | PathLike[str]) -> Orders:
    """The orders in a file that `python -m zbfx plan --json` has printed. `{"ranks": ["F0.0 B0.0 W0.0", ...]}` is
    enough. Raises `ZbfxError`."""
    expected, document = f"{path}: expected what plan --json prints, or its field 'ranks' alone", read_json(path)
    if not isinstance(document, Mapping) or not isinstance(document.get("ranks"), list):
        raise ZbfxError(f"{expected}; found {shown(document)}")
    return read_orders([without_times(order) for order in document["ranks"]])


def without_times(order: Any) -> Any:
    """The actions of an order whose entries also say when they run."""
    if not isinstance(order, list):
        return order
    return [entry.get("action") if isinstance(entry, Mapping) else entry for entry in order]


READERS: Mapping[str, Callable[[str | PathLike[str]], Orders]] = {".csv": from_torch_csv, ".json": from_json}


def read_file(path: Path) -> Orders:
    """The orders in a file, by its suffix."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ZbfxError(f"an order is read from a file of {' or '.join(READERS)}; found {path}")
    try:
        return reader(path)
    except OSError as error:
        raise ZbfxError(f"cannot read the order {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ZbfxError(f"the order {path} is no text in UTF-8: {error}") from error
