"""What torch is switched to for a thread or the process: modes, kernels, precisions; and other settings for a while.

TorchDispatchMode                   2.11.0, 2.13.0   sees, and may change, what operators do
_disable_current_modes              2.11.0, 2.13.0   modes that are on would change what is compiled
_len_torch_function_stack, ...      2.11.0, 2.13.0   the function modes that are on, the default device among them
peek_interpreter_stack              2.11.0, 2.13.0   the transforms of torch.func that are at work
_set_mkldnn_enabled                 2.11.0, 2.13.0   backends.mkldnn.flags sets more, and warns of it
_set_cudnn_enabled                  2.11.0, 2.13.0   backends.cudnn.flags sets more
_get_sdp_priority_order, ...         2.11.0, 2.13.0   in which order kernels of attention are tried
_get_cudnn_benchmark, ...           2.11.0, 2.13.0   backends.cudnn may have frozen its own names
_get_nnpack_enabled, ...            2.11.0, 2.13.0   backends.nnpack has no plain names
forward_ad._current_level           2.11.0, 2.13.0   whether a dual_level is on
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
    """Whether a transform of torch.func (vmap, grad) is at work, or a level of forward-mode gradients."""
    return peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


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


def attention_order() -> tuple[Any, ...]:
    """In which order kernels of attention are tried, and whether the plain one may sum in half precision."""
    return *torch._C._get_sdp_priority_order(), torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


def set_attention_order(found: Sequence[Any]) -> None:
    """Switch to what `attention_order` has found."""
    *order, allows_half = found
    torch._C._set_sdp_priority_order(order)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allows_half)


HALF_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def half_sums() -> tuple[bool, ...]:
    """How products in half precision may be summed on GPUs."""
    return tuple(getattr(torch.backends.cuda.matmul, name) for name in HALF_SUMS)


def set_half_sums(found: Sequence[bool]) -> None:
    """Switch to what `half_sums` has found."""
    for name, is_on in zip(HALF_SUMS, found, strict=True):
        setattr(torch.backends.cuda.matmul, name, is_on)


PREFERRED = ("preferred_linalg_library", "preferred_blas_library", "preferred_rocm_fa_library")


def algorithms() -> tuple[Any, ...]:
    """Libraries that are preferred on GPUs; whether cuDNN times its algorithms, and takes deterministic ones alone;
    NNPACK."""
    preferred = (getattr(torch.backends.cuda, name)().name for name in PREFERRED)
    cudnn = torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_deterministic()
    return *preferred, *cudnn, torch._C._get_nnpack_enabled()


def set_algorithms(found: Sequence[Any]) -> None:
    """Switch to what `algorithms` has found."""
    *preferred, benchmarks, deterministic, nnpack = found
    for name, library in zip(PREFERRED, preferred, strict=True):
        now = getattr(torch.backends.cuda, name)()
        wanted = getattr(type(now), library)
        if now != wanted:  # torch warns of every choice
            getattr(torch.backends.cuda, name)(wanted)
    torch._C._set_cudnn_benchmark(benchmarks)
    torch._C._set_cudnn_deterministic(deterministic)
    torch._C._set_nnpack_enabled(nnpack)


def shortcuts() -> tuple[Any, ...]:
    """How torch takes operators apart: the order of an einsum's products, and the fast path of `nn.Transformer`."""
    einsum = torch.backends.opt_einsum
    return einsum.enabled, einsum.strategy, torch.backends.mha.get_fastpath_enabled()


def set_shortcuts(found: Sequence[Any]) -> None:
    """Switch to what `shortcuts` has found."""
    einsum: Any = torch.backends.opt_einsum
    enabled, strategy, fast = found
    if (einsum.enabled, einsum.strategy) != (enabled, strategy):  # torch refuses to switch on what is not installed
        einsum.enabled, einsum.strategy = enabled, strategy
    torch.backends.mha.set_fastpath_enabled(fast)


AUTOCAST_DEVICES = ("cpu", "cuda")


def autocast_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes of `torch.autocast` where it is given none, as in a model's forward."""
    return tuple(map(torch.get_autocast_dtype, AUTOCAST_DEVICES))


def set_autocast_dtypes(found: Sequence[torch.dtype]) -> None:
    """Switch to what `autocast_dtypes` has found."""
    for device, dtype in zip(AUTOCAST_DEVICES, found, strict=True):
        torch.set_autocast_dtype(device, dtype)


DETERMINISTIC: Any = torch.utils.deterministic  # a module with a property


def fills_memory() -> bool:
    """Whether deterministic algorithms fill what `torch.empty` gives."""
    return bool(DETERMINISTIC.fill_uninitialized_memory)


def set_fills_memory(found: bool) -> None:
    """Switch to what `fills_memory` has found."""
    DETERMINISTIC.fill_uninitialized_memory = found


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
