"""Layers that run the same are traced once: forward and backward of one, stamped out for each of the others.

Takes   a first pass of the tracer over the model, recorded (`recorded.py`).
Gives   the joint graph that tracing every layer would give, up to names and the numbers of operators (`seq_nr`). While
        it is traced, an operator stands for each call of such a layer, and one for its backward; then copies of the
        graph of the first layer take their places.
Raises  `NotAlike` where the graph could be another one; the whole model is traced then.
Source  ours. Regions that the user marks (`torch.compiler.nested_compile_region`) need a changed model, and their
        graphs are opaque to the passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from zbfx._torch import under_tracer
from zbfx._torch.modules import hooks_of_all_modules
from zbfx._torch.tensors import pytree
from zbfx._torch.tracing import descriptors
from zbfx.errors import listed
from zbfx.graphs import copy_node
from zbfx.trace.layer_calls import LayerArguments, LayerCall, LeafPlace, held_by, tensor_layout
from zbfx.trace.python_state import PythonState, Unseen
from zbfx.trace.recorded import LayerRecorder, repeated

MOST_OF_MODEL = 2_000_000  # that Python code reaches from a model
LEAST_ALIKE = 4  # layers alike: of fewer, tracing one by itself takes as long as it saves

LAYER_LIBRARY = torch.library.Library("zbfx", "FRAGMENT")
LAYER_LIBRARY.define(
    "layer(Tensor[] tensors, int call, bool is_backward, int[] ranks, int[] shapes, int[] strides, ScalarType[] dtypes)"
    " -> Tensor[]"
)
LAYER = torch.ops.zbfx.layer.default


def run_layer(tensors: Sequence[Tensor], call: int, is_backward: bool, likes: Sequence[Tensor]) -> list[Tensor]:
    """What stands for the results of a layer, or for the gradients of its backward, which are laid out like `likes`."""
    shapes = [size for like in likes for size in like.shape]
    strides = [step for like in likes for step in like.stride()]
    ranks, dtypes = [like.dim() for like in likes], [like.dtype for like in likes]
    found: list[Tensor] = LAYER(tensors, call, is_backward, ranks, shapes, strides, dtypes)
    return found


def fake_results(
    tensors: Sequence[Tensor], call: int, is_backward: bool, ranks: Any, shapes: Any, strides: Any, dtypes: Any
) -> list[Tensor]:
    ends = [*itertools.accumulate(ranks, initial=0)]
    return [
        tensors[0].new_empty_strided(shapes[begin:end], strides[begin:end], dtype=dtype)
        for (begin, end), dtype in zip(itertools.pairwise(ends), dtypes, strict=True)
    ]


torch.library.register_fake("zbfx::layer", fake_results)


class NotAlike(Exception):
    """Layers that seemed to run the same may not."""


class LayersAlike(Exception):
    """A first pass over a model has found calls of layers that run the same, in groups."""

    def __init__(self, recorder: LayerRecorder, groups: list[list[LayerCall]]) -> None:
        super().__init__("layers run the same")
        self.recorder, self.groups = recorder, groups

    def note(self, why: Exception) -> str:
        """That these layers were traced each by itself after all."""
        told = str(why) if isinstance(why, NotAlike) else type(why).__name__
        return note_apart(told, [call.name for group in self.groups for call in group])


def note_apart(why: str, layers: Iterable[str]) -> str:
    return f"layers traced each by itself: {listed(dict.fromkeys(layers), 3)} ({why})"


@dataclass(frozen=True)
class Body:
    """The joint graph of a layer. `inputs` and `held` have the placeholders of its arguments and of its parameters and
    buffers, `tangents` those of the gradients of its results, and `results` and `gradients` the nodes that compute the
    results and the gradients, by the place of a result, by the place of an input or the name of a parameter."""

    call: LayerCall
    graph: fx.Graph
    inputs: Mapping[int, fx.Node]
    held: Mapping[str, fx.Node]
    tangents: Mapping[int, fx.Node]
    results: Mapping[int, fx.Node]
    gradients: Mapping[int | str, fx.Node]

    @classmethod
    def of(cls, module: fx.GraphModule, call: LayerCall) -> Body:
        graph, output = module.graph, module.graph.output_node()
        inputs, held, tangents = dict[int, fx.Node](), dict[str, fx.Node](), dict[int, fx.Node]()
        for node in graph.find_nodes(op="placeholder"):
            match node.meta["desc"]:
                case descriptors.ParamAOTInput(target=target) | descriptors.BufferAOTInput(target=target):
                    held[target.removeprefix("layer.")] = node
                case descriptors.TangentAOTInput(output=descriptors.PlainAOTOutput(idx=index)):
                    tangents[index] = node
                case descriptors.PlainAOTInput(idx=index):
                    inputs[index] = node
                case other:
                    raise NotAlike(f"an input {other}")
        results, gradients = dict[int, fx.Node](), dict[int | str, fx.Node]()
        for value, description in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
            match description:
                case descriptors.PlainAOTOutput(idx=index):
                    results[index] = value.args[0]  # of the clone
                case descriptors.GradAOTOutput(grad_of=descriptors.ParamAOTInput(target=target)):
                    gradients[target.removeprefix("layer.")] = value
                case descriptors.GradAOTOutput(grad_of=descriptors.PlainAOTInput(idx=index)):
                    gradients[index] = value
                case other if value is not None:  # else it is that of an input that has none
                    raise NotAlike(f"an output {other}")
        gradients = {of: value for of, value in gradients.items() if value is not None}
        body = cls(call, graph, inputs, held, tangents, results, gradients)
        body.check()
        return body

    def check(self) -> None:
        made = self.call.made
        due = {place for place, tensor in enumerate(made) if tensor.requires_grad}
        if self.results.keys() != {*range(len(made))} or self.tangents.keys() != due:
            raise NotAlike("other results than the layer's")
        if self.graph.find_nodes(op="get_attr"):
            raise NotAlike("constants")
        for place, node in self.results.items():
            if tensor_layout(node.meta["val"])[:5] != tensor_layout(made[place])[:5]:
                raise NotAlike("results with other strides")

    def nodes(self, backward: bool) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function" and n.meta["is_backward"] is backward]


class Alone(nn.Module):
    """A layer by itself, as a module of the tensors among its arguments. It returns copies of its results, such that
    none of them is a view. Its first pass is compared with the layer's call in the model."""

    def __init__(self, layer: nn.Module, call: LayerCall, lines: Any) -> None:
        super().__init__()
        self.layer, self.call, self.lines, self.is_compared = layer, call, lines, False

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        call = self.call
        leaves = [tensors[leaf.number] if isinstance(leaf, LeafPlace) else leaf[1] for leaf in call.given.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, call.given.spec)
        with self.lines, self.lines.within(call.name):
            output = self.layer.forward(*args, **kwargs) if self.is_compared else self.compared(args, kwargs)
        self.is_compared = True
        flat = pytree.tree_leaves(output)
        made = {leaf.number: value for leaf, value in zip(call.results, flat, strict=True) if is_made(leaf)}
        return tuple(made[place].clone() for place in range(len(made)))

    def compared(self, args: Any, kwargs: Any) -> Any:
        """What the layer returns, if it runs what it has run in the model."""
        recorder = LayerRecorder({self.call.name: self.layer})
        with recorder:
            output = recorder.run(self.call.name, self.layer.forward, args, kwargs)
        (found,) = recorder.calls
        if recorder.doubt or found.doubt or not same_calls(found, self.call):
            raise NotAlike(recorder.doubt or found.doubt or "a layer runs something else by itself")
        return output


def same_calls(one: LayerCall, other: LayerCall) -> bool:
    """Whether two calls run the same, where the inputs of one are leaves."""
    found, due = ((c.given.leaves, c.operators, c.results, c.autograd) for c in (one, other))
    return found == due


def is_made(leaf: Any) -> bool:
    return isinstance(leaf, LeafPlace) and leaf.is_made


def body_of(
    call: LayerCall, model: nn.Module, lines: Any, fake_mode: Any, capture: Callable[[nn.Module, Any], fx.GraphModule]
) -> Body:
    """The joint graph of the layer of a call, which is traced by itself."""
    with fake_mode:
        inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)
            for t in call.inputs
        ]
    if any(tensor.storage_offset() for tensor in call.inputs):
        raise NotAlike("an input within the memory of another tensor")
    return Body.of(capture(Alone(model.get_submodule(call.name), call, lines), inputs), call)


class StandIn(torch.autograd.Function):
    """Stands for a call of a layer while the model is traced."""

    @staticmethod
    def forward(ctx: Any, number: int, body: Body, names: tuple[str, ...], *tensors: Tensor) -> Any:
        ctx.number, ctx.body, ctx.names, ctx.inputs = number, body, names, len(tensors) - len(names)
        ctx.set_materialize_grads(False)
        results = run_layer(tensors, number, False, body.call.made)
        fixed = [result for result, tensor in zip(results, body.call.made, strict=True) if not tensor.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        body = ctx.body
        tangents = [given[place] for place in sorted(body.tangents)]
        for tangent, node in zip(tangents, (body.tangents[place] for place in sorted(body.tangents)), strict=True):
            if tangent is None or tensor_layout(tangent)[:5] != tensor_layout(node.meta["val"])[:5]:
                raise NotAlike("gradients of results with other strides")

        found = run_layer(tangents, ctx.number, True, [node.meta["val"] for node in body.gradients.values()])
        gradients = dict(zip(body.gradients, found, strict=True))
        return (None, None, None, *(gradients.get(of) for of in (*range(ctx.inputs), *ctx.names)))


STAND_IN = under_tracer.backward_class(StandIn)


class FirstLook:
    """A first attempt at a model: its first pass is recorded, and the second is not begun if layers run the same.
    `roots` are all that holds the model's Python state. `is_steady()` says whether the first pass has left the model's
    tensors as they were."""

    def __init__(self, model: nn.Module, roots: Sequence[Any], is_steady: Callable[[], bool]) -> None:
        self.layers = repeated(model, LEAST_ALIKE)
        self.recorder, self.roots, self.is_steady, self.passes = LayerRecorder(self.layers), roots, is_steady, 0
        self.doubt, self.notes = "", tuple[str, ...]()
        install(self.layers, self.run)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        self.passes += 1
        if self.passes == 1 and self.layers:
            before = self.state()
            with self.recorder:
                yield
            if before is not None and self.state() != before:
                self.doubt = "a forward changes attributes of the model, or objects that it reaches"
            self.doubt = self.doubt or self.recorder.doubt
            return
        if self.passes == 2 and self.layers:
            if not self.is_steady():
                self.doubt = self.doubt or "a forward leaves tensors in the model, or looks at nodes of autograd"
            groups = [] if self.doubt else [group for group in self.recorder.alike() if len(group) >= LEAST_ALIKE]
            self.notes = tuple(self.doubts())
            if groups:
                raise LayersAlike(self.recorder, groups)
            self.recorder = LayerRecorder({})  # of the tensors of the first pass nobody needs to know any more
        yield

    def state(self) -> PythonState | None:
        try:
            return PythonState.of(*self.roots, *hooks_of_all_modules(), most=MOST_OF_MODEL)
        except Unseen as why:
            self.doubt = str(why)
            return None

    def run(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        return recorder.run(name, forward, args, kwargs) if self.passes == 1 else forward(*args, **kwargs)

    def doubts(self) -> Iterator[str]:
        """Why layers that seem alike are traced each by itself, where anything of a layer is trained."""
        calls = [call for call in self.recorder.calls if any(tensor.requires_grad for tensor in call.made)]
        if self.doubt:
            yield note_apart(self.doubt, [call.name for call in calls])
            return
        for why in dict.fromkeys(call.doubt for call in calls if call.doubt):
            yield note_apart(why, [call.name for call in calls if call.doubt == why])


class Stand:
    """A second attempt, in which `StandIn`s run layers. `bodies` has the graph of each of them, by name. Its first pass
    must run between these layers, and in others, what `before` has, the record of the first attempt."""

    def __init__(self, model: nn.Module, bodies: Mapping[str, Body], before: LayerRecorder) -> None:
        self.bodies, self.before, self.names, self.passes = bodies, before, list(bodies), 0
        self.layers = {name: model.get_submodule(name) for name in before.layers}
        self.recorder, self.failed = LayerRecorder(self.layers), ""
        install(self.layers, self.run)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        self.passes += 1
        if self.passes == 1:
            with self.recorder:
                yield
        else:
            yield
        if self.failed or not self.recorder.is_like(self.before, self.bodies):
            raise NotAlike(self.failed or self.recorder.doubt or "something else runs between the layers")

    def run(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        stands_in = name in self.bodies
        forward = partial(self.stand_in, name) if stands_in else forward
        if self.passes > 1:
            return forward(*args, **kwargs)
        return self.recorder.run(name, forward, args, kwargs, stands_in=stands_in)

    def stand_in(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """In the place of the forward of a layer."""
        body, given, held = self.bodies[name], LayerArguments.of(args, kwargs), held_by(self.layers[name])
        due = body.call.given
        layouts = [list(map(tensor_layout, one.inputs)) for one in (given, due)]
        if (given.leaves, given.spec, layouts[0]) != (due.leaves, due.spec, layouts[1]):
            self.failed = f"{name} has other arguments"  # a model could catch the error
            raise NotAlike(self.failed)
        names = tuple(body.held)
        made = StandIn.apply(self.names.index(name), body, names, *given.inputs, *(held[of] for of in names))
        leaves = [
            (made if leaf.is_made else given.inputs)[leaf.number] if isinstance(leaf, LeafPlace) else leaf[1]
            for leaf in body.call.results
        ]
        return pytree.tree_unflatten(leaves, body.call.result_spec)

    def stamp(self, module: fx.GraphModule) -> None:
        """Put copies of the bodies in the places of what stands for them."""
        graph, copies = module.graph, dict[int, dict[fx.Node, fx.Node]]()
        for node in graph.find_nodes(op="call_function", target=LAYER):
            _, number, is_backward, *_ = node.args
            name = self.names[number]
            stamp = Stamp(graph, self.bodies[name], name, number)
            if is_backward:
                stamp.backward(node, copies[number])
            else:
                copies[number] = stamp.forward(node)
        graph.eliminate_dead_code()
        module.recompile()


@dataclass(frozen=True)
class Stamp:
    """One copy of a body in a graph, for a layer of this name."""

    graph: fx.Graph
    body: Body
    name: str
    number: int

    def forward(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """The copy of the forward, in the place of a node; the copy of each node of the body."""
        body, given = self.body, tuple[fx.Node, ...](node.args[0])  # type: ignore[arg-type]
        sources = [*(body.inputs.get(place) for place in range(len(body.call.inputs))), *body.held.values()]
        copies = {s: tensor for s, tensor in zip(sources, given, strict=True) if s is not None}
        self.copy(node, body.nodes(backward=False), copies)
        for entry in list(node.users):
            entry.replace_all_uses_with(copies[body.results[int(entry.args[1])]])  # type: ignore[arg-type]
        return copies

    def backward(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
        """The copy of the backward, in the place of a node."""
        body, given = self.body, tuple[fx.Node, ...](node.args[0])  # type: ignore[arg-type]
        tangents = [body.tangents[place] for place in sorted(body.tangents)]
        copies |= dict(zip(tangents, given, strict=True))
        self.copy(node, body.nodes(backward=True), copies)
        values = [*body.gradients.values()]
        for entry in list(node.users):
            entry.replace_all_uses_with(copies[values[int(entry.args[1])]])  # type: ignore[arg-type]

    def copy(self, place: fx.Node, nodes: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
        first = self.body.call.name
        with self.graph.inserting_before(place):
            for node in nodes:
                copies[node] = copy_node(self.graph, node, copies)
                meta = copies[node].meta
                meta["seq_nr"] = (self.number, meta.get("seq_nr"))
                if (line := meta.get("stack_trace")) is not None:
                    meta["stack_trace"] = renamed(line, first, self.name)


def renamed(line: str, first: str, name: str) -> str:
    """The line of a node in a layer, or in a part of it, in a layer of another name."""
    code, inside, module = line.partition(" in ")
    return f"{code}{inside}{name}{module.removeprefix(first)}" if inside else line


def install(layers: Mapping[str, nn.Module], run: Callable[..., Any]) -> None:
    """Let `run(name, forward, args, kwargs)` run the forwards of layers, which keep their signatures."""
    for name, layer in layers.items():
        layer.forward = MethodType(through(run, name, layer.forward), layer)


def through(run: Callable[..., Any], name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(getattr(forward, "__func__", forward))
    def run_forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(name, forward, args, kwargs)

    return run_forward
