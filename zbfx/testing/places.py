"""Where faults strike: places that a rank passes as it compiles, binds, steps or saves, each with the function of the
library that runs there. In: what a user names. Out: `Spot`s, for `zbfx.testing.faults.injected`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zbfx.pipeline
import zbfx.runtime.bind
from zbfx.comm.channels import Channels
from zbfx.plan import Action, Kind
from zbfx.runtime.engine import Engine
from zbfx.runtime.runner import RankRunner

Work = Callable[..., Any]
Around = Callable[[Work, tuple[Any, ...]], Any]  # runs the work of a place, with its arguments, or does not


def always(*_: Any) -> bool:
    return True


@dataclass(frozen=True)
class Spot:
    """A place by its name. `hold(around)` is a block in which `around` gets what runs at the place, where `here` of its
    arguments says that this is it."""

    name: str
    hold: Callable[[Around], AbstractContextManager[None]] = field(repr=False)

    def __str__(self) -> str:
        return self.name


def place(name: str, owner: Any, attribute: str, here: Callable[..., bool] = always) -> Spot:
    """The calls of a function or method, `owner.attribute`, for whose arguments `here` is true."""

    @contextmanager
    def hold(around: Around) -> Iterator[None]:
        before = getattr(owner, attribute)

        @wraps(before)
        def passed(*args: Any, **kwargs: Any) -> Any:
            if not here(*args):
                return before(*args, **kwargs)
            return around(lambda *changed: before(*changed, **kwargs), args)

        setattr(owner, attribute, passed)
        try:
            yield
        finally:
            setattr(owner, attribute, before)

    return Spot(name, hold)


@contextmanager
def hold_optimizers(around: Around) -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(lambda *_: around(lambda: None, ()))
    try:
        yield
    finally:
        handle.remove()


def action(text: str) -> Spot:
    """An action of a step, of training or of evaluation: "B1.0" is B of stage 1 and microbatch 0. Raises `ZbfxError`
    for what is none."""
    asked = Action.parse(text)
    return place(str(asked), RankRunner, "compute", lambda _, __, ___, passed: passed == asked)


def every(kind: Kind) -> Spot:
    """Every F, every B or every W (`zbfx.Kind`) of the ranks in this process."""
    return place(
        f"every {kind}", RankRunner, "compute", lambda _, __, ___, passed: passed is not None and passed.kind is kind
    )


def is_sent(channels: Channels, _: Any, source: int, __: int) -> bool:
    return source == channels.rank


SEND = place("send", Channels, "transfer", is_sent)  # a tensor to another process
BATCH = place("batch", Engine, "with_data")  # a batch that was cut into microbatches
OPTIMIZER = Spot("optimizer", hold_optimizers)  # before the step of an optimizer of torch
SAVE = place("save", FileSystemWriter, "write_data")  # the tensors of a checkpoint, onto the disk
BIND = place("bind", zbfx.runtime.bind, "prepare")  # while other ranks wait in bind
COMPILE = place("compile", zbfx.pipeline, "fit")  # while other ranks wait in compile
