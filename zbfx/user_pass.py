"""A pass of the user's: a function from graph to graph, and the point of the compiler at which it runs.

Takes   a point and a function.
Gives   a `Pass`, with a text that ranks compare: two passes with one text do the same.
Raises  `ZbfxError` for what is no point or no function.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from hashlib import sha256
from types import FunctionType, MethodType
from typing import Any

from zbfx.errors import ZbfxError
from zbfx.graphs import Joint, Split, Stage
from zbfx.spelled import spelled

VARIABLE = "ZBFX_TRACE_PASSES"


class Tracing(Enum):
    """What is printed of passes: nothing; a line for each of the compiler's and the changes that the user's make; the
    changes of all."""

    NOTHING = False
    OWN = True
    ALL = "all"


class PassPoint(StrEnum):
    """Where passes of the user's run: on the joint graph in canonical form, before it is cut into stages; on the graph
    with the phase, F, B or W, of each node; on the F, B and W of each stage."""

    JOINT = "joint"
    SPLIT = "split"
    STAGE = "stage"

    @property
    def type(self) -> type:
        """What passes at this point take and give."""
        return TYPES[self]


TYPES: Mapping[PassPoint, type] = {PassPoint.JOINT: Joint, PassPoint.SPLIT: Split, PassPoint.STAGE: Stage}


@dataclass(frozen=True)
class Pass:
    """`run` makes a new graph of the one that it takes, and leaves that as it was: a `zbfx.graphs.Joint` at "joint", a
    `Split` at "split", a `Stage` at "stage". It runs on every rank, and for every graph of the model: further shapes,
    and evaluation, in which there is no backward. `docs/passes.md` has two."""

    at: str
    run: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if self.at not in tuple(PassPoint):
            raise ZbfxError(f"a pass runs at one of {', '.join(PassPoint)}; found {self.at!r}")
        if not callable(self.run):
            raise ZbfxError(f"a pass is a function of a {self.point.type.__name__}; found {self.run!r}"[:200])

    @property
    def point(self) -> PassPoint:
        return PassPoint(self.at)

    @property
    def name(self) -> str:
        found = self.run
        while isinstance(found, functools.partial):
            found = found.func
        return str(getattr(found, "__name__", type(found).__name__))

    @functools.cached_property
    def told(self) -> str:
        """What ranks compare: name, point, and a hash of the source and of the values that the function holds."""
        hashed = sha256("\n".join(told(self.run)).encode()).hexdigest()[:12]
        return f"{self.name} at {self.at} ({hashed})"


def told(function: Any) -> Iterator[str]:
    """The source of a function, and what it holds: arguments of a partial, closure, defaults, an object's values."""
    if isinstance(function, functools.partial):
        yield from told(function.func)
        yield spelled((function.args, function.keywords))
    elif isinstance(function, MethodType):
        yield from told(function.__func__)
        yield spelled(vars(function.__self__)) if hasattr(function.__self__, "__dict__") else spelled(function.__self__)
    elif isinstance(function, FunctionType):
        yield source_of(function)
        held = inspect.getclosurevars(function).nonlocals
        for name, value in sorted(held.items()):
            yield from (told(value) if isinstance(value, FunctionType) else (f"{name}: {spelled(value)}",))
        yield spelled((function.__defaults__, function.__kwdefaults__))
    else:
        yield source_of(type(function))
        yield spelled(vars(function)) if hasattr(function, "__dict__") else spelled(function)


def source_of(function: Any) -> str:
    """The text of a function or class; of one without a file (typed into a prompt) its code, or its name."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return spelled(function) if code is None else f"{code.co_code.hex()} {code.co_names} {code.co_consts!r}"


def checked_passes(passes: Any) -> tuple[Pass, ...]:
    if not isinstance(passes, Sequence) or isinstance(passes, str) or not all(isinstance(p, Pass) for p in passes):
        raise ZbfxError(f'passes is a list of zbfx.Pass, like [zbfx.Pass("joint", function)]; found {passes!r}'[:300])
    return tuple(passes)


def checked_tracing(trace_passes: bool | str | None) -> Tracing:
    """What is printed of passes: as asked for, else as the environment says."""
    if trace_passes is None:
        set_to = os.environ.get(VARIABLE, "")
        return {str(Tracing.ALL.value): Tracing.ALL}.get(set_to, Tracing(bool(set_to)))
    try:
        return Tracing(trace_passes)
    except ValueError:
        raise ZbfxError(f"trace_passes is True, False, 'all' or None; found {trace_passes!r}") from None
