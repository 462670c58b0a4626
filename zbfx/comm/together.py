"""What all processes of torch.distributed do together outside a step: compare their arguments, and share results.
In: a value or an argument of this process. Out: those of all processes, or one error on all. Each exchange has a name:
processes that are at exchanges of different names made different calls, and hear of it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zbfx.comm.overdue import say
from zbfx.errors import SAME_CALLS, PipelineFault, ZbfxError, listed
from zbfx.spelled import spelled


def is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def on_first_rank(value: Any) -> Any:
    """The value on rank 0, False on the others."""
    return value if is_alone() or dist.get_rank() == 0 else False


@contextmanager
def waiting(who: str, what: str) -> Iterator[None]:
    """What torch.distributed raises in here becomes a `PipelineFault`: `who` waits for `what`. Errors of this process's
    own device stay what they are."""
    try:
        yield
    except (ZbfxError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise PipelineFault(
            f"{who}: waiting for {what} is lost, or slower than the timeout, or made other calls ({SAME_CALLS}): "
            f"{error}",
            waited=True,
        ) from error


@dataclass(frozen=True)
class At:
    """Where a process is: the name of an exchange, and the value that it brings. `failure`: why it comes to no further
    one."""

    what: str
    value: object = None
    failure: str | None = None


def exchange(what: str, value: object) -> list[Any]:
    """The picklable value of every process, in order, on every one; `what` names the exchange. Raises `ZbfxError` if
    another process has failed, or is at another exchange, `PipelineFault` if one has ended."""
    if is_alone():
        return [value]
    who = f"rank {dist.get_rank()}, {what}"
    with on_all(), waiting(who, "another rank, which has ended or raised an error before,"):
        found = everywhere(At(what, value))
        for rank, at in enumerate(found):
            if at.failure is not None:
                raise ZbfxError(f"rank {rank}, {at.what}: {at.failure}")
        if any(at.what != what for at in found):
            places = listed(f"rank {rank} is at {at.what}" for rank, at in enumerate(found))
            raise ZbfxError(f"ranks made different calls, but {SAME_CALLS}; found: {places}")
        return [at.value for at in found]


def everywhere(own: At) -> list[At]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


@contextmanager
def on_all() -> Iterator[None]:
    """What is raised in here, all processes raise: none waits to hear of it."""
    try:
        yield
    except Exception as error:
        vars(error)["is_on_all"] = True
        raise


@contextmanager
def telling(what: str) -> Iterator[None]:
    """What is raised in here by one process, others raise too, at the exchange that they wait in or come to next. The
    process says so before, for it waits for them."""
    try:
        yield
    except Exception as error:
        if not is_alone() and not vars(error).get("is_on_all"):
            say(f"rank {dist.get_rank()}, {what}: {described(error)}")
            with suppress(Exception):  # another has ended meanwhile
                everywhere(At(what, failure=described(error)))
        raise


def described(error: Exception) -> str:
    """An error in a line for other processes."""
    return str(error) if isinstance(error, ZbfxError) else f"{type(error).__name__}: {error}".removesuffix(": ")


def from_rank(rank: int, what: str, value: Any) -> Any:
    """The picklable value of one process, on all."""
    if is_alone():
        return value
    exchange(what, None)
    box = [value]
    with waiting(f"rank {dist.get_rank()}, {what}", f"rank {rank}, which"):
        dist.broadcast_object_list(box, src=rank)
    return box[0]


def on_all_ranks(what: str, work: Callable[[], Any], arguments: Mapping[str, object] | None = None) -> Any:
    """Do `work` on every process. If one raises an error, all do; they also do if their arguments differ."""
    if is_alone():
        return work()
    names = [f"rank {rank}" for rank in range(dist.get_world_size())]
    return agreed(what, work, arguments or {}, partial(exchange, what), names)


def agreed(
    what: str,
    work: Callable[[], Any],
    arguments: Mapping[str, object],
    gather: Callable[[Any], list[Any]],
    names: Sequence[str],
) -> Any:
    """Do `work` on the processes of these names; `gather` collects a value of each. If one raises an error, the others
    raise a `ZbfxError` with its text; all do if their arguments differ."""
    result, refusal = None, None
    try:
        result = work()
    except Exception as error:
        refusal = error
    own = {name: spelled(value) for name, value in arguments.items()}
    answers = gather((None if refusal is None else described(refusal), own))
    with on_all():
        refuse_other_arguments(what, [found for _, found in answers], names)
        if refusal is not None:
            raise refusal
        for name, (text, _) in zip(names, answers, strict=True):
            if text is not None:
                raise ZbfxError(f"{name}: {text}")
    return result


def refuse_other_arguments(what: str, found: Sequence[Mapping[str, str]], names: Sequence[str]) -> None:
    """Raise `ZbfxError` unless all ranks pass the same. `found` are the arguments of each rank, as text."""
    different = [
        f"{name} is {first} on {names[0]}, {other[name]} on {names[rank]}"
        for name, first in found[0].items()
        for rank, other in [next(((k, o) for k, o in enumerate(found) if o[name] != first), (0, None))]
        if other is not None
    ]
    if different:
        raise ZbfxError(f"{what}: all ranks pass the same arguments; found {'; '.join(different)}")
