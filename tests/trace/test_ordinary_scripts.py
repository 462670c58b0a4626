"""What training scripts keep beside a model, by code that no forward, loss or hook reaches, changes freely; what that
code reads does not. Each case changes something after the guard was made: it holds, or names what has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbfx import InputError
from zbfx.trace.guard import Guard

loss = mean = best = 0.0
config = {"smoothing": 0.1, "seen": 0}
losses: list[float] = []


class Net(nn.Module):
    """With records that only its training methods read, and settings that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.history, self.stats, self.last = nn.Linear(2, 2), [0.0], {"best": 1.0}, 0.0
        self.flags, self.scales = {"tanh": True, "unread": 0}, [1.0, 2.0]
        self.logged: dict[str, float] = {}
        self.nested: dict[str, Any] = {"logs": {}, "scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        self.stats["rows"] = len(x)
        self.nested["logs"]["rows"] = len(x)
        x = self.layer(x) * self.scales[0] * self.nested["scale"]
        return self.scaled(torch.tanh(x) if "tanh" in self.flags else x).log()

    def scaled(self, x: Tensor) -> Tensor:
        return x * getattr(self, "factor", 1.0)

    def log(self, key: str, value: float) -> None:
        self.logged[key] = value

    def fit(self) -> float:
        global best
        best = min(best, -1.0)
        losses.append(self.last)
        self.history.append(sum(self.history))
        self.last += 1.0
        self.stats["best"] = min(self.stats.values())
        self.log("loss", self.last)
        return self.history[-1]


class Trainer:
    def __init__(self) -> None:
        self.smoothing, self.log = 0.1, [0.0]
        self.metrics: dict[str, Any] = {"lr": 0.1}

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        found = F.cross_entropy(out.softmax(-1).log(), target, label_smoothing=self.smoothing)
        self.metrics["ce"] = found.detach()
        self.metrics.update(rows=len(out))
        return found


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.meter = {"n": 0}

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target)

    def update(self) -> None:
        self.meter["n"] += 1


class Raising:
    """As a proxy of a context that is not there."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not ready")


proxy: Any = Raising()


def of_names(out: Tensor, target: Tensor) -> Tensor:
    found = {"loss": F.cross_entropy(out, target, reduction="none").mean()}
    return found["loss"]


def of_config(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target, label_smoothing=config["smoothing"])


def put(owner: Any, key: Any, value: Any) -> None:
    owner[key] = value


def writing_hook() -> tuple[nn.Module, dict[str, int]]:
    net, found = Net(), {"n": 0}

    def hook(*_: Any) -> None:
        found["n"] = found.get("n", 0)

    net.layer.register_forward_hook(hook)
    return net, found


Case = tuple[Callable[[], tuple[nn.Module, Any]], Callable[[Any, Any], Any]]
FREE: dict[str, Case] = {
    "a method that trains": (lambda: (Net(), of_names), lambda net, _: net.fit()),
    "a global named in a text": (lambda: (Net(), of_names), lambda *_: put(globals(), "loss", 1.0)),
    "a global named as a method": (lambda: (Net(), of_names), lambda *_: put(globals(), "mean", mean + 1.0)),
    "another key": (lambda: (Net(), of_config), lambda *_: put(config, "seen", config["seen"] + 1)),
    "written by the loss": (
        lambda: (Net(), Trainer().loss),
        lambda _, loss_fn: put(loss_fn.__self__.metrics, "lr", 0.05),
    ),
    "named as a method": (lambda: (Net(), Trainer().loss), lambda _, loss_fn: loss_fn.__self__.log.append(1.0)),
    "a meter of the loss": (lambda: (Net(), Criterion()), lambda _, loss_fn: loss_fn.update()),
    "written at a key": (lambda: (Net(), of_names), lambda net, _: put(net.stats, "rows", 3)),
    "written in a table of a table": (lambda: (Net(), of_names), lambda net, _: put(net.nested["logs"], "rows", 3)),
    "another place": (lambda: (Net(), of_names), lambda net, _: put(net.scales, 1, 3.0)),
}
REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], Callable[[Any, Any], Any], str]] = {
    "a key": (lambda: (Net(), of_config), lambda *_: put(config, "smoothing", config["smoothing"] + 0.1), "smoothing"),
    "a place": (lambda: (Net(), of_names), lambda net, _: put(net.scales, 0, 3.0), r"scales\[0\] was 1\.0"),
    "of a table": (lambda: (Net(), of_names), lambda net, _: put(net.nested, "scale", 3.0), r"nested\['scale'\]"),
    "keys": (
        lambda: (Net(), of_names),
        lambda net, _: put(net.flags, "relu", net.flags.pop("tanh")),
        r"flags\['tanh'\] was True",
    ),
    "an attribute of the loss": (
        lambda: (Net(), Trainer().loss),
        lambda _, loss_fn: setattr(loss_fn.__self__, "smoothing", 0.2),
        "smoothing was 0.1",
    ),
}


def guarded(made: tuple[nn.Module, Any], change: Callable[[nn.Module, Any], Any]) -> tuple[bool, Callable[[], Any]]:
    """Whether the quick look at the objects sees nothing new, and the look by name."""
    model, loss_fn = made
    guard = Guard.of(model, loss_fn)
    before = guard.reached.state()
    change(model, loss_fn)
    now = guard.reached.state()
    same = len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))
    return same, lambda: guard.check(model, loss_fn)


@pytest.mark.parametrize(("make", "change"), FREE.values(), ids=FREE.keys())
def test_what_only_training_reads_changes_freely(
    make: Callable[[], tuple[nn.Module, Any]], change: Callable[[nn.Module, Any], Any]
) -> None:
    same, check = guarded(make(), change)
    assert same  # nor is anything looked at by name
    check()


@pytest.mark.parametrize(("make", "change", "found"), REFUSED.values(), ids=REFUSED.keys())
def test_what_forward_and_loss_read_is_refused(
    make: Callable[[], tuple[nn.Module, Any]], change: Callable[[nn.Module, Any], Any], found: str
) -> None:
    same, check = guarded(make(), change)
    assert not same
    with pytest.raises(InputError, match=found):
        check()


def test_a_hook_that_writes_reads_the_key_that_it_gets() -> None:
    net, found = writing_hook()
    put_other = guarded((net, of_names), lambda *_: put(found, "loss 0", 1))
    assert put_other[0]
    put_other[1]()
    with pytest.raises(InputError, match=r"found\['n'\] was 0"):
        guarded((net, of_names), lambda *_: put(found, "n", 1))[1]()


def test_a_proxy_beside_the_model_is_not_asked() -> None:
    Guard.of(Net(), of_names)
