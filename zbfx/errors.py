"""Errors that users see. Everything zbfx raises on purpose derives from `ZbfxError`."""


class ZbfxError(ValueError):
    """A mistake in what the user handed over: says what was expected, what was found, where, and what to do."""


class NoFeasibleSchedule(ZbfxError):
    """No order of actions meets the memory limit. The message names the smallest limit that would.

    `smallest_limit` has the unit of the cost table's byte columns.
    """

    def __init__(self, message: str, smallest_limit: float) -> None:
        super().__init__(message)
        self.smallest_limit = smallest_limit


class InvalidSchedule(ZbfxError):
    """A schedule breaks a rule: an action is missing, doubled, out of order, over the memory limit, or it deadlocks."""


class TraceError(ZbfxError):
    """The model or its loss cannot be traced, differentiated or cut: names the node and the user's source line."""


class InputError(ZbfxError):
    """`step` was called with inputs that do not match what `compile` saw. Raised before the first send."""


class NonFiniteStep(ZbfxError, ArithmeticError):
    """A step's loss or gradient is not finite. Every rank raises it, after dropping the step's gradients."""


class PipelineFault(ZbfxError, RuntimeError):
    """A rank failed while running a step: names rank, action and step, on every rank."""
