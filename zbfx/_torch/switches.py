"""What torch is switched to for a thread or the process: modes, kernels, precisions; and other settings for a while.

TorchDispatchMode                   2.11.0, 2.13.0   sees, and may change, what operators do
_disable_current_modes              2.11.0, 2.13.0   modes that are on would change what is compiled
_len_torch_function_stack, ...      2.11.0, 2.13.0   the function modes that are on, the default device among them
peek_interpreter_stack              2.11.0, 2.13.0   the transforms of torch.func that are at work
_set_mkldnn_enabled                 2.11.0, 2.13.0   backends.mkldnn.flags sets more, and warns of it
_set_cudnn_enabled                  2.11.0, 2.13.0   backends.cudnn.flags sets more
torch.autograd._profiler_enabled    2.11.0, 2.13.0   whether torch.profiler, or emit_nvtx, records what runs
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes


def is_transforming() -> bool:
    """Whether a transform of torch.func (vmap, grad) is at work."""
    return peek_interpreter_stack() is not None


def function_modes() -> tuple[Any, ...]:
    """The function modes that are on, the outermost first. `torch.set_default_device` is one."""
    return tuple(_get_current_function_mode_stack())


@contextlib.contextmanager
def with_function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Other function modes for a while, in the place of those that are on."""
    before = function_modes()
    put_function_modes(modes)
    try:
        yield
    finally:
        put_function_modes(before)


def put_function_modes(modes: Sequence[Any]) -> None:
    while function_modes():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Meanwhile no mode of the dispatcher is on: operators of real tensors compute as in eager."""
    return _disable_current_modes()


FLOAT32_OPERATORS: tuple[Any, ...] = attrgetter(
    "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"
)(torch.backends)


def float32_precisions() -> tuple[Any, ...]:
    """How products in float32 are rounded inside (TF32, bfloat16), by `set_float32_matmul_precision`, where torch still
    tells that, and by operator."""
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to tell once an operator's own switch was set
        whole = None
    return whole, *(operator.fp32_precision for operator in FLOAT32_OPERATORS)


def set_float32_precisions(found: Sequence[Any]) -> None:
    """Switch to what `float32_precisions` has found."""
    whole, *single = found
    if whole is not None:
        torch.set_float32_matmul_precision(whole)
    for operator, precision in zip(FLOAT32_OPERATORS, single, strict=True):
        operator.fp32_precision = precision


ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def kernel_choices() -> tuple[bool, ...]:
    """Whether each kernel of attention may be taken (flash, memory-efficient, plain, cuDNN's); oneDNN; cuDNN."""
    kernels = (getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION_KERNELS)
    return *kernels, torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()


def set_kernel_choices(found: Sequence[bool]) -> None:
    """Switch to what `kernel_choices` has found."""
    *kernels, mkldnn, cudnn = found
    for name, is_on in zip(ATTENTION_KERNELS, kernels, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_on)
    torch._C._set_mkldnn_enabled(mkldnn)
    torch._C._set_cudnn_enabled(cudnn)


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Let operators run without oneDNN, the library for CPUs."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def profiler_records() -> bool:
    """Whether torch.profiler or `torch.autograd.profiler.emit_nvtx` is on in this thread."""
    return torch.autograd._profiler_enabled()
