"""Model, loss and an example microbatch -> `Joint`: one graph of forward, loss and backward.

The model stays untouched and nothing is allocated. A copy of the model is traced, with fake tensors in the place of its
parameters and buffers.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from zbfx import _torch
from zbfx._torch import descriptors
from zbfx.errors import TraceError, ZbfxError, listed
from zbfx.graphs import Joint, Port, Role, copy_graph
from zbfx.passes.sizes import inline_sizes
from zbfx.trace.aliases import refuse_written
from zbfx.trace.backward_writes import claim_reads, with_written_values
from zbfx.trace.compiled_parts import deep_copy, note_of_compiled, without_compiling
from zbfx.trace.counters import numbers_of, refuse_counters
from zbfx.trace.decompositions import RIGHT
from zbfx.trace.first_forward import take_made
from zbfx.trace.left_behind import without_look_outs
from zbfx.trace.objective import LOSS_PREFIX, MODEL_PREFIX, Objective
from zbfx.trace.refusals import UNKNOWN_LINE, refuse, refuse_flex_attention, refuse_mixed_dtypes, refuse_subclass
from zbfx.trace.signature import Signature
from zbfx.trace.stamped import Body, FirstLook, LayersAlike, NotAlike, Stand, body_of
from zbfx.trace.symbols import Sizes
from zbfx.trace.tensor_parallel import fake_sharded, is_sharded, localize
from zbfx.trace.wanted import TRAINING, Wanted

fx.has_side_effect(_torch.ASSERT)  # else fx takes it for dead code, as it does not the one with a message


class KeptTensors(Exception):
    """Tracing has failed, perhaps because a pass found tensors that the model had made in the pass before it."""


TRACER = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one thread trace at a time, as the tracer changes torch for the whole process while it runs."""
    with TRACER:
        yield


# Gradients are switched on: a step may meet a new shape, or evaluate its first batch, under `torch.no_grad()`.
@one_at_a_time()
@_torch.without_looks_at_masks()
@without_compiling()
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
    batch_dims: Any = None,
    grad_dtype: torch.dtype | None = None,
    wanted: Wanted = TRAINING,
    sizes: Sizes | None = None,
    undo: Callable[[nn.Module, Any], None] = lambda *_: None,
    share_layers: bool = False,
) -> tuple[Joint, Signature]:
    """The joint graph of one microbatch on `device`, as far as it is `wanted`, and the structure of the call.

    Parameters and inputs may live on the meta device. `batch_dims` are those of `Signature.of`, `grad_dtype` that of
    `sum_dtypes`. `sizes` says which sizes of the microbatch are symbols. Sizes that the model computes from them are
    arguments of the graph's nodes. `undo` takes out of a copy of model and loss what forwards outside of steps have
    made since an earlier trace. `share_layers`: trace layers that run the same once. Raises `TraceError`, with the
    user's line, where the model needs values of tensors to decide what to run, or has no loss to differentiate."""
    signature = Signature.of(example_inputs, example_kwargs, example_targets, batch_dims)
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
        objective = Objective(*copies, signature, wanted, traced=traced)
        return objective.eval() if wanted.in_eval else objective

    def fails_alone() -> bool:
        """Whether plain PyTorch fails on fake tensors like these arguments too."""
        try:
            with fake_mode, torch.enable_grad():
                objective_of(traced=False).made(tuple(inputs))
        except Exception:
            return True
        return False

    def capture(module: nn.Module, tensors: Sequence[Tensor]) -> fx.GraphModule:
        with fake_mode, _torch.without_fake_logs(), _torch.decomposing(RIGHT), _torch.checks_in_the_graph():
            return _torch.capture_joint(module, tensors)

    def plainly(objective: Objective) -> fx.GraphModule:
        with _torch.recomputing_within(objective.recomputing):
            module = capture(objective, inputs)
        objective.hooks.refuse()
        return without_tokens(with_written_values(module))

    def captured(objective: Objective) -> fx.GraphModule:
        try:
            return plainly(objective)
        except LayersAlike:
            raise
        except ZbfxError as error:
            refuse_flex_attention(error)
            raise
        except Exception as error:
            if objective.first.made() and not objective.starts_afresh:
                raise KeptTensors from error
            with _torch.without_fake_logs():
                refuse(error, objective.model, objective.part, fails_alone)
            raise

    def stamped(found: LayersAlike) -> tuple[Objective, fx.GraphModule]:
        """The graph in which layers that run the same are traced once."""
        objective, bodies = objective_of(), dict[str, Body]()
        for first, *others in found.groups:
            body = body_of(first, objective.model, objective.lines, fake_mode, capture)
            bodies |= dict.fromkeys([first.name, *(call.name for call in others)], body)
        stand = Stand(objective.model, bodies, found.recorder)
        objective.one_pass = stand.one_pass
        module = plainly(objective)
        if (objective.ports, objective.kinds, objective.returned) != (looked.ports, looked.kinds, looked.returned):
            raise NotAlike("other results of the model")
        stand.stamp(module)
        return objective, module

    objective = looked = objective_of()
    before, look, notes = numbers_of(objective), None, note_of_compiled(model, loss_fn)
    if share_layers and sizes is None and not any(map(is_sharded, model.parameters())):
        look = FirstLook(looked.model, (looked.model, looked.loss_fn), lambda: looked.is_steady)
        looked.one_pass = look.one_pass
    try:
        try:
            module = captured(objective)
        except LayersAlike as found:
            try:
                objective, module = stamped(found)
            except Exception as why:  # what is wrong with the model, tracing the whole of it says
                notes += (found.note(why),)
                objective = objective_of()
                module = captured(objective)
        refuse_counters(before, numbers_of(objective), module, objective_of, captured)
    except KeptTensors:
        objective, module = afresh(objective_of, captured)
    if not wanted.has_loss:
        for node in module.graph.nodes:
            node.meta["is_backward"] = False
    refuse_mixed_dtypes(module.graph)
    if any(map(is_sharded, model.parameters())):
        module = localize(module)
    canonical = canonical_names(model, loss_fn)
    joint = as_joint(module, signature, canonical, objective)
    replaced = frozenset(canonical[name] for name in objective.replaced)
    named = named_tensors(model, loss_fn)
    summed = sum_dtypes(named, joint, grad_dtype)
    joint = replace(
        joint,
        replaced=replaced,
        grad_dtypes=summed,
        notes=(*notes, *(look.notes if look is not None else ())),
        metrics=objective.kinds,
        returned=objective.returned,
    )
    claim_reads(joint)
    refuse_written(named, joint)
    return (inline_sizes(joint) if sizes else joint), signature


def without_tokens(module: fx.GraphModule) -> fx.GraphModule:
    """Take the tokens out of the graph of a module, and return that module. The tracer threads a token, which is an
    input and an output, through operators that do more than compute results. Those that only check values need no order
    among them, and become plain nodes of the stage that they belong to. Raises `TraceError` for any other."""
    graph, output = module.graph, module.graph.output_node()
    for node in graph.find_nodes(op="call_function", target=_torch.with_effects):
        token, target, *args = node.args
        if target not in _torch.CHECKING_OPERATORS:
            raise TraceError(
                f"the model runs {target}, which acts beside its results (prints, calls an object), at "
                f"{node.meta.get('stack_trace') or UNKNOWN_LINE}: a pipeline runs microbatches and stages in an order "
                f"of its own. Take it out of the model"
            )
        with graph.inserting_before(node):
            check = graph.call_function(target, tuple(args), node.kwargs)
        check.meta = {**node.meta, "val": None}
        for entry in list(node.users):
            assert (entry.target, entry.args[1]) == (operator.getitem, 0), "a check has no result"
            entry.replace_all_uses_with(token)
            graph.erase_node(entry)
        graph.erase_node(node)
    pairs = list(zip(output.args[0], output.meta["desc"], strict=True))  # type: ignore[arg-type]
    kept = [pair for pair in pairs if not isinstance(pair[1], _torch.TOKENS)]
    output.args, output.meta["desc"] = (tuple(value for value, _ in kept),), [found for _, found in kept]
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], _torch.TOKENS):
            graph.erase_node(node)
    module.recompile()
    return module


def afresh(
    objective_of: Callable[[], Objective], captured: Callable[[Objective], fx.GraphModule]
) -> tuple[Objective, fx.GraphModule]:
    """Trace a model that finds tensors of the forward before, with every pass as a first one (`first_forward.py`)."""
    objective = objective_of()
    objective.starts_afresh = True
    module = captured(objective)
    changing = take_made(module, len(objective.ports), objective.made_first)
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
    take_made(module, len(objective.ports), objective.made_first)
    return objective, module


def named_tensors(model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    """Every parameter and buffer under each of its names. The names of a loss module's begin with `loss_fn.`."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **{name: tensor for _, _, name, tensor in plain_tensors(model)},
    }
    if isinstance(loss_fn, nn.Module):
        named |= {LOSS_PREFIX + name: tensor for name, tensor in named_tensors(loss_fn, None).items()}
    return named


def plain_tensors(model: nn.Module) -> list[tuple[nn.Module, str, str, Tensor]]:
    """The tensors that modules hold as plain attributes, each with its module, attribute and qualified name."""
    return [
        (module, attribute, f"{prefix}.{attribute}" if prefix else attribute, value)
        for prefix, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    ]


def canonical_names(model: nn.Module, loss_fn: Any) -> dict[str, str]:
    """For each name of a parameter or buffer, the first name of its tensor, which is what `named_parameters()` says."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(model, loss_fn).items()}


def fake_copies(model: nn.Module, loss_fn: Any, fake_mode: Any, device: torch.device) -> tuple[nn.Module, Any]:
    """Copies of model and loss whose parameters and buffers are fake. A tensor with two names has two names there too.
    In the copies, tensors that are plain attributes are buffers. So the pipeline reads and writes the live ones."""
    memo = without_look_outs(model, loss_fn)
    for name, tensor in named_tensors(model, loss_fn).items():
        if id(tensor) in memo:
            continue
        if is_sharded(tensor):
            memo[id(tensor)] = fake_sharded(tensor, fake_mode, device)  # type: ignore[arg-type]
            memo[id(tensor.device_mesh)] = tensor.device_mesh  # type: ignore[attr-defined]
            continue
        refuse_subclass(name, tensor)
        with fake_mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    fakes = dict(memo)
    try:
        fake_model = deep_copy(model, memo)
        fake_loss_fn = deep_copy(loss_fn, memo) if isinstance(loss_fn, nn.Module) else loss_fn
        for copied in (fake_model, fake_loss_fn):
            for module, attribute, _, tensor in plain_tensors(copied) if isinstance(copied, nn.Module) else ():
                delattr(module, attribute)
                module.register_buffer(attribute, tensor, persistent=False)
        return fake_model, fake_loss_fn
    except Exception as error:
        where = f" for {listed(found)}" if (found := attributes_without_copy(model, fakes)) else ""
        raise TraceError(
            f"tracing works on a copy, so that the model stays untouched, and copy.deepcopy of it failed{where}: "
            f"{type(error).__name__}: {error}. Keep what cannot be copied out of the module's attributes, such as "
            "results of an earlier forward"
        ) from error


def attributes_without_copy(model: nn.Module, memo: Mapping[int, Any]) -> list[str]:
    """The qualified names of the attributes that `copy.deepcopy` fails for."""
    found = []
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if value is not _torch.own_modules(module):
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    found.append(f"{prefix}.{attribute}" if prefix else attribute)
    return found


def as_joint(module: fx.GraphModule, signature: Signature, canonical: Mapping[str, str], objective: Objective) -> Joint:
    """A traced graph as a joint graph, with roles from the tracer's descriptors and one name for tied tensors. Constant
    tensors become inputs. None of them may be a leaf of the objective, to which gradients flow."""
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
    refuse_learning(
        {name: t for name, t in constants.items() if any(t is leaf for leaf in objective.leaves)}, placeholders
    )
    output = graph.output_node()
    kept = [
        (value, output_port(value, description, signature, canonical, objective.ports))
        for value, description in zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
        if value is not None
    ]
    if objective.wanted.has_loss and not any(port.role is Role.GRADIENT for _, port in kept):
        raise TraceError(
            "the loss is a parameter itself, or a view of one, which the tracer takes for no result: "
            "found no gradient of any parameter. Return a copy (`loss.clone()`)"
        )
    output.args = (tuple(value for value, _ in kept),)
    return Joint(graph, tuple(inputs), tuple(port for _, port in kept), constants)


def sum_dtypes(named: Mapping[str, Tensor], joint: Joint, wanted: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtypes of the sums of gradients, by parameter, where they are not the parameters' own: `wanted` for narrower
    parameters, what `grad_dtype` of the parameter says for others. Raises `TraceError` if that names no dtype."""
    found = {}
    for name in dict.fromkeys(port.name for port in joint.outputs if port.role is Role.GRADIENT):
        own = named[name].dtype
        follows = wanted is None or wanted is own or torch.promote_types(own, wanted) is not wanted
        dtype = _torch.gradient_dtype(named[name]) if follows else wanted
        if dtype is None or (dtype is not own and not (dtype.is_floating_point and own.is_floating_point)):
            raise TraceError(
                f"the gradient of a parameter is summed in one floating-point dtype; found {name}.grad_dtype = {dtype} "
                f"of a parameter of {own}. Set it to {own}, or to a wider dtype such as torch.float32"
            )
        if dtype is not own:
            found[name] = dtype
    return found


def refuse_learning(constants: Mapping[str, Tensor], placeholders: Mapping[str, fx.Node]) -> None:
    """Raise for the constants of a graph that require a gradient. Plain PyTorch would train them, and a pipeline would
    not."""
    for name, tensor in constants.items():
        lines = [user.meta["stack_trace"] for user in placeholders[name].users if user.meta.get("stack_trace")]
        raise TraceError(
            f"a tensor of shape {tuple(tensor.shape)} that requires a gradient is read at "
            f"{lines[0] if lines else 'an unknown line'}, and would get none: it is no parameter that the model or its "
            f"loss holds under a name. Make it an attribute (nn.Parameter, nn.ParameterList), pass a loss that is an "
            f"nn.Module and holds it, or read its .detach()"
        )


def input_port(description: Any, signature: Signature, canonical: Mapping[str, str]) -> Port:
    """The role and name of an input, from the tracer's description of it."""
    match description:
        case descriptors.ParamAOTInput(target=target):
            return Port(Role.PARAMETER, canonical[target.removeprefix(MODEL_PREFIX)])
        case descriptors.BufferAOTInput(target=target):
            return Port(Role.BUFFER, canonical[target.removeprefix(MODEL_PREFIX)])
        case descriptors.PlainAOTInput(idx=index):
            return Port(Role.INPUT, signature.tensors[index].name)
        case descriptors.TangentAOTInput():
            return Port(Role.LOSS_GRADIENT, "loss")
    raise TraceError(f"the model has an input that zbfx does not know: {description}. Please report the model")


def output_port(
    value: fx.Node, description: Any, signature: Signature, canonical: Mapping[str, str], plain: Sequence[Port]
) -> Port:
    """The role and name of an output, from the tracer's description of it; `plain`: of what the forward returns."""
    match description:
        case descriptors.PlainAOTOutput(idx=index):
            return plain[index]
        case descriptors.GradAOTOutput(grad_of=descriptors.ParamAOTInput(target=target)):
            return Port(Role.GRADIENT, canonical[target.removeprefix(MODEL_PREFIX)])
        case descriptors.InputMutationAOTOutput(mutated_input=descriptors.BufferAOTInput(target=target)):
            return Port(Role.BUFFER_UPDATE, canonical[target.removeprefix(MODEL_PREFIX)])
        case descriptors.InputMutationAOTOutput(mutated_input=mutated):
            raise TraceError(
                f"the model writes in place into the {input_port(mutated, signature, canonical)}, at "
                f"{value.meta.get('stack_trace') or UNKNOWN_LINE}; write into a copy (`x = x.clone()`) or a buffer"
            )
    raise TraceError(f"the model has an output that zbfx does not know: {description}. Please report the model")
