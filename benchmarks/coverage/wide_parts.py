"""Parts of the models of `fuzz_wide.py`: what a forward or a backward does beside arithmetic.

Every part takes a tensor of shape (rows, length, WIDTH) and gives another one. `PARTS` are computed as plain PyTorch
computes them, `REFUSED` are refused with these words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.coverage.random_models import DOUBLE, WIDTH, linear

Note = Callable[[Tensor, Tensor], object]  # what a backward does with a buffer and its gradient


class Noting(torch.autograd.Function):
    """Doubles; its backward notes its gradient in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, note: Note) -> Tensor:
        ctx.buffer, ctx.note = buffer, note  # saved for backward, a buffer could not be written at two places
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.note(ctx.buffer, gradient)
        return gradient * 2, None, None


class Saving(torch.autograd.Function):
    """Keeps the largest entry of its gradient in a tensor that it saved for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(buffer)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors[0].copy_(gradient.abs().amax())
        return gradient * 2, None


class Shaken(torch.autograd.Function):
    """Adds noise to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1.5 + torch.rand_like(gradient))


class Part(nn.Module):
    """A layer, and buffers to write into."""

    amax: Tensor
    history: Tensor
    steps: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("amax", torch.zeros(2, dtype=DOUBLE))
        self.register_buffer("history", torch.zeros(4, dtype=DOUBLE))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("count", torch.zeros(()))


class Body(Part):
    """Computes `body(self, x)`. Bodies are functions of a file, so that models can be copied and started elsewhere."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


# Writes in the forward.


def last_seen(self: Part, x: Tensor) -> Tensor:
    self.amax.copy_(x.detach().abs().amax())
    return self.layer(x)


def averaged(self: Part, x: Tensor) -> Tensor:
    """The order of the microbatches shows in the buffer, and the buffer in the loss."""
    self.amax.mul_(0.5).add_(x.detach().mean())
    return self.layer(x) * (1 + self.amax[0].tanh()).to(x.dtype)


def rolled(self: Part, x: Tensor) -> Tensor:
    """A history of delayed scaling: what was largest in the last four microbatches."""
    scale = 1 + self.history.max().to(x.dtype)
    self.history.copy_(self.history.roll(1))
    self.history[0] = x.detach().abs().amax()
    return self.layer(x / scale)


def replaced(self: Part, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return self.layer(x) / self.count.to(x.dtype).sqrt()


def counted(self: Part, x: Tensor) -> Tensor:
    self.steps += 1
    return torch.tanh(self.layer(x)) * (0.5 ** self.steps.to(x.dtype))


def written_after_it_is_read(self: Part, x: Tensor) -> Tensor:
    y = self.layer(x) + self.history.to(x.dtype)
    self.history.lerp_(y.detach().mean((0, 1)).to(self.history.dtype), 0.3)
    return y


# Writes in the backward.


def notes(note: Note) -> Callable[[Part, Tensor], Tensor]:
    return lambda self, x: Noting.apply(self.layer(x), self.amax, note)


def note_largest(buffer: Tensor, gradient: Tensor) -> None:
    buffer.copy_(gradient.abs().amax())


def note_average(buffer: Tensor, gradient: Tensor) -> None:
    buffer.mul_(0.9).add_(gradient.sum())


def backward_copies(self: Part, x: Tensor) -> Tensor:
    return Noting.apply(self.layer(x), self.amax, note_largest)


def backward_averages(self: Part, x: Tensor) -> Tensor:
    return self.layer(Noting.apply(x, self.amax, note_average))


def note_count(buffer: Tensor, gradient: Tensor) -> None:
    buffer.add_(1)


def backward_counts(self: Part, x: Tensor) -> Tensor:
    return Noting.apply(torch.tanh(self.layer(x)), self.steps, note_count)


def backward_writes_an_entry(self: Part, x: Tensor) -> Tensor:
    return Noting.apply(self.layer(x), self.history[1:3], note_average)


def backward_saves(self: Part, x: Tensor) -> Tensor:
    return Saving.apply(self.layer(x), self.amax)


def backward_scales_by_history(self: Part, x: Tensor) -> Tensor:
    """Its gradient depends on the gradients of the microbatches before."""

    def note(buffer: Tensor, gradient: Tensor) -> None:
        largest = gradient.abs().amax()
        gradient.mul_(1 / (1 + buffer[0]).to(gradient.dtype))
        buffer.copy_(largest)

    return Noting.apply(self.layer(x), self.amax, note)


def backward_keeps_a_forward_value(self: Part, x: Tensor) -> Tensor:
    seen = x.detach().abs().amax()
    return Noting.apply(self.layer(x), self.amax, lambda buffer, gradient: buffer.copy_(seen))


def backward_draws(self: Part, x: Tensor) -> Tensor:
    return Shaken.apply(self.layer(x))


# Hooks on tensors.


def hook_halves(self: Part, x: Tensor) -> Tensor:
    x = torch.tanh(self.layer(x))
    x.register_hook(lambda gradient: gradient * 0.5)
    return x


def hook_clips(self: Part, x: Tensor) -> Tensor:
    x = self.layer(x)
    x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return torch.tanh(x)


def hook_writes(self: Part, x: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> None:
        self.amax.mul_(0.9).add_(gradient.abs().amax())

    x = torch.tanh(self.layer(x))
    x.register_hook(hook)
    return x


def hook_replaces(self: Part, x: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> None:
        self.amax = 0.9 * self.amax + gradient.sum()

    x = torch.tanh(self.layer(x))
    x.register_hook(hook)
    return x


def hook_on_a_weight(self: Part, x: Tensor) -> Tensor:
    """What the buffer holds weighs a parameter's gradient alone: it is read in what would be a W."""
    weight = self.layer.weight * 1.0
    if weight.requires_grad:
        weight.register_hook(lambda gradient: gradient * (1 + self.history.mul_(0.5).add_(gradient.mean()).sum()))
    return F.linear(x, weight)


# Random numbers.


def dropped(self: Part, x: Tensor) -> Tensor:
    return F.dropout(self.layer(x), 0.4, self.training)


def dropped_twice(self: Part, x: Tensor) -> Tensor:
    return F.dropout(x, 0.3, self.training) + F.dropout(self.layer(x), 0.3, self.training)


def noisy(self: Part, x: Tensor) -> Tensor:
    return self.layer(x + 0.1 * torch.randn_like(x))


def gated_at_random(self: Part, x: Tensor) -> Tensor:
    return self.layer(x) * torch.bernoulli(torch.full_like(x[:, :, :1], 0.6))


def shuffled(self: Part, x: Tensor) -> Tensor:
    return self.layer(x)[..., torch.randperm(WIDTH)]


def attention_with_dropout(self: Part, x: Tensor) -> Tensor:
    y = self.layer(x)[:, None]
    return F.scaled_dot_product_attention(y, x[:, None], y, dropout_p=0.3 if self.training else 0.0)[:, 0]


def drawn_into_a_buffer(self: Part, x: Tensor) -> Tensor:
    """A buffer that follows what was drawn."""
    noise = torch.rand(2, dtype=self.amax.dtype)
    self.amax.lerp_(noise, 0.5)
    return self.layer(x) * (1 + self.amax.sum().to(x.dtype))


# Checkpointed parts over parameters.


def again(body: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """The body, computed once more in the backward."""

    def checkpointed(self: Any, x: Tensor) -> Tensor:
        return checkpoint(body, self, x, use_reentrant=False)

    return checkpointed


def normalised_weight(self: Part, x: Tensor) -> Tensor:
    return F.linear(x, self.layer.weight / self.layer.weight.norm(dim=1, keepdim=True), self.layer.bias)


def clipped_weight(self: Part, x: Tensor) -> Tensor:
    return F.linear(x, self.layer.weight.clamp(-0.3, 0.3))


def weight_written_in_place(self: Part, x: Tensor) -> Tensor:
    weight = self.layer.weight * 2
    weight += 1
    weight[0] = 0.5
    return F.linear(x, weight) / 4


def weight_of_a_row(self: Part, x: Tensor) -> Tensor:
    weight = self.layer.weight.clone()
    weight[1].mul_(self.layer.bias)
    return torch.tanh(F.linear(x, weight))


# Dtypes.


def through_bfloat16(self: Part, x: Tensor) -> Tensor:
    weight, bias = self.layer.weight.bfloat16(), self.layer.bias.bfloat16()
    return F.linear(x.bfloat16(), weight, bias).to(x.dtype)


def autocast_inside(self: Part, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = F.linear(x.float(), self.layer.weight.float(), self.layer.bias.float())
    return y.to(x.dtype)


def autocast_off_inside(self: Part, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


def table_of_the_default_dtype(self: Part, x: Tensor) -> Tensor:
    return self.layer(x) + torch.linspace(0.1, 1.3, WIDTH).to(x.dtype)


def integers_between(self: Part, x: Tensor) -> Tensor:
    chosen = x.argmax(-1)
    return self.layer(x) + F.one_hot(chosen, WIDTH).to(x.dtype)


def complex_between(self: Part, x: Tensor) -> Tensor:
    y = torch.complex(x.double(), self.layer(x).double())
    return (y * y.conj().roll(1, -1)).real.to(x.dtype)


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    body.__name__.replace("_", " "): body
    for body in (
        last_seen,
        averaged,
        rolled,
        replaced,
        counted,
        written_after_it_is_read,
        backward_copies,
        backward_averages,
        backward_counts,
        backward_writes_an_entry,
        backward_saves,
        backward_scales_by_history,
        backward_keeps_a_forward_value,
        backward_draws,
        hook_halves,
        hook_clips,
        hook_writes,
        hook_replaces,
        hook_on_a_weight,
        dropped,
        dropped_twice,
        noisy,
        gated_at_random,
        shuffled,
        attention_with_dropout,
        drawn_into_a_buffer,
        normalised_weight,
        clipped_weight,
        weight_written_in_place,
        weight_of_a_row,
        through_bfloat16,
        autocast_inside,
        autocast_off_inside,
        table_of_the_default_dtype,
        integers_between,
        complex_between,
    )
}
# These write in their forward: what they do in a checkpointed part, they do once for each microbatch (README, Limits).
WRITE_IN_FORWARD = {"last seen", "averaged", "rolled", "replaced", "counted", "written after it is read"} | {
    "drawn into a buffer"
}


# Hooks on modules.


class Hooked(Part):
    """A layer with a hook of the module."""

    def __init__(self, register: str, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.layer.register_buffer("size", torch.zeros((), dtype=DOUBLE))
        getattr(self.layer, register)(hook)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def adds_to_its_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.5 + 0.1


def changes_its_input(module: nn.Module, args: Any) -> tuple[Tensor]:
    return (args[0] * 0.5,)


def follows_its_output(module: nn.Module, args: Any, output: Tensor) -> None:
    module.get_buffer("size").lerp_(output.detach().mean().to(module.get_buffer("size").dtype), 0.3)


def follows_its_gradient(module: nn.Module, *gradients: Any) -> None:
    module.get_buffer("size").mul_(0.5).add_(gradients[-1][0].sum())


def scales_its_gradient(module: nn.Module, given: Any, found: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.7 for gradient in given)


def scales_what_comes(module: nn.Module, found: Any) -> Any:
    return tuple(gradient * 1.3 for gradient in found)


HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "forward hook": ("register_forward_hook", adds_to_its_output),
    "forward pre-hook": ("register_forward_pre_hook", changes_its_input),
    "forward hook that writes": ("register_forward_hook", follows_its_output),
    "backward hook that writes": ("register_full_backward_hook", follows_its_gradient),
    "backward pre-hook that writes": ("register_full_backward_pre_hook", follows_its_gradient),
    "backward hook": ("register_full_backward_hook", scales_its_gradient),
    "backward pre-hook": ("register_full_backward_pre_hook", scales_what_comes),
}


def spectral() -> nn.Module:
    """Writes the vectors of its power iteration in each forward."""
    return nn.utils.parametrizations.spectral_norm(linear())


PARTS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda body=body: Body(body) for name, body in BODIES.items()},  # type: ignore[misc]
    **{name: lambda hook=hook: Hooked(*hook) for name, hook in HOOKS.items()},  # type: ignore[misc]
    "spectral norm": spectral,
}
WRITE_IN_FORWARD |= {"forward hook that writes", "spectral norm", "batch norm", "moving mean"}


# What no pipeline can do. The words are those of the refusal.

KEPT: list[Any] = []


def decides(self: Part, x: Tensor) -> Tensor:
    return self.layer(x) if x.sum() > 0 else x


def looks(self: Part, x: Tensor) -> Tensor:
    x = torch.tanh(self.layer(x))
    x.register_hook(lambda gradient: KEPT.append(gradient.shape))
    return x


def keeps(self: Part, x: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> Tensor:
        KEPT.append(gradient.detach())
        return gradient

    x = torch.tanh(self.layer(x))
    x.register_hook(hook)
    return x


def reads_what_its_backward_writes(self: Part, x: Tensor) -> Tensor:
    return Noting.apply(self.layer(x) * (1 + self.amax[0]).to(x.dtype), self.amax, note_largest)


def writes_a_parameter(self: Part, x: Tensor) -> Tensor:
    return Noting.apply(self.layer(x), self.amax, lambda buffer, gradient: self.layer.bias.data.mul_(0.5))


def draws_from_a_generator(self: Part, x: Tensor) -> Tensor:
    return self.layer(x) + torch.rand(WIDTH, generator=torch.Generator().manual_seed(3)).to(x.dtype)


def recomputes_by_reentry(self: Part, x: Tensor) -> Tensor:
    return checkpoint(self.layer, torch.tanh(self.layer(x)), use_reentrant=True)


def differentiates(self: Part, x: Tensor) -> Tensor:
    y = self.layer(x)
    y.sum().backward(retain_graph=True)
    return y


def gradient_hook_on_a_parameter(part: Part) -> None:
    part.layer.weight.register_hook(lambda gradient: gradient * 2)


def hook_after_accumulation(part: Part) -> None:
    part.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor] | None, Callable[[Part], None] | None, str]] = {
    "decides": (decides, None, "the model decides by a tensor's value"),
    "looks": (looks, None, "a hook on gradients, at"),
    "keeps": (keeps, None, "outside of the graph, in a hook or in the backward|a hook on gradients, at"),
    "reads what its backward writes": (reads_what_its_backward_writes, None, "the backward writes into .*amax, at"),
    "writes a parameter": (writes_a_parameter, None, "writes in place into (the|a) parameter"),
    "draws from a generator": (draws_from_a_generator, None, r"torch\.Generator"),
    "recomputes by reentry": (recomputes_by_reentry, None, "use_reentrant=True"),
    "differentiates": (differentiates, None, r"backward of its own"),
    "gradient hook on a parameter": (None, gradient_hook_on_a_parameter, "found hooks on the gradients of"),
    "hook after accumulation": (None, hook_after_accumulation, "found hooks on the gradients of"),
}


def refused(kind: str) -> nn.Module:
    body, change, _ = REFUSED[kind]
    part = Body(body or normalised_weight)
    if change is not None:
        change(part)
    return part
