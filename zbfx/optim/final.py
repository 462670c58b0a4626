"""Functions of the user's that read parameters once they are final, as averages of them do. In: a verdict, and the
parameters that are as it says. Out: nothing; a function that writes into one of them is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zbfx._torch.tensors import version_of
from zbfx.arguments import kind_of
from zbfx.errors import ZbfxError
from zbfx.optim.state import Verdict

OnFinal = Callable[[Verdict], object]


class FinalReaders:
    """The functions of `PostValidated.on_final`, in the order in which they were added. While one runs, `running` says
    so: other ranks wait for no call that it makes."""

    def __init__(self) -> None:
        self.functions: OrderedDict[int, OnFinal] = OrderedDict()
        self.running = False

    def add(self, function: OnFinal) -> RemovableHandle:
        if not callable(function):
            raise ZbfxError(f"on_final takes a function of the verdict; found {kind_of(function)}")
        handle = RemovableHandle(self.functions)
        self.functions[handle.id] = function
        return handle

    def call(self, verdict: Verdict, parameters: Sequence[Tensor]) -> None:
        """Raises `ZbfxError` if a function writes: forwards of the next step have read these parameters already."""
        for function in tuple(self.functions.values()):
            before = [version_of(parameter) for parameter in parameters]
            self.running = True
            try:
                function(verdict)
            finally:
                self.running = False
            if before != [version_of(parameter) for parameter in parameters]:
                raise ZbfxError(
                    f"{getattr(function, '__qualname__', function)}, given to on_final, wrote into parameters that "
                    f"forwards of the next step have read already. Read them alone in it; to write, call "
                    f"optimizer.settle() after optimizer.step(), and write then"
                )

    def refuse_calls(self) -> None:
        """Raises `ZbfxError` within a function of `on_final`."""
        if self.running:
            raise ZbfxError(
                "a function given to on_final runs within another call, and cannot make one that other ranks take part "
                "in; found such a call of the step or the optimizer. Make it after the next step()"
            )
