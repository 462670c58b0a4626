"""Errors that users see. Everything zbfx raises on purpose derives from `ZbfxError`."""

from __future__ import annotations

from collections.abc import Iterable


class ZbfxError(ValueError):
    """A mistake in what the user handed over: says what was expected, what was found, where, and what to do."""


SAME_CALLS = "every rank makes the same calls in the same order, compile and evaluate among them"


def first_line(error: BaseException, limit: int = 300) -> str:
    """The first line of an error's text, cut to `limit` characters: some errors of torch list all its kernels."""
    text = str(error).strip().partition("\n")[0]
    return text if len(text) <= limit else text[:limit] + " ..."


def listed(names: Iterable[object], limit: int = 12) -> str:
    """Names with commas between, the first `limit` of them."""
    found = [str(name) for name in names]
    more = f", ... and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + more


class NoFeasibleSchedule(ZbfxError):
    """No order of actions meets the memory limit. The message names the smallest limit that would. `smallest_limit` has
    the unit of the cost table's byte columns."""

    def __init__(self, message: str, smallest_limit: float) -> None:
        super().__init__(message)
        self.smallest_limit = smallest_limit


class InvalidSchedule(ZbfxError):
    """A schedule breaks a rule: an action is missing, doubled, out of order, over the memory limit, or it deadlocks."""


class WrongPlacement(ZbfxError):
    """A schedule stands for another placement than that of the cost table: `reason` says so in one sentence, and the
    message also what to change in the table."""

    def __init__(self, reason: str, placement: str) -> None:
        super().__init__(f"{reason}. Set the field placement of the cost table{placement}")
        self.reason = reason


class OverLimit(InvalidSchedule):
    """An order needs more than the memory limit."""


class TraceError(ZbfxError):
    """The model or its loss cannot be traced, differentiated or cut: names the node and the user's source line."""


class BrokenGraph(ZbfxError):
    """A pass gave a graph that breaks a rule of `zbfx.verify`: names the pass (`after`), the rule and the place."""

    def __init__(self, after: str, rule: str, invariant: str, where: object, expected: object, found: object) -> None:
        super().__init__(
            f"{after} gave a graph that breaks {rule} ({invariant.rstrip('.')}). {where}: expected {expected}; found "
            f"{found}. If {after} is a pass of yours, mend it; else this is a fault of zbfx: please report "
            f"the model; until then, cut it elsewhere (cuts=)"
        )
        self.after, self.rule = after, rule


class InputError(ZbfxError):
    """`step` was called with inputs that do not match what `compile` saw. Raised before the first send."""


class NonFiniteStep(ZbfxError, ArithmeticError):
    """A step's loss or gradient is not finite. Every rank raises it, after dropping the step's gradients."""


class PipelineFault(ZbfxError, RuntimeError):
    """A rank failed while running a step: names rank, action and step, on every rank. `waited`: this rank waited for
    another in vain, which may know why."""

    def __init__(self, message: str, *, waited: bool = False) -> None:
        super().__init__(message)
        self.waited = waited
