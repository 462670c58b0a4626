"""The modes of docs/modes.md, as functions that make a call under one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zbfx.modes import SWITCHES

Call = Callable[[], Any]


class Sines(TorchFunctionMode):
    """Another function in the place of tanh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


class Watching(TorchDispatchMode):
    """Notes the switches that operators run under."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(tuple(switch.read() for switch in SWITCHES))
        return func(*args, **(kwargs or {}))


@contextmanager
def switch(index: int, value: Any) -> Iterator[None]:
    before = SWITCHES[index].read()
    SWITCHES[index].write(value)
    try:
        yield
    finally:
        SWITCHES[index].write(before)


def within(mode: AbstractContextManager[Any], call: Call) -> Any:
    with mode:
        return call()


def mapped(call: Call) -> Any:
    found: list[Any] = []

    def once(row: Tensor) -> Tensor:
        found.append(call())
        return row

    torch.vmap(once)(torch.zeros(2, 1))
    return found[0]


def compiled_call(call: Call) -> Any:
    return torch.compile(call, backend="eager")()


MODES: dict[str, Callable[[Call], Any]] = {
    "autocast": lambda call: within(torch.autocast("cpu", torch.bfloat16, cache_enabled=False), call),
    "no_grad": lambda call: within(torch.no_grad(), call),
    "enable_grad": lambda call: within(torch.enable_grad(), call),
    "inference_mode": lambda call: within(torch.inference_mode(), call),
    "default dtype": lambda call: within(switch(0, torch.float64), call),
    "default device": lambda call: within(torch.device("meta"), call),
    "deterministic algorithms": lambda call: within(switch(1, 2), call),
    "TF32": lambda call: within(switch(2, ("medium", "tf32", "ieee", "tf32", "bf16", "none", "none")), call),
    "attention kernels": lambda call: within(switch(3, (False, False, True, False, False, False)), call),
    "function mode": lambda call: within(Sines(), call),
    "dispatch mode": lambda call: within(Watching(), call),
    "torch.compile": compiled_call,
    "vmap": mapped,
}
