"""The modes of docs/modes.md, as functions that make a call under one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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


SWITCHED: dict[str, Callable[[Any], Any]] = {  # by name of the switch, in their order: another state than this one
    "default dtype": lambda _: torch.float64,
    "deterministic algorithms": lambda _: 2,
    "TF32": lambda _: ("medium", "tf32", "ieee", "tf32", "bf16", "none", "none"),
    "attention kernels": lambda _: (False, False, True, False, False, False),
    "order of attention kernels": lambda now: (*reversed(now[:-1]), not now[-1]),
    "sums in half precision": lambda now: tuple(not entry for entry in now),
    "algorithms of cuDNN": lambda now: (*now[:-3], True, True, False),
    "decompositions": lambda now: (*now[:-1], not now[-1]),
    "dtype of autocast": lambda _: (torch.float16, torch.bfloat16),
    "filled memory": lambda now: not now,
}


@contextmanager
def switch(name: str) -> Iterator[None]:
    found = dict(zip(SWITCHED, SWITCHES, strict=True))[name]
    before = found.read()
    found.write(SWITCHED[name](before))
    try:
        yield
    finally:
        found.write(before)


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


def switched_call(name: str, call: Call) -> Any:
    return within(switch(name), call)


MODES: dict[str, Callable[[Call], Any]] = {
    "autocast": lambda call: within(torch.autocast("cpu", torch.bfloat16, cache_enabled=False), call),
    "no_grad": lambda call: within(torch.no_grad(), call),
    "enable_grad": lambda call: within(torch.enable_grad(), call),
    "inference_mode": lambda call: within(torch.inference_mode(), call),
    "default device": lambda call: within(torch.device("meta"), call),
    **{name: partial(switched_call, name) for name in SWITCHED},
    "function mode": lambda call: within(Sines(), call),
    "dispatch mode": lambda call: within(Watching(), call),
    "torch.compile": compiled_call,
    "vmap": mapped,
    "dual_level": lambda call: within(torch.autograd.forward_ad.dual_level(), call),
}
