"""The state of torch around a call: autocast, modes, and switches for the whole process.

`compile` reads it once. What is traced follows it; everything else of zbfx runs in a fixed state made of it, whatever
the caller's is (`docs/modes.md`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zbfx._torch import switches
from zbfx.errors import ZbfxError


class Switch(NamedTuple):
    """A setting of the whole process."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


SWITCHES = (  # dtypes and kernels of a graph's operators depend on them
    Switch(torch.get_default_dtype, torch.set_default_dtype),
    Switch(
        torch.get_deterministic_debug_mode,
        lambda level: torch.use_deterministic_algorithms(level > 0, warn_only=level == 1),
    ),
    Switch(switches.float32_precisions, switches.set_float32_precisions),
    Switch(switches.kernel_choices, switches.set_kernel_choices),
    Switch(switches.attention_order, switches.set_attention_order),
    Switch(switches.half_sums, switches.set_half_sums),
    Switch(switches.algorithms, switches.set_algorithms),
    Switch(switches.shortcuts, switches.set_shortcuts),
    Switch(switches.autocast_dtypes, switches.set_autocast_dtypes),
    Switch(switches.fills_memory, switches.set_fills_memory),
)


@dataclass(frozen=True, eq=False)
class Modes:
    """The state that `compile` was called in: the values of `SWITCHES`, (device type, dtype) of each autocast that is
    on, whether these keep their casts, and the function modes, the default device among them."""

    switches: tuple[Any, ...]
    autocasts: tuple[tuple[str, torch.dtype], ...]
    keeps_casts: bool
    function_modes: tuple[Any, ...]

    @classmethod
    def now(cls) -> Modes:
        """The state of the calling thread."""
        on = [device for device in switches.AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
        return cls(
            tuple(switch.read() for switch in SWITCHES),
            tuple((device, torch.get_autocast_dtype(device)) for device in on),
            torch.is_autocast_cache_enabled(),
            switches.function_modes(),
        )

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """The state in which graphs are made, measured, compiled and run: these switches, and no mode. Graphs hold
        their casts and gradients. Raises `ZbfxError` inside a transform of torch.func, whose tensors no graph takes."""
        if switches.is_transforming():
            raise ZbfxError(
                "zbfx was called inside a transform of torch.func (vmap, grad, functional_call under one of them), or "
                "inside a dual_level of forward-mode gradients: a pipeline runs on plain tensors and makes its own "
                "gradients. Call it outside; use such transforms in the model's forward"
            )
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
            for device, _ in Modes.now().autocasts:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(switches.with_function_modes(()))
            stack.enter_context(switched(self.switches))
            yield

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Within `fixed`: the state in which the user's code runs, as `compile` found it."""
        with ExitStack() as stack:
            for device, dtype in self.autocasts:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.keeps_casts))
            stack.enter_context(switches.with_function_modes(self.function_modes))
            yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Meanwhile Python looks for no garbage in cycles. Graphs are large, live on, and are made of small objects: while
    they arise, looks at all objects again and again would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def switched(values: Sequence[Any]) -> Iterator[None]:
    """Other values of `SWITCHES` for a while; those that are equal already are not written."""
    before = [switch.read() for switch in SWITCHES]
    changed = [k for k, value in enumerate(values) if value != before[k]]
    try:
        for k in changed:
            SWITCHES[k].write(values[k])
        yield
    finally:
        for k in changed:
            SWITCHES[k].write(before[k])
