"""zbfx: zero-bubble pipelines from ordinary PyTorch models. Planning needs no torch: what does is imported when it is
first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zbfx import schedule
from zbfx.errors import (
    InputError,
    InvalidSchedule,
    NoFeasibleSchedule,
    NonFiniteStep,
    PipelineFault,
    TraceError,
    ZbfxError,
)
from zbfx.plan import Action, CostTable, Edge, Kind, StageCost
from zbfx.schedule.schedule import Schedule

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zbfx import optim, passes
    from zbfx.gradient_check import Report, check
    from zbfx.handle import Pipeline
    from zbfx.loaded import load_plan
    from zbfx.metrics import Metric
    from zbfx.pipeline import compile
    from zbfx.runtime.buckets import Buckets
    from zbfx.user_pass import Pass

__all__ = [
    "Action",
    "Buckets",
    "CostTable",
    "Edge",
    "InputError",
    "InvalidSchedule",
    "Kind",
    "Metric",
    "NoFeasibleSchedule",
    "NonFiniteStep",
    "Pass",
    "Pipeline",
    "PipelineFault",
    "Report",
    "Schedule",
    "StageCost",
    "TraceError",
    "ZbfxError",
    "__version__",
    "check",
    "compile",
    "load_plan",
    "optim",
    "passes",
    "schedule",
]

WITH_TORCH = {  # where each name comes from that brings torch; None: it is a module
    "Buckets": "zbfx.runtime.buckets",
    "Metric": "zbfx.metrics",
    "Pass": "zbfx.user_pass",
    "Pipeline": "zbfx.handle",
    "compile": "zbfx.pipeline",
    "load_plan": "zbfx.loaded",
    "Report": "zbfx.gradient_check",
    "check": "zbfx.gradient_check",
    "optim": None,
    "passes": None,
}


def __getattr__(name: str) -> Any:
    try:
        module = WITH_TORCH[name]
    except KeyError:
        raise AttributeError(f"module 'zbfx' has no attribute {name!r}") from None
    found = import_module(f"zbfx.{name}") if module is None else getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
