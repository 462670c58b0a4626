"""Colours of actions and of idle time. Readers who see red, green or blue weakly tell each from the others of its table
(`tests/show/test_palette.py`); later chunks of a rank are paler.

Source  Okabe and Ito, "Color Universal Design" (2008), and Tol, "Colour Schemes" (SRON/EPS/TN/09-002).
"""

from __future__ import annotations

from collections.abc import Mapping

from zbfx.plan import Action, CostTable, Kind
from zbfx.timing.idle import Cause

FILLS: Mapping[Kind, str] = {
    Kind.P: "#ddcc77",
    Kind.F: "#56b4e9",
    Kind.B: "#e69f00",
    Kind.W: "#009e73",
    Kind.BW: "#cc79a7",
}

IDLE_FILLS: Mapping[Cause, str] = {
    Cause.DEPENDENCY: "#999999",
    Cause.IMBALANCE: "#0072b2",
    Cause.MESSAGE: "#f0e442",
    Cause.MEMORY: "#d55e00",
    Cause.ORDER: "#882255",
    Cause.LAUNCH: "#000000",
    Cause.NEXT: "#dddddd",
}
MEMORY_FILL, LIMIT_LINE, PATH_LINE = "#c9b3d9", "#d55e00", "#000000"


def opacity(action: Action, costs: CostTable) -> float:
    """1 for the first stage of a rank, less for each later one."""
    chunk = costs.stages_of(costs.placement[action.stage]).index(action.stage)
    return max(0.4, 1 - 0.3 * chunk)
