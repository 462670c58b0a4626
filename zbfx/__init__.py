"""zbfx: zero-bubble pipelines from ordinary PyTorch models."""

from zbfx import optim
from zbfx.check import Report, check
from zbfx.errors import (
    InputError,
    InvalidSchedule,
    NoFeasibleSchedule,
    NonFiniteStep,
    PipelineFault,
    TraceError,
    ZbfxError,
)
from zbfx.pipeline import Pipeline, compile
from zbfx.plan import Action, CostTable, Edge, Kind, StageCost
from zbfx.schedule.schedule import Schedule

__all__ = [
    "Action",
    "CostTable",
    "Edge",
    "InputError",
    "InvalidSchedule",
    "Kind",
    "NoFeasibleSchedule",
    "NonFiniteStep",
    "Pipeline",
    "PipelineFault",
    "Report",
    "Schedule",
    "StageCost",
    "TraceError",
    "ZbfxError",
    "check",
    "compile",
    "optim",
]
