"""Checks and preparations before a pipeline runs: who takes part, that all hold one plan, where the tensors are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbfx._torch.tensors import gradient_dtype, has_gradient_hooks, set_gradient_dtype
from zbfx.comm.channels import Channels
from zbfx.comm.place import Place
from zbfx.compiled import Compiled
from zbfx.errors import InputError, ZbfxError, listed
from zbfx.runtime.engine import Engine
from zbfx.runtime.fingerprint import fingerprints
from zbfx.runtime.runner import RankRunner
from zbfx.trace.aliases import refuse_apart, separate
from zbfx.trace.guard import Source
from zbfx.trace.left_behind import is_left_behind, refuse_left_behind, take_over


def prepare(pipe: Compiled, source: Source, engine: Engine, holders: Mapping[str, Sequence[int]] | None = None) -> None:
    """Check these ranks' tensors, and move them to the device. `holders` of each, where ranks are not one process."""
    named = source.named
    source.guard.check_layouts(named, engine.tensor_names)
    if holders is None:
        refuse_left_behind(name for name in sorted(engine.tensor_names) if is_left_behind(named[name]))
    else:
        refuse_apart(named, holders, pipe.joint)
    take_gradient_dtypes(pipe, engine)
    move_to(engine.runners, pipe.device)
    separate(named, pipe.joint.replaced)


def agree(channels: Channels, digest: Mapping[str, str], prepare: Callable[[], None]) -> None:
    """Prepare this rank, and check that all hold one plan, by hashes of its parts. What one refuses, all refuse."""
    refusal = None
    try:
        prepare()
    except ZbfxError as error:
        refusal = str(error)
    answers: list[Any] = channels.gather((dict(digest), refusal))
    for found in channels.gather_shards(refused(answers, channels.place)):
        if found is not None:
            raise ZbfxError(found)


def refused(answers: Sequence[tuple[Mapping[str, str], str | None]], place: Place) -> str | None:
    """Why a pipeline cannot be bound, from the digests and refusals of all ranks. None: it can."""
    names = place.names()
    for name, (_, text) in zip(names, answers, strict=True):
        if text is not None:
            return f"{name}: {text}"
    first = answers[0][0]
    different = [index for index, (other, _) in enumerate(answers) if other != first]
    if not different:
        return None
    who = f"ranks {different}" if len(place.replicas) == 1 else "; ".join(names[k] for k in different)
    parts = [part for part, own in first.items() if any(answers[k][0].get(part) != own for k in different)]
    return (
        f"{who} hold another plan than {names[0]}; what differs: {listed(parts, 3)}. "
        f"Compile with the same model, arguments and costs on every rank, and call init_process_group before "
        f"compile: only then do ranks share measured costs and searched plans"
    )


def batch_hashes(names: Sequence[str], rows: Sequence[Sequence[Tensor]]) -> dict[str, list[int]]:
    """Hashes of the bits of each tensor in a batch that has data, one a microbatch; waits for the device."""
    found = {}
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        distinct = {id(tensor): tensor for tensor in column if not tensor.is_meta}
        found[name] = fingerprints(distinct.values())
    return {name: hashes for name, hashes in found.items() if hashes}


def refuse_other_batches(channels: Channels, own: Mapping[str, object]) -> None:
    """Check that the ranks of a pipeline, and the shards of its stages, were given the same batch: `own` are the hashes
    of its tensors. Collective over all of these, so that all refuse what one pipeline does."""
    place = channels.place
    shards: list[Any] = channels.gather_shards((place.name, dict(own)))
    everywhere: list[Any] = channels.gather((dict(own), first_difference(shards)))
    ranks, names = len(place.processes), place.names()
    found = [text for _, text in everywhere] + [
        first_difference([(names[k], everywhere[k][0]) for k in range(first, first + ranks)])
        for first in range(0, len(everywhere), ranks)
    ]
    for text in (text for texts in channels.gather_shards(found) for text in texts):
        if text is not None:
            raise InputError(
                f"{text}: each rank reads a part of the batch, so all ranks of a pipeline take the same one, in all "
                f"bits. Shuffle with the same seed on each (no DistributedSampler over the ranks), or broadcast the "
                f"batch"
            )


def first_difference(found: Sequence[tuple[str, Mapping[str, object]]]) -> str | None:
    """Who has other values than the first, of those tensors that both have; None: nobody. `found` are names of ranks,
    and values by the names of tensors."""
    (first_name, first), *others = found
    for other_name, other in others:
        if different := [name for name in first if name in other and other[name] != first[name]]:
            return f"{other_name} was given other values of {listed(different)} than {first_name}"
    return None


def refuse_other_values(channels: Channels, named: Mapping[str, Tensor]) -> None:
    """Check that parameters and buffers have the same bits in every replica. Collective over the family."""
    own = [
        name
        for name, tensor in named.items()
        for bits in [tensor.detach().contiguous().reshape(-1).view(torch.uint8)]
        if not torch.equal(bits, channels.from_first_replica(bits))
    ]
    found = [
        f"{name}: {', '.join(different[:3])}{', ...' * (len(different) > 3)}"
        for name, different in zip(channels.place.names(), channels.gather(own), strict=True)
        if different
    ]
    if found:
        raise ZbfxError(
            f"replicas start from the same parameters and buffers; found other values than in replica 0 in "
            f"{'; '.join(found)}. Seed every process alike, or load the same checkpoint, before bind"
        )


def warn_of_other_values(channels: Channels, named: Mapping[str, Tensor], used: Collection[str]) -> None:
    """Warn if two ranks of a pipeline have data for one tensor with different bits; `used` are those of this rank's
    stages. Raise if a rank would start from values of before others trained them. Collective over the family, all of
    which warns or raises. Costs each rank about half a second per GB of the model on a CPU core; a GPU reads its memory
    once. Tensors on the meta device, and DTensors, which each rank has its own part of, are not compared; nor are those
    of other ranks' stages that these ranks have trained since."""
    behind = {name for name in named if is_left_behind(named[name])}
    kept = {
        name: tensor
        for name, tensor in named.items()
        if not tensor.is_meta and tensor.layout is torch.strided and (name in used or name not in behind)
    }
    hashes = dict(zip(kept, fingerprints(kept.values()), strict=True))
    everywhere = [Bits(*found) for found in channels.gather((hashes, behind & set(used)))]
    place, different, stale = channels.place, dict[str, str](), set[str]()
    ranks = len(place.processes)
    for replica in range(len(place.replicas)):
        first: dict[str, int] = {}
        together = everywhere[replica * ranks : (replica + 1) * ranks]
        stale |= {name for held in together for name in held.behind if held.is_stale(name, together)}
        for rank, held in enumerate(together):
            for name in held.hashes:
                other = first.setdefault(name, rank)
                if held.hashes[name] != together[other].hashes[name]:
                    who = f"{place.name_of(replica, other)} and {place.name_of(replica, rank)}"
                    different.setdefault(name, f"{name} ({who})")
    refuse_left_behind(sorted(stale))
    take_over(named[name] for name in behind & set(used))
    if different:
        warnings.warn(
            f"ranks of one pipeline have different values of {listed(different.values(), 3)}. Each stage starts from "
            f"the values of the rank that runs it: if one rank alone has loaded a checkpoint, or each has a seed of "
            f"its own, they make a model that no rank has. Seed every rank alike and load the checkpoint on every rank "
            f"before bind; leave tensors of other ranks' stages on the meta device where that is meant",
            stacklevel=5,  # with the frame of `uncompiled`
        )


@dataclass(frozen=True, slots=True)
class Bits:
    """What a rank says of its tensors: hashes of their values, and which it uses although others trained them since."""

    hashes: Mapping[str, object]
    behind: Collection[str]

    def is_stale(self, name: str, everyone: Sequence[Bits]) -> bool:
        """Whether a tensor that others trained has other values there, as far as they can be compared."""
        theirs = [held.hashes[name] for held in everyone if name in held.hashes and name not in held.behind]
        return name not in self.hashes or not theirs or any(one != self.hashes[name] for one in theirs)


def refuse_gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Gradients are accumulated by the stages' graphs, not by autograd: hooks on them would never run."""
    hooked = [name for name, parameter in parameters.items() if has_gradient_hooks(parameter)]
    if hooked:
        raise ZbfxError(
            f"gradients accumulate into .grad inside the pipeline, where no hook runs; found hooks on the gradients of "
            f"{listed(hooked)}. Remove them, and do their work after the step, on .grad"
        )


def take_gradient_dtypes(pipe: Compiled, engine: Engine) -> None:
    """Let parameters have gradients of the dtypes that `compile` was asked for."""
    for runner in engine.runners:
        asked = {name: dtype for name, dtype in pipe.joint.grad_dtypes.items() if name in runner.parameters}
        for name, parameter in runner.parameters.items() if pipe.options.grad_dtype is not None else ():
            if name in asked and (parameter.grad is None or parameter.grad.dtype is asked[name]):
                set_gradient_dtype(parameter, asked[name])
        refuse_gradients(runner.parameters, pipe.joint.grad_dtypes)


def refuse_gradients(parameters: Mapping[str, nn.Parameter], dtypes: Mapping[str, torch.dtype]) -> None:
    """Gradients are added to `.grad` in place, as autograd does, in the dtypes that were compiled for: of `dtypes`, or
    else of the parameters. Raises `InputError` where that would fail, or autograd would give another dtype."""
    for name, parameter in parameters.items():
        gradient = parameter.grad
        found, expected = gradient_dtype(parameter), dtypes.get(name, parameter.dtype)
        if found is not expected or (gradient is not None and gradient.dtype is not found):
            what = f"grad_dtype = {found}" if gradient is None else f"a gradient of {gradient.dtype}"
            raise InputError(
                f"the pipeline was compiled for gradients of {expected} at {name}, which is {parameter.dtype}; found "
                f"{what}. Set .grad to None and .grad_dtype to {expected}, or compile again, with grad_dtype= or "
                f".grad_dtype set before"
            )
        if gradient is not None and (kind := unwritable(gradient)):
            raise InputError(
                f"a step adds to .grad in place; found {kind} as the gradient of {name}. Set it to None "
                f"(zero_grad()) or to a tensor of its own (.grad = torch.zeros_like(parameter).add_(gradient))"
            )


def unwritable(gradient: torch.Tensor) -> str:
    """What keeps a tensor from being added to; "" if nothing does."""
    if gradient.layout is not torch.strided:
        return "a sparse tensor"
    if gradient.is_inference():
        return "a tensor made in inference mode"
    if not gradient.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(gradient.size(), gradient.stride(), strict=True)
    ):
        return "an expanded tensor, whose entries share memory,"
    return ""


def move_to(runners: Sequence[RankRunner], device: torch.device) -> None:
    """Move the parameters, buffers and constants that these ranks use. Raises `ZbfxError` if one has no data."""
    for runner in runners:
        refuse_gradient_hooks(runner.parameters)
        for name in sorted(runner.tensor_names):
            tensor = runner.tensors.named[name]
            if tensor.is_meta:
                raise ZbfxError(
                    f"{name} is on the meta device and has no data: fill the model first, for example "
                    f"model.to_empty(device={str(device)!r}) followed by its initialisation or load_state_dict"
                )
            tensor.data = tensor.data.to(device)
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = tensor.grad.to(device)
