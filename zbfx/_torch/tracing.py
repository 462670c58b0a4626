"""Capturing a joint graph: the tracer, its settings, and its descriptions of inputs, outputs and nodes.

aot_export_joint_with_descriptors   2.11.0, 2.13.0   joint forward and backward graph of a module
descriptors.*                       2.11.0, 2.13.0   what each input and output of that graph is
torch.compiler flags                2.11.0, 2.13.0   what `torch.compiler.is_exporting()` answers
_detect_is_causal_mask              2.11.0, 2.13.0   nn.Transformer's look at a mask's values
OpOverload.py_kernels, ...          2.11.0, 2.13.0   what runs in place of an operator under the tracer
_check_tensor_all_with              2.11.0, 2.13.0   what torch._check_tensor_all calls
_saved_tensors_hooks_set_tracing    2.13.0           whether saved-tensor hooks rest while tracing
checkpoint._recomputation_hook      2.11.0, 2.13.0   what is around code that computes a checkpointed part again
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._C._autograd import _saved_tensors_hooks_set_tracing
from torch._functorch._aot_autograd import descriptors as descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.modules import transformer
from torch.utils import checkpoint as checkpointing

from zbfx._torch.operators import ASSERT_WITH_MESSAGE

# Inputs and outputs of a traced graph that keep operators with effects in order.
TOKENS = (
    descriptors.ForwardTokenAOTInput,
    descriptors.ForwardTokenAOTOutput,
    descriptors.BackwardTokenAOTInput,
    descriptors.BackwardTokenAOTOutput,
)


def local_description(description: Any) -> Any:
    """What an input or output of a traced graph is, if it is the local part of a DTensor; None for a DTensor's mesh."""
    if isinstance(description, descriptors.SubclassGetAttrAOTInput | descriptors.SubclassGetAttrAOTOutput):
        return description.base if description.attr == "_local_tensor" else None
    return description


# The text that autograd leaves on the nodes that add up gradients of a value with several uses.
GRADIENT_ADDITION_MARK = "Gradient addition node"


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Answer True to `torch.compiler.is_exporting()` and `is_compiling()`. Model code asks these before it looks at
    values of tensors; without them half of the transformers library runs into data-dependent control flow."""
    flags = torch.compiler
    before = flags._is_exporting_flag, flags._is_compiling_flag
    flags._is_exporting_flag = flags._is_compiling_flag = True
    try:
        yield
    finally:
        flags._is_exporting_flag, flags._is_compiling_flag = before


@contextlib.contextmanager
def without_looks_at_masks() -> Iterator[None]:
    """Let the layers of `nn.Transformer` take a mask for a causal one only where they are told so. They would otherwise
    compare its values. Attention gives equal results, but without the kernels for causal masks."""
    before = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before


@contextlib.contextmanager
def checks_in_the_graph() -> Iterator[None]:
    """Let `torch._check_tensor_all` and its like check values wherever the graph runs, and not on fake tensors."""
    before = torch._check_tensor_all_with

    def check(error_type: type, cond: Any, message: Callable[[], object] | None = None) -> None:
        if isinstance(cond, FunctionalTensor) and cond.dtype is torch.bool:
            text = str(message()) if message else "found False where torch._check_tensor_all expects True"
            ASSERT_WITH_MESSAGE(cond.all(), text)
        else:
            before(error_type, cond, message)

    torch._check_tensor_all_with = check
    try:
        yield
    finally:
        torch._check_tensor_all_with = before


def enable_saved_tensor_hooks(*_: object) -> None:
    """Switch saved-tensor hooks on, which the tracer has switched off: checkpointing in a model is made of them."""
    _saved_tensors_hooks_set_tracing(False)


@contextlib.contextmanager
def recomputing_within(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Meanwhile, code that computes a checkpointed part again runs within a new `context()`."""
    before = checkpointing._recomputation_hook

    class Within(before):  # type: ignore[misc, valid-type]
        def __enter__(self) -> None:
            super().__enter__()
            self.context = context()
            self.context.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.context.__exit__(*error)
            super().__exit__(*error)

    checkpointing._recomputation_hook = Within  # type: ignore[misc]
    try:
        yield
    finally:
        checkpointing._recomputation_hook = before  # type: ignore[misc]


@contextlib.contextmanager
def decomposing(decompositions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let the tracer take operators apart by these functions, and not as torch does."""
    keys = {  # the kernels to replace: for an operator that torch takes apart, those that do so
        operator: DispatchKey.CompositeImplicitAutograd if operator._can_decompose() else DispatchKey.Autograd
        for operator in decompositions
    }
    before = {operator: operator.py_kernels.get(key) for operator, key in keys.items()}

    def put(kernels: Mapping[Any, Any]) -> None:
        for operator, kernel in kernels.items():
            operator.py_kernels.pop(keys[operator], None)
            if kernel is not None:
                operator.py_kernels[keys[operator]] = kernel
            operator._dispatch_cache.clear()

    put(decompositions)
    try:
        yield
    finally:
        put(before)


def capture_joint(module: nn.Module, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The functional joint graph of `module(*inputs)`, whose parameters, buffers and inputs are fake tensors. Autograd
    itself runs under the tracer, so custom Functions, hooks and checkpointing are what they are in eager (torch.export
    would trace the forward alone and differentiate that)."""
    with contextlib.ExitStack() as stack, fx.traceback.preserve_node_meta(), exporting(), _use_lazy_graph_module(True):
        stack.callback(module.register_forward_pre_hook(enable_saved_tensor_hooks).remove)
        joint = aot_export_joint_with_descriptors(stack, module, tuple(inputs))
        graph_module = joint.graph_module
        for node in graph_module.graph.nodes:
            node.meta["is_backward"] = node.meta.get("partitioner_tag") != "is_forward"
        return graph_module
