"""JSON -> CostTable -> JSON.

    {"stages": [{"t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "m_b": 1.0, "m_w": 0.5}, ...],
     "t_comm": 0.1, "placement": [0, 1, ...]}

Times in any one unit, memory in any other. A stage may add `t_bw` (the fused backward, by default `t_b + t_w`),
`t_beside` (B with a W beside it on a second stream), `t_p` (the prologue, once a step, by default 0) and `static` (held
through the whole step, by default 0). `t_comm` is one number or one per stage boundary, by default 0; `placement` names
each stage's rank, by default its own. In place of `t_comm`, `edges` lists `{"source": 0, "target": 2, "t_f": 0.1,
"t_b": null}`: values may skip stages, null means that nothing is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbfx.documents import read_json, shown
from zbfx.errors import ZbfxError
from zbfx.plan import CostTable, Edge, Number, StageCost, require_amount

TABLE_KEYS = ("stages", "t_comm", "edges", "placement")
STAGE_KEYS = {
    "t_f": "forward_s",
    "t_b": "backward_input_s",
    "t_w": "backward_weight_s",
    "m_b": "saved_bytes",
    "m_w": "weight_saved_bytes",
    "static": "static_bytes",
    "t_bw": "backward_s",
    "t_beside": "beside_s",
    "t_p": "prologue_s",
}
REQUIRED_STAGE_KEYS = ("t_f", "t_b", "t_w")
EDGE_KEYS = ("source", "target", "t_f", "t_b")


@dataclass(frozen=True, slots=True)
class Reader:
    """Typed access to a JSON object; errors name the place in the document."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, value: Any, where: str, known: tuple[str, ...]) -> Reader:
        if not isinstance(value, dict):
            raise ZbfxError(f"{where}: expected an object with {', '.join(known)}; found {shown(value)}")
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise ZbfxError(f"{where}: no field is called {unknown[0]!r}; known: {', '.join(known)}")
        return cls(value, where)

    def number(self, key: str) -> Number:
        return as_number(self.required(key), f"{self.where}.{key}")

    def integer(self, key: str) -> int:
        return as_integer(self.required(key), f"{self.where}.{key}")

    def number_or_null(self, key: str) -> Number | None:
        return None if self.required(key) is None else self.number(key)

    def list(self, key: str) -> list[Any]:
        if not isinstance(value := self.required(key), list):
            raise ZbfxError(f"{self.where}.{key}: expected a list; found {shown(value)}")
        return value

    def required(self, key: str) -> Any:
        if key not in self.values:
            raise ZbfxError(f"{self.where}: the field {key!r} is missing")
        return self.values[key]


def as_number(value: Any, where: str) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ZbfxError(f"{where}: expected a number; found {shown(value)}")
    return value


def as_integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ZbfxError(f"{where}: expected a whole number; found {shown(value)}")
    return value


def read_costs(path: str | Path, placement: Sequence[int] | None = None) -> CostTable:
    """The cost table in the file `path`; `placement` stands where the file names none. Raises ZbfxError with file and
    field for anything unexpected."""
    try:
        document = read_json(path)
    except OSError as error:
        raise ZbfxError(f"cannot read the cost table {path}: {error.strerror}") from error
    return costs_from_json(document, str(path), placement)


def costs_from_json(document: Any, where: str = "costs", placement: Sequence[int] | None = None) -> CostTable:
    """The cost table in a decoded JSON document; `where` begins the error messages. `placement` stands where the
    document names none: None is stage i on rank i."""
    table = Reader.of(document, where, TABLE_KEYS)
    stages = [stage_from_json(row, f"{where}.stages[{index}]") for index, row in enumerate(table.list("stages"))]
    if "placement" in table.values:
        placement = [as_integer(rank, f"{where}.placement") for rank in table.list("placement")]
    if "edges" in table.values:
        if "t_comm" in table.values:
            raise ZbfxError(f"{where}: give either t_comm or edges; found both")
        edges = [Reader.of(row, f"{where}.edges[{i}]", EDGE_KEYS) for i, row in enumerate(table.list("edges"))]
        found = [
            Edge(e.integer("source"), e.integer("target"), e.number_or_null("t_f"), e.number_or_null("t_b"))
            for e in edges
        ]
        ranks = range(len(stages)) if placement is None else placement
        return CostTable(tuple(stages), tuple(found), tuple(ranks))
    comm = table.values.get("t_comm", 0)
    if isinstance(comm, list):
        comm_s: Number | list[Number] = [as_number(value, f"{where}.t_comm") for value in comm]
    else:
        comm_s = as_number(comm, f"{where}.t_comm")
    return CostTable.chain(stages, comm_s, placement)


def stage_from_json(row: Any, where: str) -> StageCost:
    stage = Reader.of(row, where, tuple(STAGE_KEYS))
    keys = [key for key in STAGE_KEYS if key in stage.values or key in REQUIRED_STAGE_KEYS]
    for key in keys:
        require_amount(f"{where}.{key} is a finite number >= 0", stage.number(key))
    return StageCost(**{STAGE_KEYS[key]: stage.number(key) for key in keys})


def costs_to_json(costs: CostTable) -> dict[str, Any]:
    """A document that `costs_from_json` reads back; fractions become the nearest floats."""
    stages = []
    for stage in costs.stages:
        row = {key: plain(getattr(stage, name)) for key, name in STAGE_KEYS.items()}
        stages.append({key: value for key, value in row.items() if value is not None})
    edges = [
        {"source": e.source, "target": e.target, "t_f": plain(e.forward_s), "t_b": plain(e.backward_s)}
        for e in costs.edges
    ]
    return {"stages": stages, "edges": edges, "placement": list(costs.placement)}


def plain(value: Number | None) -> int | float | None:
    return value if value is None or isinstance(value, int | float) else float(value)
