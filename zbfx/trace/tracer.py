"""Model, loss and an example microbatch -> `Joint`: one graph of forward, loss and backward.

The model stays untouched and nothing is allocated: a copy of it is traced (`fake_copies.py`), as one module with its
loss (`objective.py`). What the tracer gives becomes a `Joint` in `as_joint.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from zbfx._torch import tracing, untraceable
from zbfx._torch.fakes import FakeTensorMode
from zbfx._torch.operators import ASSERT
from zbfx.errors import TraceError, ZbfxError, listed
from zbfx.graphs import Joint
from zbfx.passes.sizes import inline_sizes
from zbfx.trace.aliases import refuse_written
from zbfx.trace.as_joint import as_joint, sum_dtypes, without_tokens
from zbfx.trace.backward_writes import claim_reads, with_written_values
from zbfx.trace.compiled_parts import note_of_compiled, without_compiling
from zbfx.trace.counters import numbers_of, refuse_counters
from zbfx.trace.decompositions import RIGHT
from zbfx.trace.fake_copies import fake_copies
from zbfx.trace.first_forward import take_made
from zbfx.trace.objective import Objective
from zbfx.trace.reached import Reached
from zbfx.trace.refusals import OF_EXAMPLE, refuse, refuse_flex_attention, refuse_mixed_dtypes, refuse_subclass
from zbfx.trace.signature import Signature
from zbfx.trace.stamped import Body, FirstLook, LayersAlike, NotAlike, Stand, body_of
from zbfx.trace.symbols import Sizes
from zbfx.trace.tensor_names import canonical_names, named_tensors
from zbfx.trace.tensor_parallel import is_sharded, localize
from zbfx.trace.wanted import TRAINING, Wanted

fx.has_side_effect(ASSERT)  # else fx takes it for dead code, as it does not the one with a message


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
@tracing.without_looks_at_masks()
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
    given: str = OF_EXAMPLE,
) -> tuple[Joint, Signature]:
    """The joint graph of one microbatch on `device`, as far as it is `wanted`, and the structure of the call.

    Parameters and inputs may live on the meta device. `batch_dims` are those of `Signature.of`, `grad_dtype` that of
    `sum_dtypes`. `sizes` says which sizes of the microbatch are symbols. Sizes that the model computes from them are
    arguments of the graph's nodes. `undo` takes out of a copy of model and loss what forwards outside of steps have
    made since an earlier trace. `share_layers`: trace layers that run the same once. `given`: what the arguments are
    of, for messages. Raises `TraceError`, with the user's line, where the model needs values of tensors to decide
    what to run, or has no loss to differentiate."""
    signature = Signature.of(example_inputs, example_kwargs, example_targets, batch_dims)
    for spec, example in zip(
        signature.tensors, signature.flatten((*example_inputs, *example_targets), example_kwargs), strict=True
    ):
        refuse_subclass(spec.name, example)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes.env if sizes else None)
    with fake_mode:
        inputs = [
            torch.empty_strided(
                *(sizes.layout(index) if sizes else (spec.shape, spec.stride)), dtype=spec.dtype, device=device
            )
            for index, spec in enumerate(signature.tensors)
        ]

    outside = Reached.of(model, loss_fn, named_tensors(model, loss_fn)).tensors.values()

    def objective_of(*, traced: bool = True) -> Objective:
        copies = fake_copies(model, loss_fn, outside, fake_mode, device)
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
        with fake_mode, untraceable.without_fake_logs(), tracing.decomposing(RIGHT), tracing.checks_in_the_graph():
            return tracing.capture_joint(module, tensors)

    def plainly(objective: Objective) -> fx.GraphModule:
        with tracing.recomputing_within(objective.recomputing):
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
            with untraceable.without_fake_logs():
                refuse(error, objective.model, objective.part, fails_alone, given)
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
