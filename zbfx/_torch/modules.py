"""What modules keep: parts, hooks, initialisers; and which modules and functions `torch.compile` has made.

Module._parameters, ...             2.11.0, 2.13.0   the dicts of a module's parts and hooks
module._global_forward_hooks, ...   2.11.0, 2.13.0   the dicts of hooks on all modules
_non_persistent_buffers_set         2.11.0, 2.13.0   the buffers that a state_dict leaves out
_reset_parameters, _init_weights    2.11.0, 2.13.0   initialisers of modules, the latter a habit of models
_torchdynamo_orig_callable, ...     2.11.0, 2.13.0   functions and modules that torch.compile made
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch._dynamo import external_utils


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict in which a module keeps its own parameters."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module keeps its own buffers: those of its submodules are theirs."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict in which a module keeps its direct submodules."""
    return module._modules


def persistent_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its `state_dict` has."""
    return set(module._buffers) - module._non_persistent_buffers_set


def part_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts in which a module keeps its parameters, buffers and submodules."""
    return [vars(module)[name] for name in ("_parameters", "_buffers", "_modules")]


def hook_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts in which a module keeps the hooks on its forward and backward."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [vars(module)[name] for name in names]


def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The dict in which a module keeps what runs before its forward."""
    return module._forward_pre_hooks


def backward_hook_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts in which a module keeps the hooks on its backward."""
    return [module._backward_pre_hooks, module._backward_hooks]


def hooks_of_all_modules() -> list[dict[Any, Any]]:
    """The dicts of the hooks that torch calls for every module (`register_module_forward_hook`)."""
    module: Any = nn.modules.module
    return [module._global_forward_pre_hooks, module._global_forward_hooks]


def state_dict_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The dict in which a module keeps what runs before its `state_dict` is made."""
    return module._state_dict_pre_hooks


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


def is_optimized(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile` makes of another."""
    return hasattr(module, "_orig_mod")


def optimized_again(module: Any, copy: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A compiled module again, around a copy of its original."""
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
