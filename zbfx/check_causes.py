"""Where the programs of a pipeline first go wrong, once `check` has found that they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zbfx.checked_runs import Data, emitted_results, joint_results
from zbfx.compiled import Compiled
from zbfx.graphs import Role
from zbfx.program.calls import Item, PhaseCall

Kept = dict[tuple[int, int], dict[str, Tensor]]  # by step and microbatch, the values of a joint graph's nodes


class FoundCause(Exception):
    """The place at which the programs go wrong."""


def cause_of(pipe: Compiled, data: Data, step: int, wrong: Mapping[str, Tensor], tolerance: float) -> str:
    """The first value that an action reads or makes otherwise than the joint graph, up to a step (from 0), and where
    that graph has it. Where all values are right, the microbatch whose part of a gradient is missing, or comes twice:
    `wrong` is what gradients have more than they should. "" if neither is found."""
    kept: Kept = {}
    joint_results(pipe, data, lambda s, k, values: kept.__setitem__((s, k), values))

    def look(at: int, call: PhaseCall, microbatch: int, items: Sequence[Item], values: Sequence[Any]) -> None:
        verb = "reads" if items is call.arguments else "makes"
        for name, value in named_values(items, values):
            want = kept[at, microbatch].get(name)
            if want is not None and not is_close(value, want, tolerance):
                what = other_place(kept, name, value, at, microbatch)
                raise FoundCause(f"step {at + 1}, {call.phase.name}.{microbatch} {verb} {what}")

    try:
        for done, _ in enumerate(emitted_results(pipe, data, look)):
            if done == step:
                break
    except Exception as error:
        return str(error) if isinstance(error, FoundCause) else str(error.__cause__ or "")
    return wrong_parts(pipe, kept, step, wrong, tolerance)


def named_values(items: Sequence[Item], values: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a call takes or returns, with their names."""
    for item, value in zip(items, values, strict=True):
        if isinstance(item, str):
            yield item, value
        else:
            yield from zip(item, value, strict=True)


def is_close(value: Tensor, want: Tensor, tolerance: float) -> bool:
    if value.dtype != want.dtype or not (want.is_floating_point() or want.is_complex()):
        return torch.equal(value, want) if value.dtype == want.dtype else True  # a norm's statistics may be others
    finite = want[want.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    allowed = max(tolerance, 16 * torch.finfo(want.dtype).eps) * scale
    return torch.allclose(value, want, rtol=0.0, atol=allowed, equal_nan=True)


def other_place(kept: Kept, name: str, value: Tensor, step: int, microbatch: int) -> str:
    """The value by its name, and of which microbatch and step it is."""
    for (s, k), values in kept.items():
        if name in values and torch.equal(values[name], value):
            of_step = "" if s == step else f" of step {s + 1}"
            return f"{name} of microbatch {k}{of_step}, in place of that of microbatch {microbatch}"
    return f"a wrong {name}"


def wrong_parts(pipe: Compiled, kept: Kept, step: int, wrong: Mapping[str, Tensor], tolerance: float) -> str:
    """The microbatch whose part a gradient lacks, or has twice."""
    nodes: dict[str, list[str]] = defaultdict(list)  # by parameter, the values that its gradient is the sum of
    for node, port in zip(pipe.joint.output_values, pipe.joint.outputs, strict=True):
        if port.role is Role.GRADIENT:
            nodes[port.name].append(node.name)
    for name, difference in wrong.items():
        for (s, k), values in kept.items():
            if s == step and nodes[name] and values.keys() >= set(nodes[name]):
                part = torch.stack([values[node] for node in nodes[name]]).sum(0)
                for sign, verb in ((-1, "lacks"), (1, "has twice")):
                    if is_close(sign * difference, part, max(tolerance, 1e-4)):
                        return f"step {step + 1}, the gradient of {name} {verb} the part of microbatch {k}"
    return ""
