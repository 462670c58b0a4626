"""Why a model cannot be traced, read from exceptions that were raised under the tracer.

DataDependentOutputException, ...   2.11.0, 2.13.0   what fake tensors raise where Python needs a value
torch._subclasses.fake_tensor       2.11.0, 2.13.0   also the name of its logger
"Unexpected fake", ...              2.11.0, 2.13.0   what the tracer says of fake tensors that are not its own
Node.metadata["traceback_"]         2.13.0           where the forward ran whose backward an autograd node is
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

DATA_DEPENDENT_SHAPE = DynamicOutputShapeException
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@contextlib.contextmanager
def without_fake_logs() -> Iterator[None]:
    """Let errors of operators on fake tensors be raised alone, without a log of their tracebacks."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def is_limit_of_fakes(error: BaseException) -> bool:
    """Whether code failed because its tensors are fake: no kernel for them, no memory, or C++ that wants plain ones."""
    kinds = (fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException, NotImplementedError)
    words = ("tensor subclass", "FakeTensor", "data pointer", "meta tensor")
    return isinstance(error, kinds) or any(word in str(error) for word in words)


def is_stray_fake(error: BaseException) -> bool:
    """Whether the tracer met a fake tensor that is not one of its own, like one of an earlier pass."""
    return any(words in str(error) for words in ("Unexpected fake", "in tensor_tracker"))


def is_stray_write(error: BaseException) -> bool:
    """Whether code under the tracer wrote into a tensor that the tracer does not know."""
    return any(words in str(error) for words in ("mutating a non-functional tensor",))


def is_write_into_leaf(error: BaseException) -> bool:
    """Whether autograd refuses to write into a tensor that requires a gradient. The tracer of torch 2.11 meets such a
    write where it follows a write through `.data`; that of torch 2.13 tells of the write."""
    return "a leaf Variable that requires grad" in str(error)


def is_reentrant_checkpoint(error: BaseException) -> bool:
    """Whether a backward was refused for checkpointing with `use_reentrant=True`."""
    return any(words in str(error) for words in ("When use_reentrant=True, torch.utils.checkpoint is incompatible",))


def forward_lines(frame: FrameType) -> Sequence[str]:
    """Where the forward ran whose backward runs in this frame (noted while a joint graph is captured)."""
    node: Any = frame.f_locals.get("self")
    is_of_autograd = isinstance(node, torch.autograd.graph.Node)
    return node.metadata.get("traceback_", ()) if is_of_autograd else ()
