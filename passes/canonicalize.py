"""Joint -> Joint in the canonical form that the other passes expect.

Takes   a joint graph as the tracer wrote it.
Gives   a joint graph with the loss, gradients and buffer updates of the first, of which holds:
        1. No node is an identity, like `detach`, `alias`, or a slice that leaves nothing out.
        2. A buffer that the model writes is read once, through a clone that no later microbatch changes, then written.
        3. A parameter's gradient is listed as its separate contributions, each of one stage, not as their sum.
        4. A fused backward node that computes two expensive gradients, of its input and of parameters, becomes two.
        5. A node of its own computes each output, and no more memory stays with an output than its value takes.
        6. Every node serves an output.
        7. A node that writes into a part of a tensor copies that tensor alone, not the memory that the tensor is a view
           of. A sum of patches (`fold`) does not keep the memory of the patches.
        8. Every node has a fake value; a check of values, which has no result, has None.
        9. The graph holds for any strides: some operators (like batch norm) give others than their fake versions say.
       10. Statistics of norms have the dtype that CPU kernels give them.
Raises  `TraceError` for a collective without sharded parameters, which no other rank would join, and for an embedding
        with a sparse gradient.
Source  ours. Contributions are told by a mark that autograd leaves on its additions (`GRADIENT_ADDITION_MARK`).
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zbfx._torch.operators import ATTENTION, ATTENTION_BACKWARD, CPU_ATTENTION, NORMS, aten, is_collective
from zbfx._torch.tracing import GRADIENT_ADDITION_MARK
from zbfx.errors import TraceError
from zbfx.graphs import Joint, Port, Role, copy_graph
from zbfx.passes.nodes import drop_dead_nodes, expression, is_view, is_widening, storage_owner, value_bytes

# Fused backward ops worth splitting, with the position of the mask argument that says which gradients to compute.
# Norms are not among them: their weight gradient is a cheap sum, and W could make it only from two held activations.
MASKED_BACKWARD = {aten.convolution_backward.default: 10}

# Ops that read the arguments at these positions as dense memory and ignore their strides. Other strides give wrong
# numbers.
READ_AS_DENSE = {
    aten.native_group_norm.default: (0,),
    aten.native_group_norm_backward.default: (0, 1),
    aten.as_strided.default: (0,),
    aten.as_strided_scatter.default: (0,),
    aten.view_as_complex.default: (0,),
    aten.view.dtype: (0,),
    **dict.fromkeys(ATTENTION, (0, 1, 2)),
    **dict.fromkeys(ATTENTION_BACKWARD, (0, 1, 2, 3)),
}

# Ops whose results are contiguous, whatever the strides of what they read.
ROW_MAJOR = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}

SLICES = (aten.slice.Tensor, aten.slice_backward.default)

# Ops whose result keeps memory as large as their first argument: a loss keeps the memory of all the terms of its sum.
LOSSES = (aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.soft_margin_loss)
OVERSIZED = {aten.col2im.default, *(loss.default for loss in LOSSES)}

# Ops that write into a copy of their first argument. They copy all the memory that this argument is a view of.
WRITES_INTO_COPY = {
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.copy.default,
}


def canonicalize(joint: Joint) -> Joint:
    """A copy of the joint graph in canonical form."""
    graph = copy_graph(joint.graph)
    for node in graph.nodes:
        refuse_collective(node)
        refuse_sparse_gradient(node)
        node.meta.setdefault("val", None)
    joint = replace(joint, graph=graph)
    remove_identities(graph)
    trim_copies(joint)
    write_what_is_copied(joint)
    clone_passed_inputs(joint)
    clone_written_buffers(joint)
    write_after_reading(joint)
    joint = separate_contributions(joint)
    split_masked_backwards(graph)
    allow_any_strides(graph)
    correct_statistics(graph)
    drop_dead_nodes(graph)
    graph.lint()
    return joint


def refuse_collective(node: fx.Node) -> None:
    if is_collective(node.target):
        raise TraceError(
            f"the model runs a collective, {node.target} (node {node.name}), at "
            f"{node.meta.get('stack_trace') or 'an unknown line'}: a stage runs on one rank, and the other ranks would "
            f"never join. Use plain tensors in the model, and other parallelism around the pipeline"
        )


def refuse_sparse_gradient(node: fx.Node) -> None:
    if node.target is aten.embedding.default and (node.args[4:] or (node.kwargs.get("sparse"),))[0]:
        raise TraceError(
            f"an embedding has sparse=True (node {node.name}), at {node.meta.get('stack_trace') or 'an unknown line'}: "
            f"its gradient would be dense here, since stages add to .grad in place. Set sparse=False"
        )


def remove_identities(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        whole = node.target in SLICES and same_sizes(node.meta["val"], node.args[0].meta["val"])
        if whole or node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def same_sizes(one: Tensor, other: Tensor) -> bool:
    """Whether both have one shape and the same strides, whatever numbers their symbols stand for."""
    return same_shape(one, other) and [*map(expression, one.stride())] == [*map(expression, other.stride())]


def same_shape(one: Tensor, other: Tensor) -> bool:
    """Whether both have one shape, whatever numbers their symbols stand for."""
    return [*map(expression, one.shape)] == [*map(expression, other.shape)]


def trim_copies(joint: Joint) -> None:
    """Copy no more than is needed: a view without the memory behind it, a sum of patches without the patches."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.col2im.default):
        with graph.inserting_after(node):
            clone = cloned(node, graph)
        node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
    inputs = {node for node, port in joint.input_ports().items() if port.role is Role.INPUT}  # parts of the batch
    for node in [n for target in WRITES_INTO_COPY for n in graph.find_nodes(op="call_function", target=target)]:
        whole, source = node.args[:2]
        owner = storage_owner(whole)
        if owner not in inputs and value_bytes(owner, expression) == value_bytes(whole, expression):
            continue
        if node.target is aten.copy.default and is_like(source, node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        with graph.inserting_before(node):
            clone = cloned(whole, graph)
        node.update_arg(0, clone)
        node.meta["val"] = clone.meta["val"].clone()


def cloned(node: fx.Node, graph: fx.Graph) -> fx.Node:
    """A clone of a value, put where the graph inserts nodes at the moment."""
    clone = graph.call_function(aten.clone.default, (node,))
    clone.meta = {**node.meta, "val": node.meta["val"].detach().clone()}
    return clone


def is_like(source: object, node: fx.Node) -> bool:
    """Whether `source` is a node whose value has the shape and the dtype of the value of `node`."""
    if not isinstance(source, fx.Node):
        return False
    one, other = source.meta["val"], node.meta["val"]
    return one.dtype == other.dtype and same_shape(one, other)


def write_what_is_copied(joint: Joint) -> None:
    """Where a buffer's new value is a copy of another value, make that other value the output."""
    output = joint.graph.output_node()
    values = list(joint.output_values)
    for index, (value, port) in enumerate(zip(values, joint.outputs, strict=True)):
        if port.role is Role.BUFFER_UPDATE and value.target is aten.copy.default:
            source = value.args[1]
            if not isinstance(source, fx.Node) or source.meta["val"].dtype != value.meta["val"].dtype:
                continue
            if source.meta.get("is_backward") == value.meta.get("is_backward"):  # the backward writes in B
                values[index] = source
    output.args = (tuple(values),)


def clone_passed_inputs(joint: Joint) -> None:
    """Let a node of its own compute each output. What users get holds no more memory than its own."""
    graph, output = joint.graph, joint.graph.output_node()
    values = [computed(value, graph) for value in joint.output_values]
    pairs = zip(values, joint.outputs, strict=True)
    output.args = (tuple(alone(v, graph) if port.role in (Role.METRIC, Role.OUTPUT) else v for v, port in pairs),)


def alone(value: fx.Node, graph: fx.Graph) -> fx.Node:
    """A value that is all of its storage, or a copy of it, where it is computed."""
    owner = storage_owner(value)
    if owner.op != "placeholder" and value_bytes(owner, expression) == value_bytes(value, expression):
        return value
    with graph.inserting_after(value):
        return cloned(value, graph)


def computed(value: fx.Node, graph: fx.Graph) -> fx.Node:
    """An output's value; a clone of it where no node computes it, or where it keeps more memory than its own."""
    if value.op != "placeholder" and value.target not in OVERSIZED:
        return value
    with graph.inserting_before(graph.output_node()):
        clone = graph.call_function(aten.clone.default, (value,))
    clone.meta = dict(value.meta)
    return clone


def clone_written_buffers(joint: Joint) -> None:
    """Let all who read a buffer that the model writes read one clone, made before the first of them."""
    written = {port.name for port in joint.outputs if port.role is Role.BUFFER_UPDATE}
    for placeholder, port in joint.input_ports().items():
        if port.role is Role.BUFFER and port.name in written and placeholder.users:
            first_use, is_backward = min(placeholder.users), all(n.meta.get("is_backward") for n in placeholder.users)
            with joint.graph.inserting_before(first_use):
                clone = joint.graph.call_function(aten.clone.default, (placeholder,))
            line = first_use.meta.get("stack_trace")
            clone.meta = {**placeholder.meta, "stack_trace": line, "is_backward": is_backward}
            for user in list(placeholder.users):
                if user is not clone:
                    user.replace_input_with(placeholder, clone)


def write_after_reading(joint: Joint) -> None:
    """Where a buffer's new value is known before the old one is read, give it a clone after that read. The stage that
    reads the buffer then also writes it, microbatch by microbatch, wherever the model is cut."""
    reads = {port.name: clone for node, port in joint.input_ports().items() for clone in node.users}
    output, values = joint.graph.output_node(), list(joint.output_values)
    for index, (value, port) in enumerate(zip(joint.output_values, joint.outputs, strict=True)):
        read = reads.get(port.name) if port.role is Role.BUFFER_UPDATE else None
        if read is not None and value < read:
            with joint.graph.inserting_after(read):
                values[index] = joint.graph.call_function(aten.clone.default, (value,))
            values[index].meta = {**read.meta, "val": value.meta["val"]}
    output.args = (tuple(values),)


def separate_contributions(joint: Joint) -> Joint:
    """List each term of a parameter's gradient as an output of its own."""
    values: list[fx.Node] = []
    ports: list[Port] = []
    for value, port in zip(joint.output_values, joint.outputs, strict=True):
        terms = contributions(value, joint.graph) if port.role is Role.GRADIENT else [value]
        values += [computed(term, joint.graph) for term in terms]  # the gradient of the loss itself may be a term
        ports += [port] * len(terms)
    joint.graph.output_node().args = (tuple(values),)
    return replace(joint, outputs=tuple(ports))


def is_gradient_addition(node: fx.Node) -> bool:
    """Whether autograd made this addition, of gradients of a value that has several uses."""
    return node.target is aten.add.Tensor and GRADIENT_ADDITION_MARK in (node.meta.get("stack_trace") or "")


def contributions(value: fx.Node, graph: fx.Graph) -> list[fx.Node]:
    """The terms whose sum is `value`. A view of a sum is the sum of the views of its terms, bit for bit; a cast of a
    sum to a wider dtype becomes the sum of the casts, which rounds less."""
    if len(value.users) == 1 and is_gradient_addition(value):
        left, right = value.args
        return contributions(left, graph) + contributions(right, graph)  # type: ignore[arg-type]
    if len(value.users) == 1 and (is_view(value) or is_widening(value)):
        terms = contributions(value.args[0], graph)  # type: ignore[arg-type]
        if len(terms) > 1:
            views = []
            for term in terms:
                with graph.inserting_before(value):
                    views.append(graph.node_copy(value))
                views[-1].replace_input_with(value.all_input_nodes[0], term)
            return views
    return [value]


def split_masked_backwards(graph: fx.Graph) -> None:
    """Compute the gradient of the input in one node and those of parameters in another, by their output masks."""
    for node in list(graph.nodes):
        mask_position = MASKED_BACKWARD.get(node.target)
        if mask_position is None:
            continue
        mask = node.args[mask_position]
        if not mask[0] or not any(mask[1:]):
            continue
        for half, kept in (([True, False, False], (0,)), ([False, *mask[1:]], (1, 2))):
            with graph.inserting_before(node):
                part = graph.node_copy(node)
            part.update_arg(mask_position, half)
            part.meta["val"] = tuple(v if i in kept else None for i, v in enumerate(node.meta["val"]))
            for user in list(node.users):
                if user.target is operator.getitem and user.args[1] in kept:
                    user.update_arg(0, part)
        graph.erase_node(node)


def allow_any_strides(graph: fx.Graph) -> None:
    """Make each view a reshape, which copies where no view is possible; give dense arguments to ops that need them."""
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    dense: dict[fx.Node, fx.Node] = {}
    for target, positions in READ_AS_DENSE.items():
        for node in graph.find_nodes(op="call_function", target=target):
            for position in positions:
                make_dense(node, position, dense)


def correct_statistics(graph: fx.Graph) -> None:
    """Let statistics have the dtypes that CPU kernels give them: those of norms over half precision that of float32
    parameters (fake versions of torch 2.11 to 2.13 say that of the input), those of attention over float64 its own
    (fake versions of torch 2.11 say float32)."""
    for node in graph.find_nodes(op="call_function", target=CPU_ATTENTION):
        attended, statistic, *others = node.meta["val"]
        give_value(node, (attended, statistic.to(torch.promote_types(attended.dtype, torch.float32)), *others))
    for target in NORMS:
        for node in graph.find_nodes(op="call_function", target=target):
            dtypes = [source.meta["val"].dtype for source in node.all_input_nodes]
            if node.meta["val"][0].device.type != "cpu" or torch.float32 not in dtypes:
                continue
            normalised, *statistics = node.meta["val"]
            give_value(node, (normalised, *(value.to(torch.float32) for value in statistics)))


def give_value(node: fx.Node, value: tuple[Tensor, ...]) -> None:
    """Another fake value, whose parts are those of the node's entries."""
    node.meta["val"] = value
    for user in node.users:
        if user.target is operator.getitem:
            index: Any = user.args[1]
            user.meta["val"] = value[index]


def make_dense(node: fx.Node, position: int, known: dict[fx.Node, fx.Node]) -> None:
    """Give `node` its argument with the strides of the fake value. Where that value has gaps, as a part of a larger one
    has, what it is a view of gets the strides of its own fake value. A backward reads the dense value that its forward
    read: `known` has that of each source. Made again for the backward, it would count as a value of the forward that is
    made after all others, and would travel to the last stage and back."""
    source = node.args[position]
    assert isinstance(source, fx.Node)
    if source in known and known[source] < node:
        node.update_arg(position, known[source])
        return
    if dense := with_strides(source, node, is_backward=node.meta["is_backward"]):
        known[source] = dense
        node.update_arg(position, dense)
        return
    owner = storage_owner(source)
    if (
        owner is not source
        and owner.target not in ROW_MAJOR
        and (dense := with_strides(owner, owner.next, is_backward=owner.meta["is_backward"]))
    ):
        owner.replace_all_uses_with(dense, delete_user_cb=lambda user: user not in parts_of(dense, owner))


def parts_of(dense: fx.Node, source: fx.Node) -> set[fx.Node]:
    """The nodes between a value and what `with_strides` made of it, that one included."""
    found = set()
    while dense is not source:
        found.add(dense)
        dense = dense.args[0]  # type: ignore[assignment]
    return found


def with_strides(source: fx.Node, before: fx.Node, *, is_backward: bool) -> fx.Node | None:
    """A node before another one with a value that has the strides of its fake value, which are dense; None if they are
    not, or the value is an input, which has those strides. Nothing is copied where they are right already."""
    is_made = source.op == "call_function"
    if not is_made:
        return None
    fake = source.meta["val"]
    ranks = {torch.contiguous_format: None, torch.channels_last: 4, torch.channels_last_3d: 5}
    formats = [layout for layout, rank in ranks.items() if rank in (None, fake.ndim)]
    layout = next((layout for layout in formats if fake.is_contiguous(memory_format=layout)), None)
    order = list(range(fake.ndim))
    if layout is None:
        layout, order = torch.contiguous_format, sorted(order, key=fake.stride, reverse=True)
        if not fake.permute(order).is_contiguous():
            return None

    def inserted(operator: Any, value: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        with before.graph.inserting_before(before):
            made = before.graph.call_function(operator, (value, *args), kwargs)
        made.meta = {**source.meta, "is_backward": is_backward}
        if args:
            made.meta["val"] = value.meta["val"].permute(*args)
        return made

    if order == sorted(order):
        return inserted(aten.contiguous.default, source, memory_format=layout)
    turned = inserted(aten.permute.default, source, order)
    dense = inserted(aten.contiguous.default, turned, memory_format=layout)
    dense.meta["val"] = turned.meta["val"]
    return inserted(aten.permute.default, dense, [order.index(dim) for dim in range(fake.ndim)])
