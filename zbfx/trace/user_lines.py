"""Notes in each traced node the user's line and the submodule that made it; refuses lines that no graph can hold."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from zbfx._torch import under_tracer
from zbfx._torch.switches import without_mkldnn
from zbfx.errors import TraceError
from zbfx.trace.backward_code import Hook
from zbfx.trace.refusals import LIBRARY_FOLDERS, OWN_FOLDER

LAYERS = str(Path(nn.modules.__file__).parent)
READS_NODE = inspect.getattr_static(Tensor, "grad_fn").__get__  # as modes see that a tensor's node is asked for


class UserLines(TorchFunctionMode):
    """Writes the user's line and the submodule at work into every node that is traced: `model.py:12 in blocks.0`."""

    def __init__(self, model: nn.Module, watched: Callable[[Hook], Hook]) -> None:
        """`watched` gives what to register in place of a hook on the gradient of a tensor."""
        super().__init__()
        self.modules, self.watched = [""], watched
        self.doors: list[FrameType] = []  # what runs the model: calls before it are none of the model's
        self.looks_at_autograd = False  # whether the model asks for nodes of autograd, which it may put hooks on
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _module, _args, name=name: self.modules.append(name))
            module.register_forward_hook(self.leave, always_call=True)

    def __enter__(self) -> UserLines:
        self.doors.append(sys._getframe(1))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.doors.pop()
        super().__exit__(*error)

    def frame_of(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame of a user's code in the model, from a call on; else that of a layer of torch."""
        layer = None
        while frame is not None and frame.f_code.co_filename.startswith(LIBRARY_FOLDERS):
            if self.doors and frame is self.doors[-1]:
                return layer
            if layer is None and is_of_layer(frame):
                layer = frame
            frame = frame.f_back
        return frame

    def leave(self, *_: Any) -> None:
        self.modules.pop()

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Meanwhile, a submodule of this name is at work."""
        self.modules.append(name)
        try:
            yield
        finally:
            self.modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = sys._getframe(1)
        is_ours = frame is not None and frame.f_code.co_filename.startswith(OWN_FOLDER)
        frame = self.frame_of(frame)
        if frame is not None:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            fx.traceback.set_stack_trace([f"{line} in {self.modules[-1]}" if self.modules[-1] else line])
            if writes(func, args):
                raise TraceError(
                    f"the model writes in place ({func.__name__}) into a tensor of shape {tuple(args[0].shape)} that "
                    f"it holds outside its parameters and buffers, at {line}: the write would be lost. Make it a "
                    f"buffer (register_buffer), or write into a copy"
                )
            if func is Tensor.backward:
                raise TraceError(
                    f"the model or its loss runs a backward of its own (Tensor.backward) at {line}: its gradients "
                    f"would be lost. Return the loss, or give its gradient in the backward of a torch.autograd.Function"
                )
            self.looks_at_autograd |= func == READS_NODE and not is_ours
            if func is Tensor.register_hook:
                args = (args[0], self.watched(args[1]))
            if any(isinstance(value, torch.Generator) for value in (*args, *(kwargs or {}).values())):
                raise TraceError(
                    f"the model draws random numbers from a torch.Generator ({func.__name__}) at {line}: one graph "
                    f"cannot hold its state. Leave out generator=; a pipeline draws from (seed, step, microbatch, "
                    f"place in the model), with the seed of run_local or bind. Numbers that are to be the same in "
                    f"every forward are drawn in __init__ (register_buffer)"
                )
        # The fused LSTM of oneDNN keeps what its backward needs only where autograd sees it run.
        fused = func is torch.lstm
        with without_mkldnn() if fused else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def is_of_layer(frame: FrameType) -> bool:
    """Whether a frame is one of a layer of torch's own."""
    file = frame.f_code.co_filename
    return file.startswith(LAYERS) and file != nn.modules.module.__file__


def writes(func: Any, args: Any) -> bool:
    """Whether a torch function (`add_`, `__iadd__`, `__setitem__`) changes its first argument, and the tracer does not
    know that tensor. torch.func calls `requires_grad_` on the wrappers of tensors, which changes no tensor."""
    name = str(getattr(func, "__name__", ""))
    if not ((name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"):
        return False
    inner = under_tracer.unwrapped(args[0])
    return type(inner) is Tensor and (inner is args[0] or func is not Tensor.requires_grad_)
