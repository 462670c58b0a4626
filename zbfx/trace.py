"""Model, loss and an example microbatch -> `Joint`: one graph of forward, loss and backward.

Nothing is allocated and nothing changes: the model is copied with fake tensors in place of its parameters and
buffers, and the copy is traced.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from zbfx import _torch
from zbfx.batch import Signature
from zbfx.errors import TraceError, ZbfxError, listed
from zbfx.first_forward import FirstForward, take_made
from zbfx.graphs import Joint, Port, Role, copy_graph
from zbfx.passes.sizes import inline_sizes
from zbfx.refusals import LIBRARY_FOLDERS, UNKNOWN_LINE, refuse, refuse_flex_attention, refuse_mixed_dtypes
from zbfx.sizes import Sizes
from zbfx.tensor_parallel import fake_sharded, is_sharded, localize, place_gradients

MODEL_PREFIX, LOSS_PREFIX = "model.", "loss_fn."


class KeptTensors(Exception):
    """Tracing has failed, and the model has made tensors in the first pass that it may have found in the next."""


class Objective(nn.Module):
    """Model and loss as one module over the flat tensors of a microbatch; returns the scalar loss."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, signature: Signature, *, traced: bool = True
    ) -> None:
        super().__init__()
        self.model, self.loss_fn, self.signature = model, loss_fn, signature
        self.lines = UserLines(model) if traced else contextlib.nullcontext()
        self.part = "the model"  # at work: else "loss_fn", or "the backward"
        self.replaced: set[str] = set()  # buffers
        self.first = FirstForward(("", model), (LOSS_PREFIX.removesuffix("."), loss_fn))
        self.starts_afresh = False  # every pass is a first forward
        self.made: list[str] = []  # the names of what it made, a further output each
        self.results = 1

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.starts_afresh:
            self.first.restore()
        buffers = dict(self.named_buffers(remove_duplicate=False))
        place_gradients(self.model)
        loss, *count = self.losses(tensors)
        for name, buffer in buffers.items():
            if self.get_buffer(name) is not buffer:
                keep_replaced(name, buffer, self.get_buffer(name))
                self.replaced.add(name.removeprefix(MODEL_PREFIX))
        loss.register_hook(self.keep_buffers)
        made = self.first.made() if self.starts_afresh else {}
        self.made = [name for name, (found, _) in made.items() for _ in found]
        copies = [tensor.detach().clone() for found, _ in made.values() for tensor in found]
        self.results = 1 + len(count)
        return (loss, *count, *copies) if count or copies else loss

    def losses(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args, kwargs = self.signature.unflatten(tensors)
        with self.lines:
            output = self.model(*args[: self.signature.input_count], **kwargs)
            if self.loss_fn is None:
                return (checked_loss(model_loss(output), "the model"),)
            self.part = "loss_fn"
            loss = self.loss_fn(output, *args[self.signature.input_count :])
            if not isinstance(loss, tuple):
                return (checked_loss(loss, "loss_fn"),)
            return checked_loss(loss[0], "loss_fn"), checked_count(loss)

    def keep_buffers(self, _: Tensor) -> None:
        """As the backward begins: recomputing reads buffers as the forward found them, and its writes go nowhere."""
        self.part = "the backward"
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                module._buffers[name] = _torch.functional(buffer)


def keep_replaced(name: str, before: Tensor, after: Tensor | None) -> None:
    """A buffer that the model replaces (`self.count = self.count + 1`) is written like one changed in place."""
    if after is None or after.shape != before.shape or after.dtype != before.dtype:
        found = "nothing" if after is None else f"{after.dtype} of shape {tuple(after.shape)}"
        raise TraceError(
            f"the model replaces {name.removeprefix(MODEL_PREFIX)}, {before.dtype} of shape {tuple(before.shape)}, by "
            f"{found}: one graph cannot hold both. Keep shape and dtype, or keep the value out of the model"
        )
    with torch.no_grad():
        before.copy_(after.detach())


def model_loss(output: Any) -> Any:
    """The loss in the output of a model that computes it: the output itself, its `.loss`, or its first entry."""
    if isinstance(output, dict):
        return output.get("loss")
    if isinstance(output, tuple) and output:
        return output[0]
    return getattr(output, "loss", output)


def checked_loss(loss: Any, source: str) -> Tensor:
    refuse_subclass(f"the loss that {source} returns", loss)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TraceError(
            f"{source} must return a scalar loss; found {found}. "
            f"Pass loss_fn=(outputs, *targets) -> scalar, or let the model return its loss (as `.loss`, or first)"
        )
    if not loss.requires_grad:
        raise TraceError(
            f"the loss that {source} returns does not require grad: no trainable parameter reaches it. "
            f"Check requires_grad of the parameters, and that nothing detaches the loss or runs under torch.no_grad(). "
            f"A loss that computes its own gradient returns it from the backward of a torch.autograd.Function"
        )
    return loss.reshape(()) if loss.ndim else loss


def checked_count(loss: tuple[Any, ...]) -> Tensor:
    if len(loss) != 2 or not isinstance(loss[1], Tensor) or loss[1].numel() != 1:
        raise TraceError(
            f"loss_fn returns a scalar, or (sum, count) of two scalar tensors; found {len(loss)} entries, "
            f"the second {type(loss[1]).__name__ if len(loss) > 1 else 'missing'}. "
            f"Count on tensors: (targets != -100).sum()"
        )
    return loss[1].detach().reshape(())


class UserLines(TorchFunctionMode):
    """Writes the user's file and line, and the submodule at work, into every node traced: `model.py:12 in blocks.0`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = [""]
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _module, _args, name=name: self.modules.append(name))
            module.register_forward_hook(self.leave, always_call=True)

    def leave(self, *_: Any) -> None:
        self.modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(LIBRARY_FOLDERS):
            frame = frame.f_back
        if frame is not None:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            fx.traceback.set_stack_trace([f"{line} in {self.modules[-1]}" if self.modules[-1] else line])
            if writes(func) and type(args[0]) is Tensor:
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
        # The fused layer of the CPU library keeps what its backward needs only where autograd sees it run.
        fused = func is torch.lstm
        with _torch.without_mkldnn() if fused else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def writes(func: Any) -> bool:
    """Whether a torch function changes its first argument: `add_`, `__iadd__`, `__setitem__`."""
    name = str(getattr(func, "__name__", ""))
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


# A step may meet a new shape, and evaluate its first batch, where no gradients are asked for.
@torch.inference_mode(mode=False)
@torch.enable_grad()
def trace(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    example_inputs: tuple[Any, ...],
    example_kwargs: dict[str, Any],
    example_targets: tuple[Any, ...],
    *,
    device: torch.device,
    evaluation: bool = False,
    sizes: Sizes | None = None,
    undo: Callable[[nn.Module, Any], None] = lambda *_: None,
) -> tuple[Joint, Signature]:
    """The joint graph of one microbatch on `device`, and the structure of the call.

    Parameters and inputs may live on the meta device. Raises `TraceError` where the model needs values of tensors
    to decide what to run, or has no loss to differentiate: the message names the user's line. `sizes` says which sizes
    of the microbatch are symbols; those that the model computes from them are arguments of the graph's nodes. `undo`
    takes out of a copy of model and loss what plain forwards have made since an earlier trace.
    """
    signature = Signature.of(example_inputs, example_kwargs, example_targets)
    for spec, example in zip(
        signature.tensors, signature.flatten((*example_inputs, *example_targets), example_kwargs), strict=True
    ):
        refuse_subclass(spec.name, example)
    fake_mode = _torch.FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes.env if sizes else None)
    with fake_mode:
        inputs = [
            torch.empty_strided(
                *(sizes.layout(index) if sizes else (spec.shape, spec.stride)), dtype=spec.dtype, device=device
            )
            for index, spec in enumerate(signature.tensors)
        ]

    def objective_of(*, traced: bool = True) -> Objective:
        copies = fake_copies(model, loss_fn, fake_mode, device)
        undo(*copies)
        objective = Objective(*copies, signature, traced=traced)
        return objective.eval() if evaluation else objective

    def fails_alone() -> bool:
        """Whether plain PyTorch fails on these arguments too, on tensors without data."""
        try:
            with fake_mode, torch.enable_grad():
                objective_of(traced=False).losses(tuple(inputs))
        except Exception:
            return True
        return False

    def captured(objective: Objective) -> fx.GraphModule:
        try:
            with fake_mode, _torch.without_fake_logs():
                return _torch.capture_joint(objective, inputs)
        except ZbfxError as error:
            refuse_flex_attention(error)
            raise
        except Exception as error:
            if objective.first.made() and not objective.starts_afresh:
                raise KeptTensors from error
            with _torch.without_fake_logs():
                refuse(error, objective.model, objective.part, fails_alone)
            raise

    objective = objective_of()
    try:
        module = captured(objective)
    except KeptTensors:
        objective, module = afresh(objective_of, captured)
    refuse_mixed_dtypes(module.graph)
    if any(map(is_sharded, model.parameters())):
        module = localize(module)
    canonical = canonical_names(model, loss_fn)
    joint = as_joint(module, signature, canonical)
    joint = replace(joint, replaced=frozenset(canonical[name] for name in objective.replaced))
    return (inline_sizes(joint) if sizes else joint), signature


def afresh(
    objective_of: Callable[[], Objective], captured: Callable[[Objective], fx.GraphModule]
) -> tuple[Objective, fx.GraphModule]:
    """Trace a model that finds tensors of its last forward, as if each were its first (`zbfx.first_forward`)."""
    objective = objective_of()
    objective.starts_afresh = True
    module = captured(objective)
    changing = take_made(module, objective.results, objective.made)
    if not changing:
        return objective, module
    places = {name: line for name, (_, line) in objective.first.made().items()}
    objective = objective_of()
    objective.starts_afresh, objective.first.leave = True, tuple(changing)
    try:
        module = captured(objective)
    except TraceError as error:
        found = listed(f"{name} (set at {line})" if (line := places.get(name)) else name for name in changing)
        raise TraceError(
            f"the model makes {found} in its first forward and finds it in the next, made from the microbatch, from "
            f"parameters, from buffers that it writes, or at random: one graph holds no first forward. Make it in "
            f"__init__ (register_buffer), or run the model once before compile: a tensor that it has then is one of "
            f"the pipeline's buffers"
        ) from error
    take_made(module, objective.results, objective.made)
    return objective, module


def named_tensors(model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    """Every parameter and buffer under each of its names; those of a loss module begin with `loss_fn.`."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **{name: tensor for _, _, name, tensor in plain_tensors(model)},
    }
    if isinstance(loss_fn, nn.Module):
        named |= {LOSS_PREFIX + name: tensor for name, tensor in named_tensors(loss_fn, None).items()}
    return named


def plain_tensors(model: nn.Module) -> list[tuple[nn.Module, str, str, Tensor]]:
    """Tensors that modules hold as plain attributes: module, attribute, qualified name and tensor."""
    return [
        (module, attribute, f"{prefix}.{attribute}" if prefix else attribute, value)
        for prefix, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    ]


def canonical_names(model: nn.Module, loss_fn: Any) -> dict[str, str]:
    """For each name of a parameter or buffer, the first name of the same tensor: what `named_parameters()` says."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(model, loss_fn).items()}


def fake_like(tensor: Tensor, fake_mode: Any, device: torch.device) -> Tensor:
    """A fake tensor of the same size, strides and dtype on `device`; a parameter gives a parameter."""
    with fake_mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def refuse_subclass(name: str, tensor: Any) -> None:
    """A tensor made of other tensors, like DTensor, is not one value that a stage can hold or send."""
    if hasattr(tensor, "__tensor_flatten__"):
        raise TraceError(
            f"{name} is a {type(tensor).__name__}, a tensor made of other tensors; expected a plain torch.Tensor. "
            f"Give the pipeline plain tensors (for a DTensor, `.to_local()` or `.full_tensor()`), and shard around it"
        )


def fake_copies(model: nn.Module, loss_fn: Any, fake_mode: Any, device: torch.device) -> tuple[nn.Module, Any]:
    """Copies of model and loss whose parameters and buffers are fake: tensors that were one stay one.

    In the copies, tensors that are plain attributes are buffers, so that the pipeline reads and writes the live ones.
    """
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(model, loss_fn).items():
        if id(tensor) in memo:
            continue
        if is_sharded(tensor):
            memo[id(tensor)] = fake_sharded(tensor, fake_mode, device)  # type: ignore[arg-type]
            memo[id(tensor.device_mesh)] = tensor.device_mesh  # type: ignore[attr-defined]
            continue
        refuse_subclass(name, tensor)
        memo[id(tensor)] = fake_like(tensor, fake_mode, device)
    try:
        fake_model = copy.deepcopy(model, memo)
        fake_loss_fn = copy.deepcopy(loss_fn, memo) if isinstance(loss_fn, nn.Module) else loss_fn
        for copied in (fake_model, fake_loss_fn):
            for module, attribute, _, tensor in plain_tensors(copied) if isinstance(copied, nn.Module) else ():
                delattr(module, attribute)
                module.register_buffer(attribute, tensor, persistent=False)
        return fake_model, fake_loss_fn
    except Exception as error:
        raise TraceError(
            f"tracing works on a copy, so that the model stays untouched, and copy.deepcopy of it failed: "
            f"{type(error).__name__}: {error}. Keep what cannot be copied out of the module's attributes"
        ) from error


def as_joint(module: fx.GraphModule, signature: Signature, canonical: Mapping[str, str]) -> Joint:
    """Read the roles off the tracer's descriptors; lift tensor constants to inputs; give tied tensors one name."""
    graph = copy_graph(module.graph)
    inputs = [input_port(node.meta["desc"], signature, canonical) for node in graph.find_nodes(op="placeholder")]
    constants: dict[str, Tensor] = {}
    first_call = next(node for node in graph.nodes if node.op != "placeholder")
    placeholders: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in placeholders:
            with graph.inserting_before(first_call):
                placeholders[name] = graph.placeholder(name)
            placeholders[name].meta = dict(node.meta)
            constants[name] = getattr(module, name)
            inputs.append(Port(Role.CONSTANT, name))
        node.replace_all_uses_with(placeholders[name])
        graph.erase_node(node)
    output = graph.output_node()
    kept = [
        (value, output_port(value, description, signature, canonical))
        for value, description in zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
        if value is not None
    ]
    if not any(port.role is Role.GRADIENT for _, port in kept):
        raise TraceError(
            "the loss is a parameter itself, or a view of one, which the tracer takes for no result: "
            "found no gradient of any parameter. Return a copy (`loss.clone()`)"
        )
    output.args = (tuple(value for value, _ in kept),)
    return Joint(graph, tuple(inputs), tuple(port for _, port in kept), constants)


def input_port(description: Any, signature: Signature, canonical: Mapping[str, str]) -> Port:
    match description:
        case _torch.ParamAOTInput(target=target):
            return Port(Role.PARAMETER, canonical[target.removeprefix(MODEL_PREFIX)])
        case _torch.BufferAOTInput(target=target):
            return Port(Role.BUFFER, canonical[target.removeprefix(MODEL_PREFIX)])
        case _torch.PlainAOTInput(idx=index):
            return Port(Role.INPUT, signature.tensors[index].name)
        case _torch.TangentAOTInput():
            return Port(Role.LOSS_GRADIENT, "loss")
    raise TraceError(f"the model has an input that zbfx does not know: {description}")


def output_port(value: fx.Node, description: Any, signature: Signature, canonical: Mapping[str, str]) -> Port:
    match description:
        case _torch.PlainAOTOutput(idx=index):
            return Port(Role.LOSS, "loss") if index == 0 else Port(Role.COUNT, "count")
        case _torch.GradAOTOutput(grad_of=_torch.ParamAOTInput(target=target)):
            return Port(Role.GRADIENT, canonical[target.removeprefix(MODEL_PREFIX)])
        case _torch.InputMutationAOTOutput(mutated_input=_torch.BufferAOTInput(target=target)):
            return Port(Role.BUFFER_UPDATE, canonical[target.removeprefix(MODEL_PREFIX)])
        case _torch.InputMutationAOTOutput(mutated_input=mutated):
            raise TraceError(
                f"the model writes in place into the {input_port(mutated, signature, canonical)}, at "
                f"{value.meta.get('stack_trace') or UNKNOWN_LINE}; write into a copy (`x = x.clone()`) or a buffer"
            )
    raise TraceError(f"the model has an output that zbfx does not know: {description}")
