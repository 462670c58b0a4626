"""The graph that the tracer gives -> `Joint`: roles of inputs and outputs, one name for each tensor, no tokens."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zbfx._torch import tracing
from zbfx._torch.operators import CHECKING_OPERATORS, with_effects
from zbfx._torch.tensors import gradient_dtype
from zbfx._torch.tracing import descriptors
from zbfx.errors import TraceError
from zbfx.graphs import Joint, Port, Role, copy_graph
from zbfx.trace.objective import Objective
from zbfx.trace.refusals import UNKNOWN_LINE
from zbfx.trace.signature import Signature
from zbfx.trace.tensor_names import MODEL_PREFIX


def without_tokens(module: fx.GraphModule) -> fx.GraphModule:
    """Take the tokens out of the graph of a module, and return that module. The tracer threads a token, which is an
    input and an output, through operators that do more than compute results. Those that only check values need no order
    among them, and become plain nodes of the stage that they belong to. Raises `TraceError` for any other."""
    graph, output = module.graph, module.graph.output_node()
    for node in graph.find_nodes(op="call_function", target=with_effects):
        token, target, *args = node.args
        if target not in CHECKING_OPERATORS:
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
    kept = [pair for pair in pairs if not isinstance(pair[1], tracing.TOKENS)]
    output.args, output.meta["desc"] = (tuple(value for value, _ in kept),), [found for _, found in kept]
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], tracing.TOKENS):
            graph.erase_node(node)
    module.recompile()
    return module


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
        dtype = gradient_dtype(named[name]) if follows else wanted
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
