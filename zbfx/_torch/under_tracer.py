"""While code runs under the tracer: stand-ins for tensors, their writes, and nodes and hooks of autograd.

Function._backward_cls              2.13.0           the class of the nodes that a custom Function makes
_top_saved_tensors_default_hooks    2.13.0           the hooks through which saved tensors pass
torch._C._functorch                 2.11.0, 2.13.0   what torch.func wraps tensors in
_functionalize_mutation_counter     2.11.0, 2.13.0   how often a tensor was written under the tracer
_execution_engine.queue_callback    2.11.0, 2.13.0   runs at the end of a backward
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from zbfx._torch.tensors import version_of


def functional(tensor: Tensor) -> Tensor:
    """A stand-in for a tensor under the tracer. Writes into it are values of the graph and do not reach the tensor."""
    return FunctionalTensor.to_functional(tensor)


def writes_into(tensor: Tensor) -> int:
    """How often a tensor was written under the tracer."""
    inner = tensor.elem if isinstance(tensor, FunctionalTensor) else None
    return version_of(tensor) if inner is None else int(torch._functionalize_mutation_counter(inner))


def stand_ins() -> list[Tensor]:
    """The stand-ins for tensors under the tracer, those included that only garbage holds."""
    return [found for found in gc.get_objects() if type(found) is FunctionalTensor]


def unwrapped(tensor: Any) -> Any:
    """The tensor inside the wrappers of torch.func (vmap, grad), which do not show in its type."""
    while isinstance(tensor, Tensor) and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def backward_class(function: type[torch.autograd.Function]) -> type:
    """The class of the nodes of autograd that a custom Function makes."""
    found: type = function._backward_cls
    return found


def keeps_saved_tensors_otherwise() -> bool:
    """Whether what autograd saves passes through hooks at the moment, as in a checkpointed part."""
    return _top_saved_tensors_default_hooks(True) is not None


def at_end_of_backward(work: Callable[[], None]) -> None:
    """Do something at the end of the backward that this is called in."""
    torch.autograd.Variable._execution_engine.queue_callback(work)
