"""Why a model cannot be traced: what failed, whether the example is to blame, and at which line of the user's code."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from zbfx._torch import untraceable
from zbfx._torch.operators import aten
from zbfx.errors import TraceError, first_line

WRAPPERS = (contextlib.__file__, functools.__file__)  # files in the stack of all decorated code
OWN_FOLDER = str(Path(__file__).parents[1])
LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), OWN_FOLDER, *WRAPPERS)
DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
CHECKS_OF_VALUES = ("torch._check", "assert ")  # in a line of code
CHECKS_OF_ARGUMENTS = ("__init__", "_validate_sample")
UNKNOWN_LINE = "an unknown line"
WHOLE_SHAPES = (
    "Compute with all entries and weigh them by a mask (x * mask, torch.where(mask, x, 0)), give sizes as numbers "
    "(output_size=), or find the indices outside of the model and pass them as inputs"
)
OF_EXAMPLE, OF_BATCH = "the example", "this batch"  # what a trace is made for
FIT = {
    OF_EXAMPLE: "Give example_inputs and example_kwargs as the model's forward takes them, and example_targets as "
    "loss_fn does after outputs",
    OF_BATCH: "Give a batch that the model's forward and its loss take, microbatch by microbatch",
}

# Operators whose kernels refuse a mix of dtypes, while those for fake tensors let it pass.
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.convolution)
ONE_DTYPE = {product.default for product in PRODUCTS}


def refuse(error: Exception, model: nn.Module, part: str, fails_alone: Callable[[], bool], given: str) -> None:
    """Raise the `TraceError` for an error in tracing. `part` is what was at work: "the model", "loss_fn", or "the
    backward". `fails_alone` says whether the plain model fails on the example too."""
    if isinstance(error, untraceable.DATA_DEPENDENT_ERRORS):
        raise TraceError(
            f"the model needs the values of a tensor for the shape of another one, which one graph cannot hold "
            f"({error}), at {user_line(error)}. {WHOLE_SHAPES}"
            if isinstance(error, untraceable.DATA_DEPENDENT_SHAPE)
            else f"the model decides by a tensor's value what to run next, which one graph cannot hold ({error}), "
            f"at {user_line(error)}. {way_out(error)}"
        ) from error
    refuse_flex_attention(error)
    if untraceable.is_stray_fake(error):
        raise TraceError(
            "the model finds a tensor that an earlier forward made and kept outside of its modules' attributes "
            "(functools.cache, a global, an object): one graph holds no first forward, and what is kept there now has "
            "no data. Clear it (cache_clear()), and make the tensor in __init__ (register_buffer)"
        ) from error
    if untraceable.is_reentrant_checkpoint(error):
        raise TraceError(
            "the model checkpoints a part with use_reentrant=True, which runs a backward within the backward: no graph "
            "holds that. Pass use_reentrant=False to torch.utils.checkpoint (in transformers, "
            "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}))"
        ) from error
    if untraceable.is_stray_write(error):
        raise TraceError(
            f"{part} writes in place into a tensor that the model does not hold as a parameter or buffer, at "
            f"{user_line(error)}: the write would be lost. Make it a buffer (register_buffer). A hook that is no "
            f"method finds the model that was traced in its arguments, not in its closure"
        ) from error
    line, module = user_line(error), module_at_work(error, model)
    has_line = bool(user_frames(error))
    at = f"at {line}" + (f" in {module}" if module else "") if has_line else f"in {part}"
    if any("_higher_order_ops" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        raise TraceError(
            f"the model runs an operator that holds graphs of its own, like torch.cond, at {line}: its backward cannot "
            f"be split. Use torch.where, or take the decision outside the model"
        ) from error
    if untraceable.is_write_into_leaf(error) and not fails_alone():
        raise TraceError(
            f"the model writes in place into a parameter, {at}; write into a copy (`x = x.clone()`) or a buffer"
        ) from error
    text = f"{type(error).__name__}: {first_line(error).removesuffix('.')}"
    if not untraceable.is_limit_of_fakes(error) and fails_alone():
        change = ", or change that line" if has_line else ""
        raise TraceError(
            f"the arguments of {given} do not fit {part}, which fails on them without zbfx too: {text}, {at}. "
            f"{FIT[given]}{change}"
        ) from error
    raise TraceError(
        f"the model cannot be traced: {text}, {at}. Change that line, or "
        f"make it an operator of its own (torch.library.custom_op with register_fake and register_autograd)"
    ) from error


def way_out(error: Exception) -> str:
    """What to do about a decision by a tensor's value."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(DISTRIBUTIONS) and frame.name in CHECKS_OF_ARGUMENTS:
            return (
                "torch.distributions looks there whether its arguments are valid: pass validate_args=False, or call "
                "torch.distributions.Distribution.set_default_validate_args(False)"
            )
    frames = user_frames(error)
    if frames and any(word in (frames[-1].line or "") for word in CHECKS_OF_VALUES):
        return (
            "To check values in every step, give torch._check_tensor_all the tensor of booleans, without .item() and "
            ".all(): torch._check_tensor_all(x < 100) for torch._check(x.max().item() < 100) or assert (x < 100).all()"
        )
    return (
        "Use torch.where for a choice between values, keep numbers in tensors (no .item(), int(), .tolist()), let "
        "torch._check_tensor_all check values, or take the decision outside the model"
    )


def refuse_mixed_dtypes(graph: fx.Graph) -> None:
    """Raise where an operator of the forward gets a mix of dtypes that its kernel refuses. The example then has another
    dtype than the parameters."""
    for node in graph.nodes:
        values = [source.meta.get("val") for source in node.all_input_nodes] if node.target in ONE_DTYPE else []
        dtypes = dict.fromkeys(str(value.dtype) for value in values if isinstance(value, Tensor))
        if len(dtypes) > 1 and not node.meta.get("is_backward"):
            operator = str(node.target).removesuffix(".default")
            raise TraceError(
                f"the arguments of the example do not fit the model: {operator} gets tensors of {' and '.join(dtypes)} "
                f"at {node.meta.get('stack_trace') or UNKNOWN_LINE}, and takes one dtype. Give the example in the "
                f"dtypes that a step will get, and convert either these tensors or the model (model.to(dtype))"
            )


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames that an error went through outside of torch and zbfx; if there are none, those of layers of torch."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [f for f in stack if f.line and not f.filename.startswith(LIBRARY_FOLDERS)]  # made-up code has no lines
    return frames or [f for f in stack if "/nn/modules/" in f.filename and not f.filename.endswith("/module.py")]


def user_line(error: BaseException) -> str:
    """File, line and text of the innermost of `user_frames`; in a backward, the line whose backward it is."""
    frames = user_frames(error)
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno} `{frames[-1].line}`"
    lines = [line for frame, _ in traceback.walk_tb(error.__traceback__) for line in untraceable.forward_lines(frame)]
    return lines[-1] if lines else UNKNOWN_LINE


def module_at_work(error: BaseException, model: nn.Module) -> str:
    """The name of the innermost submodule whose method an error went through; "" for the model itself."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return found


def refuse_flex_attention(error: BaseException) -> None:
    """Raise if an error came from flex_attention, whose scores are a graph inside an operator."""
    stack = traceback.extract_tb(error.__traceback__)
    if any(frame.filename.endswith("/nn/attention/flex_attention.py") for frame in stack):
        raise TraceError(
            f"the model calls flex_attention, at {user_line(error)}: what it does to the scores is a graph inside an "
            f"operator, whose backward cannot be split (and does not exist on a CPU). Use "
            f"torch.nn.functional.scaled_dot_product_attention, with the scores' bias or mask as attn_mask"
        ) from error


def refuse_subclass(name: str, tensor: Any) -> None:
    """Raise for a tensor that is made of others, like a DTensor: a stage cannot hold or send it as one value."""
    if hasattr(tensor, "__tensor_flatten__"):
        raise TraceError(
            f"{name} is a {type(tensor).__name__}, a tensor made of other tensors; expected a plain torch.Tensor. "
            f"Give the pipeline plain tensors (for a DTensor, `.to_local()` or `.full_tensor()`), and shard around it"
        )
