"""Buffers that a backward writes, as custom Functions and hooks do.

The tracer leaves such a write in the graph as a node. Here its value becomes an output, like that of a buffer that the
forward writes. B writes it then, microbatch after microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from zbfx._torch.operators import aten
from zbfx._torch.tracing import descriptors
from zbfx.errors import TraceError
from zbfx.graphs import Joint, Role
from zbfx.passes.nodes import is_view
from zbfx.trace.refusals import UNKNOWN_LINE


def with_written_values(module: fx.GraphModule) -> fx.GraphModule:
    """Make outputs of the values that the backward writes into inputs, and return the module.

    Writes into the gradient of the loss are left out: nobody reads it after the backward.
    """
    graph, output = module.graph, module.graph.output_node()
    values, descriptions = list(output.args[0]), list(output.meta["desc"])  # type: ignore[arg-type]
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = node.args
        assert not node.users, "the tracer writes last"
        graph.erase_node(node)
        if isinstance(target.meta["desc"], descriptors.TangentAOTInput):
            continue
        if not value.meta["is_backward"]:
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (value,))
            copy.meta = {**value.meta, "is_backward": True}
            value = copy
        values.append(value)
        descriptions.append(descriptors.InputMutationAOTOutput(target.meta["desc"]))
    output.args, output.meta["desc"] = (tuple(values),), descriptions
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def claim_reads(joint: Joint) -> None:
    """Give the backward the views that it alone reads of buffers that it writes.

    Raises `TraceError` if the forward reads such a buffer.
    """
    ends = zip(joint.output_values, joint.outputs, strict=True)
    written = {port.name: v for v, port in ends if port.role is Role.BUFFER_UPDATE and v.meta.get("is_backward")}
    for placeholder, port in joint.input_ports().items():
        if port.role is not Role.BUFFER or port.name not in written:
            continue
        for node in forward_readers(placeholder):
            if not is_view(node):
                raise TraceError(
                    f"the backward writes into {port.name}, at {place_of(written[port.name])}, which the forward reads "
                    f"or writes, at {place_of(node)}: a pipeline runs forwards of the next microbatches before that "
                    f"backward, and they would find another value than in plain PyTorch. Let the forward use a buffer "
                    f"of its own, and copy the backward's into it between steps"
                )
            node.meta["is_backward"] = True


def forward_readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the forward that read a value, themselves or through views."""
    for user in node.users:
        if not (user.op == "output" or user.meta["is_backward"]):
            if is_view(user):
                yield from forward_readers(user)
            yield user


def place_of(node: fx.Node) -> str:
    return str(node.meta.get("stack_trace") or UNKNOWN_LINE).strip()
