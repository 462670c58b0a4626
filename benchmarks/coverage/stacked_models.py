"""Random stacks of layers that look alike, for `same_traces.py`: what layers do beside arithmetic, what one of them
does otherwise than the others, and what the model does around them.

All choices come from a `random.Random`, so that a seed names a model. Choices are methods of `Stacked`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.coverage.random_models import DOUBLE, LAYERS, UNARY, WIDTH, linear
from benchmarks.coverage.wide_parts import BODIES, PARTS

ROWS, LENGTH = 2, 3
QUIET = ("linear", "block", "layer norm", "RMS norm", "attention", "PReLU", "convolution", "rotation")


def part_of(kind: str) -> nn.Module:
    if kind in PARTS:
        return PARTS[kind]()
    return LAYERS[kind]() if kind in LAYERS else Function(UNARY[kind])


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Unit(nn.Module):
    """A layer of the stack. `habit` is what it does beside its parts; `shared` an object that all units have."""

    out: Any
    table: Tensor

    def __init__(self, kinds: tuple[str, ...], index: int, habit: str, shared: Any) -> None:
        super().__init__()
        self.index, self.habit, self.shared, self.calls, self.scale = index, habit, shared, 0, 1.0
        self.parts = nn.ModuleList(map(part_of, kinds))
        self.out, self.drop = linear(), nn.Dropout(0.0)
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH, dtype=DOUBLE))

    def forward(self, x: Tensor, state: Any = None, gate: Any = None) -> Any:
        y = x
        for part in self.parts:
            y = part(y).to(x.dtype)
        y = self.drop(self.out(y)) * self.scale
        found: Tensor = x + y if gate is None else x + y * gate
        return getattr(self, self.habit, self.nothing)(x, found, state)

    def nothing(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y

    def counts(self, x: Tensor, y: Tensor, state: Any) -> Any:
        self.calls = 1 - self.calls
        return y

    def counts_for_all(self, x: Tensor, y: Tensor, state: Any) -> Any:
        self.shared.count = (self.shared.count + 1) % 6
        return y if self.index % 3 else y * (1.0 + self.shared.count)

    def reads_the_count(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y * (1.0 + self.shared.count)

    def keeps(self, x: Tensor, y: Tensor, state: Any) -> Any:
        self.shared.kept.append(y.tanh())
        return y

    def keeps_in_the_state(self, x: Tensor, y: Tensor, state: Any) -> Any:
        if state is not None:
            state["seen"] = y if state["seen"] is None else state["seen"] + y
        return y

    def turns_the_state(self, x: Tensor, y: Tensor, state: Any) -> Any:
        if state is not None:
            state["turn"] = 1 - state["turn"]
        return y

    def marks(self, x: Tensor, y: Tensor, state: Any) -> Any:
        marked: Any = y * 1.0
        marked.factor = 1.5
        return marked

    def writes(self, x: Tensor, y: Tensor, state: Any) -> Any:
        self.table.mul_(1.25)
        return y * self.table

    def writes_into_its_argument(self, x: Tensor, y: Tensor, state: Any) -> Any:
        x.mul_(1.5)
        return y + x

    def reads_its_table(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y * self.table

    def gives_two(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y, y.square().mean()

    def gives_a_view(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y, x.view(-1)

    def gives_its_table(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y, self.table[:]

    def gives_halves(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y[..., :], y[..., 1:]

    def gives_a_dict(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return {"y": y, "index": None, "x": x}

    def gives_its_index(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y, self.index

    def transposes(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y.transpose(1, 2).contiguous().transpose(1, 2)

    def by_index(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y.sin() if self.index % 2 else y

    def late_ones(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y if self.index < 3 else y.sin()

    def without_gradient(self, x: Tensor, y: Tensor, state: Any) -> Any:
        with torch.no_grad():
            shift = x.mean()
        return y - shift

    def hooks_its_gradient(self, x: Tensor, y: Tensor, state: Any) -> Any:
        z = y * 1.0
        z.register_hook(lambda gradient: gradient * 0.5)
        return z

    def recomputes(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return checkpoint(torch.tanh, y, use_reentrant=False)

    def constant(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y * torch.tensor(1.5, dtype=y.dtype)

    def positions(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y + torch.arange(LENGTH, device=x.device)[:, None]

    def calls_the_next(self, x: Tensor, y: Tensor, state: Any) -> Any:
        following = self.shared.units[self.index + 1 :][:1]
        return following[0](y) if following and self.index == 2 else y

    def detaches(self, x: Tensor, y: Tensor, state: Any) -> Any:
        return y + x.detach().tanh()


HABITS = [
    name for name, value in vars(Unit).items() if inspect.isfunction(value) and name not in ("__init__", "forward")
]


def otherwise(unit: Any, change: str, units: list[Any]) -> None:
    """Change one unit."""
    match change:
        case "evaluates":
            unit.eval()
        case "drops":
            unit.drop.p = 0.3
        case "is fixed":
            unit.requires_grad_(False)
        case "is partly fixed":
            unit.out.weight.requires_grad_(False)
        case "is tied":
            unit.out.weight = units[1].out.weight
        case "has a hook":
            unit.out.register_forward_hook(lambda module, args, output: output * 1.5)
        case "has a hook of its own":
            unit.register_forward_hook(lambda module, args, output: output)
        case "has a backward hook":
            unit.out.register_full_backward_hook(lambda module, given, found: (given[0] * 0.7,))
        case "scales":
            unit.scale = 1.0 + 1e-9
        case "is in bfloat16":
            unit.out = nn.Sequential(Cast(torch.bfloat16), linear().bfloat16(), Cast(DOUBLE))
        case "shares a buffer":
            unit.table = units[1].table


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


CHANGES = (
    *("evaluates", "drops", "is fixed", "is partly fixed", "is tied", "has a hook", "has a hook of its own"),
    *("has a backward hook", "scales", "is in bfloat16", "shares a buffer"),
)
ORDERS = ("", "", "", "", "reversed", "one twice", "skipping", "two towers", "checkpointed", "some without gradients")
AROUND = (
    *("", "", "", "writes results", "reads results twice", "hooks results", "signature", "autocast", "gate", "counts"),
    *("writes the table", "writes the state", "keeps all", "positions", "attribute", "state of tensors", "part alone"),
)


class Stacked(nn.Module):
    """A stack. Its choices are drawn from `random`."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        torch.manual_seed(random.randint(0, 99))
        self.shared = SimpleNamespace(count=0, kept=[], units=())
        quiet = random.random() < 0.6
        kinds = tuple(
            random.choice(QUIET if quiet else (*LAYERS, *UNARY, *BODIES, *PARTS)) for _ in range(random.randint(0, 2))
        )
        habit = random.choice(HABITS) if random.random() < 0.5 else "nothing"
        units = [Unit(kinds, index, habit, self.shared) for index in range(random.randint(5, 8))]
        while random.random() < 0.4:
            unit = random.choice(units)
            if random.random() < 0.4:
                unit.habit = random.choice(HABITS)
            else:
                otherwise(unit, random.choice(CHANGES), units)
        self.units, self.first = nn.ModuleList(units), linear()
        if random.random() < 0.3:  # others, which nothing stands for
            self.units.extend(Unit((), 10 + index, random.choice(HABITS), self.shared) for index in range(2))
        if random.random() < 0.3:
            self.shared.units = units
        self.order, self.around = random.choice(ORDERS), random.choice(AROUND)
        self.drops = random.random() < 0.2
        for unit in units:
            unit.drop.p = 0.1 if self.drops else unit.drop.p
        self.reads_first = random.random() < 0.7

    def told(self) -> str:
        return f"{self.order or 'in order'}, {self.around or 'nothing around'}, {[unit.habit for unit in self.units]}"

    def calls(self) -> list[Any]:
        units = list(self.units)
        match self.order:
            case "reversed":
                return units[::-1]
            case "one twice":
                return [*units, units[2]]
            case "skipping":
                return units[1:-1]
        return units

    def forward(self, x: Tensor) -> Tensor:
        self.shared.kept.clear()
        self.shared.count = 0
        x = self.first(x) if self.reads_first else x
        if self.order == "two towers":
            half = len(self.units) // 2
            left, right = x, x * 2.0
            for one, other in zip(self.units[:half], self.units[half:], strict=False):
                left, right = self.one(one, left), self.one(other, right)
            x = left + right
        else:
            for position, unit in enumerate(self.calls()):
                x = self.one(unit, x, position)
        for kept in self.shared.kept:
            x = x + kept
        self.shared.kept.clear()
        self.shared.count = 0
        return x

    def one(self, unit: Any, x: Tensor, position: int = 9) -> Tensor:
        around, gate = self.around, None
        state: dict[str, Any] | None = None
        before = x
        if around in ("state of tensors", "writes the state"):
            state = {"seen": None, "turn": position % 2}
        if around == "gate":
            gate = x.mean()
        context: Any = torch.autocast("cpu", dtype=torch.bfloat16) if around == "autocast" else nullcontext()
        if self.order == "some without gradients" and position < 2:
            context = torch.no_grad()
        with context:
            if self.order == "checkpointed" and position < 2:
                found = checkpoint(unit, x, use_reentrant=False)
            elif around == "positions":
                found = unit(x, gate=torch.arange(LENGTH, device=x.device)[:, None])
            else:
                found = unit(x, state, gate)
        side: Any = None
        if isinstance(found, tuple):
            found, side = found
        if isinstance(found, dict):
            found, side = found["y"], found["x"]
        x = found.to(DOUBLE)
        match around:
            case "writes results":
                x.mul_(1.5)
                if isinstance(side, Tensor) and side is not before and side.numel() > 1:
                    side.mul_(1.25)
                    x = x * 1.0
            case "reads results twice":
                x = x + before.tanh()
            case "hooks results":
                x = x * 1.0
                if x.requires_grad:
                    x.register_hook(lambda gradient: gradient * 0.5)
            case "signature":
                x = x * len(inspect.signature(unit.forward).parameters)
            case "counts":
                self.shared.count += 1
            case "writes the table":
                unit.table.add_(0.5)
            case "writes the state":
                x = x * (1.0 + (state["turn"] if state is not None else 0))
            case "keeps all":
                self.shared.kept.append(x.tanh())
            case "attribute":
                x = x * getattr(found, "factor", 1.0)
            case "state of tensors" if state is not None and state["seen"] is not None:
                x = x + state["seen"]
            case "part alone":
                x = x + unit.drop(unit.out(before))
        is_read = isinstance(side, Tensor) and (side.ndim == 0 or (side.shape == x.shape and self.drops))
        return x + side if is_read else x
