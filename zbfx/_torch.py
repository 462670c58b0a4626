"""Every private torch name that zbfx uses, each with the versions it was checked on.

aot_export_joint_with_descriptors   2.11.0, 2.13.0   joint forward and backward graph of a module
descriptors.*                       2.11.0, 2.13.0   what each input and output of that graph is
with_effects, _linalg_check_errors  2.11.0, 2.13.0   operators in that graph that act beside their results
aten._assert_async, _to_copy, ...   2.11.0, 2.13.0   other operators in that graph
OpOverload, ._schema, .namespace    2.11.0, 2.13.0   an operator; what it takes and gives; whose operator it is
FakeTensorMode, FakeTensor          2.11.0, 2.13.0   tensors with shape, dtype and device but no memory
DataDependentOutputException, ...   2.11.0, 2.13.0   what fake tensors raise where Python needs a value
torch._subclasses.fake_tensor       2.11.0, 2.13.0   also the name of its logger
torch.utils._pytree                 2.11.0, 2.13.0   nested inputs to flat leaves with key paths
_saved_tensors_hooks_set_tracing    2.13.0           whether saved-tensor hooks rest while tracing
Function._backward_cls              2.13.0           the class of the nodes that a custom Function makes
_top_saved_tensors_default_hooks    2.13.0           the hooks through which saved tensors pass
"Unexpected fake", ...              2.11.0, 2.13.0   what the tracer says of fake tensors that are not its own
FunctionalTensor                    2.11.0, 2.13.0   tensors whose in-place writes leave what is under them alone
torch._C._functorch                 2.11.0, 2.13.0   what torch.func wraps tensors in
_foreach_norm, _foreach_copy_       2.11.0, 2.13.0   one kernel for many tensors
_set_mkldnn_enabled                 2.11.0, 2.13.0   backends.mkldnn.flags sets more, and warns of it
_set_cudnn_enabled                  2.11.0, 2.13.0   backends.cudnn.flags sets more
reduce_scatter_single, ...          2.13.0           public, and called reduce_scatter_tensor in 2.11.0
_set_pg_timeout                     2.11.0, 2.13.0   a group's timeout after its creation, but for messages of gloo
_c10d_functional.wait_tensor        2.11.0, 2.13.0   the end of a collective in a graph
_detect_is_causal_mask              2.11.0, 2.13.0   nn.Transformer's look at a mask's values
compile_fx, GmWrapper               2.11.0, 2.13.0   a graph compiled to a function that empties its argument, a list
use_static_cuda_launcher            2.11.0, 2.13.0   which launcher compiled kernels have
TorchDispatchMode                   2.11.0, 2.13.0   sees, and may change, what operators do
_disable_current_modes              2.11.0, 2.13.0   modes that are on would change what is compiled
torch.compiler flags                2.11.0, 2.13.0   what `torch.compiler.is_exporting()` answers
OpOverload.py_kernels, ...          2.11.0, 2.13.0   what runs in place of an operator under the tracer
ShapeEnv, ConstantSource            2.11.0, 2.13.0   sizes that are symbols, and what holds of them
UntypedStorage._cdata               2.11.0, 2.13.0   the address of a storage, fake ones included
Module._parameters, ...             2.11.0, 2.13.0   the dicts of a module's parts and hooks
module._global_forward_hooks, ...   2.11.0, 2.13.0   the dicts of hooks on all modules
checkpoint.metadata, _StorageInfo   2.13.0           records in the table of contents of a DCP checkpoint
_non_persistent_buffers_set         2.11.0, 2.13.0   the buffers that a state_dict leaves out
_reset_parameters, _init_weights    2.11.0, 2.13.0   initialisers of modules, the latter a habit of models
_len_torch_function_stack, ...      2.11.0, 2.13.0   the function modes that are on, the default device among them
peek_interpreter_stack              2.11.0, 2.13.0   the transforms of torch.func that are at work
Tensor.grad_dtype                   2.11.0, 2.13.0   public since 2.10; the dtype of a tensor's gradient
_torchdynamo_orig_callable, ...     2.11.0, 2.13.0   functions and modules that torch.compile made
_check_tensor_all_with              2.11.0, 2.13.0   what torch._check_tensor_all calls
checkpoint._recomputation_hook      2.11.0, 2.13.0   what is around code that computes a checkpointed part again
torch.autograd._profiler_enabled    2.11.0, 2.13.0   whether torch.profiler, or emit_nvtx, records what runs
_LazyGraphModule                    2.11.0, 2.13.0   a graph module whose code is made when it is asked for
_functionalize_mutation_counter     2.11.0, 2.13.0   how often a tensor was written under the tracer
_execution_engine.queue_callback    2.11.0, 2.13.0   runs at the end of a backward
Node.metadata["traceback_"]         2.13.0           where the forward ran whose backward an autograd node is
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from types import FrameType, FunctionType
from typing import Any, TypeVar, cast

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._C._autograd import _saved_tensors_hooks_set_tracing, _top_saved_tensors_default_hooks
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._dynamo import external_utils
from torch._dynamo.source import ConstantSource
from torch._functorch._aot_autograd import descriptors as descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.checkpoint import filesystem as checkpoint_files
from torch.distributed.checkpoint import metadata as checkpoint_records
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.modules import transformer
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., Any])

DATA_DEPENDENT_SHAPE = DynamicOutputShapeException
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

# Inputs and outputs of a traced graph that keep operators with effects in order.
TOKENS = (
    descriptors.ForwardTokenAOTInput,
    descriptors.ForwardTokenAOTOutput,
    descriptors.BackwardTokenAOTInput,
    descriptors.BackwardTokenAOTOutput,
)

pytree = _pytree
TreeSpec = _pytree.TreeSpec
Operator = torch._ops.OpOverload
aten = torch.ops.aten  # the operators that traced graphs are made of

with_effects = torch.ops.higher_order.with_effects
CHECKING_OPERATORS = {aten._linalg_check_errors.default}  # operators with effects that only check values
ASSERT, ASSERT_WITH_MESSAGE = aten._assert_async.default, aten._assert_async.msg
CAST = aten._to_copy.default
CTC_LOSS, CTC_LOSS_BACKWARD = aten._ctc_loss, aten._ctc_loss_backward
NORMS = {  # their second and third results are the statistics that they normalised by
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
}
UNDECLARED_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default}  # views whose schemas do not say so

CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH_ATTENTION = aten._scaled_dot_product_flash_attention
FLASH_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_backward
ATTENTION = (CPU_ATTENTION, FLASH_ATTENTION.default, aten._scaled_dot_product_efficient_attention.default)
ATTENTION_BACKWARD = (
    CPU_ATTENTION_BACKWARD,
    FLASH_ATTENTION_BACKWARD.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
UNCHECKED = {  # operators that reach memory which their arguments do not bound
    aten.from_file,
    aten.set_,
    aten._unsafe_index,
    aten._unsafe_index_put,
    aten._unsafe_masked_index,
    aten._unsafe_masked_index_put_accumulate,
}
LOG_SOFTMAX = aten._log_softmax.default
CUDNN_ATTENTION = aten._scaled_dot_product_cudnn_attention.default
CUDNN_ATTENTION_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default

NAMESPACES = ("aten", "prims", "zbfx")  # of the operators that compute from their arguments alone, torch's and ours
COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")

# What the pickled table of contents of a torch.distributed.checkpoint consists of, beside plain values, by module and
# name.
CHECKPOINT_RECORDS: dict[tuple[str, str], Any] = {
    **{
        (record.__module__, record.__name__): record
        for record in (
            checkpoint_records.Metadata,
            checkpoint_records.TensorStorageMetadata,
            checkpoint_records.BytesStorageMetadata,
            checkpoint_records.TensorProperties,
            checkpoint_records.ChunkStorageMetadata,
            checkpoint_records.MetadataIndex,
            checkpoint_records.StorageMeta,
            checkpoint_records._MEM_FORMAT_ENCODING,
            checkpoint_files._StorageInfo,
            torch.Size,
        )
    },
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}

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
def without_fake_logs() -> Iterator[None]:
    """Let errors of operators on fake tensors be raised alone, without a log of their tracebacks."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Let operators run without oneDNN, the library for CPUs."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def uncompiled(function: Function) -> Function:
    """The function as one that an outer `torch.compile` calls and leaves alone."""
    return cast(Function, torch.compiler.disable(function))


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


def is_limit_of_fakes(error: BaseException) -> bool:
    """Whether code failed because its tensors are fake: no kernel for them, no memory, or C++ that wants plain ones."""
    kinds = (fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException, NotImplementedError)
    words = ("tensor subclass", "FakeTensor", "data pointer", "meta tensor")
    return isinstance(error, kinds) or any(word in str(error) for word in words)


def is_stray_write(error: BaseException) -> bool:
    """Whether code under the tracer wrote into a tensor that the tracer does not know."""
    return any(words in str(error) for words in ("mutating a non-functional tensor",))


def is_reentrant_checkpoint(error: BaseException) -> bool:
    """Whether a backward was refused for checkpointing with `use_reentrant=True`."""
    return any(words in str(error) for words in ("When use_reentrant=True, torch.utils.checkpoint is incompatible",))


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


def is_stray_fake(error: BaseException) -> bool:
    """Whether the tracer met a fake tensor that is not one of its own, like one of an earlier pass."""
    return any(words in str(error) for words in ("Unexpected fake", "in tensor_tracker"))


def is_write_into_leaf(error: BaseException) -> bool:
    """Whether autograd refuses to write into a tensor that requires a gradient. The tracer of torch 2.11 meets such a
    write where it follows a write through `.data`; that of torch 2.13 tells of the write."""
    return "a leaf Variable that requires grad" in str(error)


def enable_saved_tensor_hooks(*_: object) -> None:
    """Switch saved-tensor hooks on, which the tracer has switched off: checkpointing in a model is made of them."""
    _saved_tensors_hooks_set_tracing(False)


def functional(tensor: Tensor) -> Tensor:
    """A stand-in for a tensor under the tracer. Writes into it are values of the graph and do not reach the tensor."""
    return FunctionalTensor.to_functional(tensor)


def writes_into(tensor: Tensor) -> int:
    """How often a tensor was written under the tracer."""
    inner = tensor.elem if isinstance(tensor, FunctionalTensor) else None
    return version_of(tensor) if inner is None else int(torch._functionalize_mutation_counter(inner))


def under_the_tracer() -> list[Tensor]:
    """The stand-ins for tensors under the tracer, those included that only garbage holds."""
    return [found for found in gc.get_objects() if type(found) is FunctionalTensor]


def at_end_of_backward(work: Callable[[], None]) -> None:
    """Do something at the end of the backward that this is called in."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


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


def unwrapped(tensor: Any) -> Any:
    """The tensor under what torch.func (vmap, grad) wraps it in, which does not show in its type."""
    while isinstance(tensor, Tensor) and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


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


def graph_module(root: nn.Module | dict[str, nn.Module], graph: fx.Graph, name: str) -> fx.GraphModule:
    """The module of a graph. Its code is made at the first call, or when it is printed."""
    return _LazyGraphModule(root, graph, name)


def forward_lines(frame: FrameType) -> Sequence[str]:
    """Where the forward ran whose backward runs in this frame (noted while a joint graph is captured)."""
    node: Any = frame.f_locals.get("self")
    is_of_autograd = isinstance(node, torch.autograd.graph.Node)
    return node.metadata.get("traceback_", ()) if is_of_autograd else ()


def gradient_dtype(parameter: Tensor) -> torch.dtype | None:
    """The dtype of a parameter's gradients; None: whichever they have."""
    dtype: torch.dtype | None = parameter.grad_dtype
    return dtype


def set_gradient_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Let a parameter, which has no gradient yet or one of this dtype, have gradients of this dtype."""
    if parameter.grad_dtype is not dtype:
        parameter.grad_dtype = dtype


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether hooks wait for this parameter's gradient (`register_hook`, `register_post_accumulate_grad_hook`)."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def backward_class(function: type[torch.autograd.Function]) -> type:
    """The class of the nodes of autograd that a custom Function makes."""
    found: type = function._backward_cls
    return found


def has_hooks(tensor: Tensor) -> bool:
    """Whether hooks wait for the gradient of a tensor that is no parameter, or it keeps its gradient."""
    return bool(tensor._backward_hooks or tensor.retains_grad)


def keeps_saved_tensors_otherwise() -> bool:
    """Whether what autograd saves passes through hooks at the moment, as in a checkpointed part."""
    return _top_saved_tensors_default_hooks(True) is not None


def schema_of(operator: Any) -> torch.FunctionSchema | None:
    """The arguments and results of an operator of a graph; None for a plain function."""
    schema: torch.FunctionSchema | None = getattr(operator, "_schema", None)
    return schema


def is_collective(operator: Any) -> bool:
    """Whether a function of a graph is an operator that several processes call together."""
    return getattr(operator, "namespace", None) in COLLECTIVE_NAMESPACES


def is_function_of_arguments(operator: Any) -> bool:
    """Whether a function of a graph gives what its arguments say, and, where it is tagged as random, chance."""
    known = getattr(operator, "namespace", None) in (None, *NAMESPACES)
    return known or is_collective(operator)


def group_arguments(operator: Any) -> set[int | str]:
    """The positions and names of the arguments of a collective operator that name a group of processes."""
    if not is_collective(operator):
        return set()
    named = enumerate(operator._schema.arguments)
    return {place for index, argument in named if argument.name == "group_name" for place in (index, argument.name)}


def version_of(tensor: Tensor) -> int:
    """How often a tensor, or another on its memory, was written in place; inference tensors have no count."""
    return tensor._version


def is_optimized(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile` makes of another."""
    return hasattr(module, "_orig_mod")


def optimized_again(module: Any, copy: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """What `torch.compile` made of a module, made of a copy of that module."""
    made: nn.Module = type(module)(copy(module._orig_mod), module.dynamo_ctx)
    return made


def is_compiled(value: object) -> bool:
    """Whether a module or a function is compiled by `torch.compile`, or `module.compile()`."""
    if isinstance(value, nn.Module):
        return is_optimized(value) or value._compiled_call_impl is not None
    return original_of(value) is not value and not getattr(value, "_torchdynamo_disable", False)


def original_of(value: Any) -> Any:
    """The function that a function of `torch.compile` was made of; any other value itself."""
    if not isinstance(value, FunctionType):
        return value
    original: Any = getattr(value, "_torchdynamo_orig_callable", value)
    code = getattr(original, "__code__", None)
    inlined = code is not None and code.co_filename == external_utils.__file__  # methods of torch's own modules
    return original.__wrapped__ if inlined else original


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module keeps its own buffers: those of its submodules are theirs."""
    return module._buffers


def state_dict_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The dict in which a module keeps what runs before its `state_dict` is made."""
    return module._state_dict_pre_hooks


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict in which a module keeps its own parameters."""
    return module._parameters


def persistent_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its `state_dict` has."""
    return set(module._buffers) - module._non_persistent_buffers_set


def own_initializers(module: nn.Module) -> list[Callable[[], object]]:
    """What gives a module's own parameters and buffers their first values: `reset_parameters`, or `_reset_parameters`
    as of `nn.Transformer`, and `_init_weights(module)`, which many models have for all of their modules."""
    found = [getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")]
    methods = [method for method in found if callable(method) and not required_arguments(method)]
    init_weights = getattr(module, "_init_weights", None)
    if callable(init_weights) and len(required_arguments(init_weights)) == 1:
        methods.append(lambda: module.apply(init_weights))
    return methods


def required_arguments(function: Callable[..., Any]) -> list[str]:
    gathering = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in gathering]


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict in which a module keeps its direct submodules."""
    return module._modules


def part_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts in which a module keeps its parameters, buffers and submodules."""
    return [vars(module)[name] for name in ("_parameters", "_buffers", "_modules")]


def hook_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts in which a module keeps the hooks on its forward and backward."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [vars(module)[name] for name in names]


def hooks_of_all_modules() -> list[dict[Any, Any]]:
    """The dicts of the hooks that torch calls for every module (`register_module_forward_hook`)."""
    module: Any = nn.modules.module
    return [module._global_forward_pre_hooks, module._global_forward_hooks]


def backward_hook_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts in which a module keeps the hooks on its backward."""
    return [module._backward_pre_hooks, module._backward_hooks]


def sum_shards(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum `whole` over a group, and to write this process's part of the sum into `shard`."""
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = start(shard, whole, group=group, async_op=True)
    return work


def join_shards(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to write each process's shard into `whole`, on all of a group."""
    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = start(whole, shard, group=group, async_op=True)
    return work


wait_tensor = torch.ops._c10d_functional.wait_tensor.default


def waited(collective: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The result of a functional collective once it is there."""
    result: Tensor = wait_tensor(collective(*args, **kwargs))
    return result


def local_description(description: Any) -> Any:
    """What an input or output of a traced graph is, if it is the local part of a DTensor; None for a DTensor's mesh."""
    if isinstance(description, descriptors.SubclassGetAttrAOTInput | descriptors.SubclassGetAttrAOTOutput):
        return description.base if description.attr == "_local_tensor" else None
    return description


def group_store(group: dist.ProcessGroup) -> dist.Store:
    return group.get_group_store()


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long collectives of a group wait from now on; messages of gloo keep the timeout of its creation."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def foreach_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, complex ones too, in float64."""
    real = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]
    return list(torch._foreach_norm(real, 2.0, dtype=torch.float64))


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, which may be on another device; in the order of the current stream."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, fake_tensor.FakeTensor)


def is_constant(tensor: Tensor) -> bool:
    """Whether a tensor has values under the tracer."""
    return not isinstance(tensor, fake_tensor.FakeTensor | FunctionalTensor)


def fake_strided(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A fake tensor of this layout, on a storage of its own, made without the dispatcher, which is slow."""
    base = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if offset:
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        base = torch.empty(offset + max(extent, 0), dtype=dtype, device="meta").as_strided(shape, stride, offset)
    return fake_tensor.FakeTensor(mode, base, device)


def shape_env() -> ShapeEnv:
    """Where the tracer keeps symbols; sizes that depend on values of tensors are refused as they are without it."""
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)


def symbolic_size(env: ShapeEnv, name: str, value: int) -> torch.SymInt:
    """A size that is a symbol, and `value` in the shapes that are traced."""
    source = ConstantSource(name)
    symbol = env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=value, source=source)
    assert isinstance(size, torch.SymInt), "a symbol, not a number"
    return size


def size_guards(env: ShapeEnv) -> list[sympy.Basic]:
    """What must hold of the symbols for the graph to hold."""
    guards: list[sympy.Basic] = [guard.expr for guard in env.guards]
    guards += [sympy.Eq(symbol, value) for symbol, value in env.replacements.items()]
    for symbol, limits in env.var_to_range.items():
        guards += [limit for limit in (symbol >= limits.lower, symbol <= limits.upper) if limit is not sympy.true]
    return guards


def profiler_records() -> bool:
    """Whether torch.profiler or `torch.autograd.profiler.emit_nvtx` is on in this thread."""
    return torch.autograd._profiler_enabled()


def writes_arguments(operator: Any) -> bool:
    """Whether an operator writes into some of its arguments."""
    return bool(operator._schema.is_mutable)


def written_tensors(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operator writes into."""
    found = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Meanwhile no mode of the dispatcher is on: operators of real tensors compute as in eager."""
    return _disable_current_modes()


def storage_of(tensor: Tensor) -> int:
    """The address of what a tensor, fake or not, is a view of."""
    return tensor.untyped_storage()._cdata


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, fake or not, are views of one storage."""
    return storage_of(one) == storage_of(other)


def inductor(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Compile a graph of aten ops for arguments like these: to a function of a list, which it empties, and in which
    each argument dies at its last use. Kernels are launched by Triton's own launcher: torch's holds the interpreter's
    lock while it waits for a place in the device's queue, and no thread could end a wait that never ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of its own modules as it imports them
        from torch._dynamo.utils import GmWrapper
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

    with _disable_current_modes(), config.patch(use_static_cuda_launcher=False):
        compiled = compile_fx(GmWrapper(module, lambda args: args), list(examples))
    return cast(Callable[[list[Any]], Any], compiled)
