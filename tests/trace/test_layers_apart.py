"""Models whose layers look alike and do more than a record of operators shows, or less alike things than it seems: the
graph is that of tracing each layer, whether layers are traced once or not."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import numbers
from tests.support.traces import joints, stamped, told

LAYERS, WIDTH = 7, 4


class Layer(nn.Module):
    """What each test changes: `act(layer, x, *others)` makes the results."""

    scale: Tensor

    def __init__(self, act: Callable[..., Any], index: int, shared: Any) -> None:
        super().__init__()
        self.act, self.index, self.shared = act, index, shared
        self.up, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.act(self, self.drop(self.up(x)), *others)


class Stack(nn.Module):
    """`run(stack, x)` calls the layers."""

    layers: Any

    def __init__(self, act: Callable[..., Any], run: Callable[[Any, Tensor], Tensor], shared: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(act, index, shared) for index in range(LAYERS))
        self.others = nn.ModuleList(Layer(act, LAYERS + index, shared) for index in range(2))  # too few to be shared
        self.run, self.shared = run, shared

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def sine(layer: Layer, x: Tensor) -> Tensor:
    return x.sin()


def one_by_one(stack: Any, x: Tensor) -> Tensor:
    for layer in stack.layers:
        x = layer(x)
    return x


def stack(act: Callable[..., Any] = sine, run: Callable[[Any, Tensor], Tensor] = one_by_one) -> Stack:
    """A stack whose layers have one object in common."""
    return Stack(act, run, SimpleNamespace(count=0, at=None))


def square(output: Tensor) -> Tensor:
    return output.square().mean()


# Results that share memory.


def with_a_view_of_its_argument() -> nn.Module:
    def run(stack: Any, x: Tensor) -> Tensor:
        for layer in stack.layers:
            x = x * 1.0
            y, view = layer(x * 2.0, x)
            view.mul_(2.0)
            x = x + y
        return x

    return stack(lambda layer, y, x: (y.sin(), x.view(-1)), run)


def with_a_view_of_its_buffer() -> nn.Module:
    def run(stack: Any, x: Tensor) -> Tensor:
        for layer in stack.layers:
            x, view = layer(x)
            x = x * (view * 2.0)
        return x

    return stack(lambda layer, x: (x.sin(), layer.scale[:]), run)


def with_results_of_one_memory() -> nn.Module:
    def run(stack: Any, x: Tensor) -> Tensor:
        for layer in stack.layers:
            left, right = layer(x)
            left.mul_(2.0)
            x = torch.cat((left, right), 1)
        return x

    def act(layer: Layer, x: Tensor) -> Any:
        y = x.sin() + 1.0
        return y[:, :3], y[:, 2:3]

    return stack(act, run)


def with_results_that_are_written() -> nn.Module:
    def run(stack: Any, x: Tensor) -> Tensor:
        for layer in stack.layers:
            x = layer(x)
            x.mul_(2.0)
        return x

    return stack(run=run)


def with_arguments_that_are_written_later() -> nn.Module:
    def run(stack: Any, x: Tensor) -> Tensor:
        gate = torch.ones_like(x)
        for layer in stack.layers:
            x = layer(x, gate)
            gate.add_(1.0)
        return x

    return stack(lambda layer, x, gate: x.sin() + gate, run)


# What Python keeps.


def with_a_count_that_other_layers_read() -> nn.Module:
    def act(layer: Layer, x: Tensor) -> Tensor:
        if layer.index < LAYERS:
            layer.shared.count = layer.shared.count % LAYERS + 1
            return x.sin()
        return x * (1.0 + layer.shared.count)

    def run(stack: Any, x: Tensor) -> Tensor:
        stack.shared.count = 0
        for layer in (*stack.layers[:3], stack.others[0], *stack.layers[3:], stack.others[1]):
            x = layer(x)
        stack.shared.count = 0
        return x

    return stack(act, run)


class Counting:
    """Counts calls in its class."""

    count = 0

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        type(self).count += 1
        return x.sin() if layer.index < LAYERS else x * type(self).count

    @classmethod
    def run(cls, stack: Any, x: Tensor) -> Tensor:
        cls.count = 0
        for layer in (*stack.layers, *stack.others):
            x = layer(x)
        cls.count = 0
        return x


def with_a_count_in_a_class() -> nn.Module:
    return stack(Counting(), Counting.run)


def with_a_count_of_itertools() -> nn.Module:
    def act(layer: Layer, x: Tensor) -> Tensor:
        turn = next(layer.shared.at)
        return x.sin() if layer.index < LAYERS else x * turn

    def run(stack: Any, x: Tensor) -> Tensor:
        stack.shared.at = itertools.count()
        for layer in (*stack.layers, *stack.others):
            x = layer(x)
        stack.shared.at = None
        return x

    return stack(act, run)


def with_a_flag_that_the_first_forward_leaves() -> nn.Module:
    def run(stack: Any, x: Tensor) -> Tensor:
        y = one_by_one(stack, x)
        stack.shared.count = 1
        return y

    return stack(lambda layer, x: x.sin() if layer.shared.count else x.cos(), run)


def with_attributes_of_results() -> nn.Module:
    def act(layer: Layer, x: Tensor) -> Tensor:
        y: Any = x.sin()
        y.weight = 2.0
        return y

    def run(stack: Any, x: Tensor) -> Tensor:
        for layer in stack.layers:
            x = layer(x)
        return x * getattr(x, "weight", 1.0)

    return stack(act, run)


def with_a_dict_that_layers_write() -> nn.Module:
    def act(layer: Layer, x: Tensor, state: Any) -> Tensor:
        state["turn"] = 1 - state["turn"]
        return x.sin()

    def run(stack: Any, x: Tensor) -> Tensor:
        state = {"turn": 0}
        for layer in stack.layers:
            x = layer(x, state)
        return x * (1.0 + state["turn"])

    return stack(act, run)


class Cache:
    """Keys by layer, appended to."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def append(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        return self.keys[-1]


def with_a_cache() -> nn.Module:
    def run(stack: Any, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in stack.layers:
            x = layer(x, cache)
        return x + sum(cache.keys)

    return stack(lambda layer, x, cache: cache.append(x.sin()) * 2.0, run)


# Calls of layers.


def with_layers_that_call_layers() -> nn.Module:
    def act(layer: Layer, x: Tensor) -> Tensor:
        return layer.shared.at[0](x) if layer.index == 2 else x.sin()

    model = stack(act)
    model.shared.at = (model.layers[3],)
    return model


def with_a_look_at_signatures() -> nn.Module:
    def run(stack: Any, x: Tensor) -> Tensor:
        for layer in stack.layers:
            names = list(inspect.signature(layer.forward).parameters)
            x = layer(x) * (2.0 if names[0] == "x" else 3.0)
        return x

    return stack(run=run)


def backwards() -> nn.Module:
    def run(stack: Any, x: Tensor) -> Tensor:
        for layer in reversed(stack.layers):
            x = layer(x)
        return x

    return stack(run=run)


def with_another_layer_that_reads_an_argument() -> nn.Module:
    """The gradient of what the third layer is given is a sum, of which that layer makes two parts."""

    def act(layer: Layer, y: Tensor, x: Tensor) -> Tensor:
        return y.sin() + x * (layer.shared.at if layer.index == LAYERS - 1 else 2.0)

    def run(stack: Any, x: Tensor) -> Tensor:
        for layer in stack.layers:
            stack.shared.at = x if layer.index == 2 else stack.shared.at
            x = layer(x, x)
        stack.shared.at = None
        return x

    return stack(act, run)


# One layer is another: the others are traced once.


def drops(layer: Any) -> None:
    layer.drop.p = 0.5


def evaluates(layer: Any) -> None:
    layer.drop.p = 0.5
    layer.eval()


def is_fixed(layer: Any) -> None:
    layer.up.weight.requires_grad_(False)


def is_hooked(layer: Any) -> None:
    layer.up.register_forward_hook(lambda module, args, output: output * 2.0)


def is_hooked_in_its_backward(layer: Any) -> None:
    layer.up.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2.0,))


class Adapted(nn.Module):
    """A product of two small weights is added to that of a fixed one."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


def is_adapted(layer: Any) -> None:
    layer.up = Adapted(layer.up)


def is_checkpointed(layer: Any) -> None:
    layer.act = lambda layer, x: checkpoint(torch.sin, x, use_reentrant=False)


def is_in_bfloat16(layer: Any) -> None:
    def act(layer: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: Tensor = layer.up(x).float()
        return found

    layer.act = act


def writes(layer: Any) -> None:
    def act(layer: Any, x: Tensor) -> Tensor:
        layer.scale.mul_(1.25)
        return x * layer.scale

    layer.act = act


def is_scaled(layer: Any) -> None:
    layer.act = lambda layer, x: x.sin() * layer.index


OTHERS = LAYERS - 2  # the input of the first one needs no gradient
CHANGES = {
    drops: OTHERS,
    evaluates: OTHERS + 1,
    is_fixed: OTHERS,
    is_hooked: OTHERS,
    is_hooked_in_its_backward: 0,
    is_adapted: OTHERS,
    is_checkpointed: OTHERS,
    is_in_bfloat16: OTHERS,
    writes: OTHERS,
    is_scaled: OTHERS,
}
MODELS = {
    with_a_view_of_its_argument: 0,
    with_a_view_of_its_buffer: 0,
    with_results_of_one_memory: 0,
    with_results_that_are_written: 0,
    with_arguments_that_are_written_later: 0,
    with_a_count_that_other_layers_read: 0,
    with_a_count_in_a_class: 0,
    with_a_count_of_itertools: 0,
    with_a_flag_that_the_first_forward_leaves: 0,
    with_attributes_of_results: 0,
    with_a_dict_that_layers_write: 0,
    with_a_cache: 0,
    with_layers_that_call_layers: LAYERS - 3,
    with_another_layer_that_reads_an_argument: LAYERS - 3,
    with_a_look_at_signatures: OTHERS + 1,
    backwards: OTHERS + 1,
}


@pytest.mark.parametrize(("make", "count"), MODELS.items(), ids=[make.__name__ for make in MODELS])
def test_models_that_do_more_than_operators(make: Callable[[], nn.Module], count: int) -> None:
    shared, whole = joints(make(), (numbers(3, WIDTH),), loss=square)
    assert told(shared) == told(whole)
    assert (stamped(shared), stamped(whole)) == (count, 0)
    assert count > OTHERS or "traced each by itself" in str(shared.notes)


@pytest.mark.parametrize(("change", "count"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
def test_one_layer_is_another(change: Callable[[Any], None], count: int) -> None:
    model = stack()
    change(model.layers[LAYERS - 1])
    shared, whole = joints(model, (numbers(3, WIDTH),), loss=square)
    assert told(shared) == told(whole)
    assert (stamped(shared), stamped(whole)) == (count, 0)
