"""What a model makes of sizes alone is known while it is traced; nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbfx
from tests.support.models import squares
from zbfx._torch.operators import ATTENTION
from zbfx.plan import Kind

Branch = Callable[[Tensor], bool]


class Branching(nn.Module):
    """Takes the tanh of its layer or not, as `decide` says of its input."""

    def __init__(self, decide: Branch) -> None:
        super().__init__()
        self.layer, self.decide = nn.Linear(4, 4), decide
        self.register_buffer("places", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() if self.decide(x) else self.layer(x)


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0)


def of_positions(x: Tensor) -> bool:
    return bool((positions(x).diff() == 1).all())


def of_written_positions(x: Tensor) -> bool:
    made = positions(x)
    made[:, 1:].fill_(7)  # a view shares memory with what it is a view of
    return bool(made[0, 3] == 7) and made.sum().item() == 21


def of_a_count(x: Tensor) -> bool:
    return int(torch.ones(3, dtype=torch.long).sum()) + torch.full((2,), 3)[1].item() == 6


def within_a_checkpointed_part(x: Tensor) -> bool:
    """Asked again where the backward computes the part again."""
    found: Tensor = checkpoint(lambda x: x * 2 if of_positions(x) else x.exp().detach(), x, use_reentrant=False)
    return found is not None


KNOWN: list[Branch] = [of_positions, of_written_positions, of_a_count, within_a_checkpointed_part]


@pytest.mark.parametrize("decide", KNOWN)
def test_a_branch_on_sizes_is_the_branch_of_eager(decide: Branch) -> None:
    torch.manual_seed(0)
    model, x = Branching(decide).double(), torch.randn(4, 4, dtype=torch.float64)
    step = zbfx.compile(model, stages=2, microbatches=2, example_inputs=(x[:2],), loss_fn=squares).run_local()
    loss = step(x)
    expected = sum(squares(model(part)) for part in x.chunk(2)) / 2
    assert decide(x)
    assert torch.equal(loss, expected.detach())  # type: ignore[union-attr]


def of_the_input(x: Tensor) -> bool:
    return bool((positions(x) < x.argmax()).all())


def of_an_overwritten_part(x: Tensor) -> bool:
    made = positions(x)
    made[0, 1:].copy_(x[0, 1:].long())
    return bool(made[0, 1] == 1)


def of_a_buffer_of_the_same_values(x: Tensor) -> bool:
    return bool((x.new_zeros(4).long() + 1).sum() == 4) and bool(torch.randint(0, 2, (1,)) == 0)


def of_memory_that_nothing_wrote(x: Tensor) -> bool:
    return bool(torch.empty_like(positions(x)).sum() >= 0)


DRAWN = torch.library.Library("zbfx_tests", "FRAGMENT")
DRAWN.define("drawn(Tensor places) -> Tensor")
torch.library.impl(DRAWN, "drawn", "CompositeExplicitAutograd")(lambda places: torch.randint_like(places, 9))


def of_an_operator_of_the_users(x: Tensor) -> bool:
    return bool(torch.ops.zbfx_tests.drawn(positions(x)).sum() >= 0)


UNKNOWN: list[Branch] = [
    of_the_input,
    of_an_overwritten_part,
    of_a_buffer_of_the_same_values,
    of_memory_that_nothing_wrote,
    of_an_operator_of_the_users,
]


@pytest.mark.parametrize("decide", UNKNOWN)
def test_a_branch_on_anything_else_is_refused(decide: Branch) -> None:
    with pytest.raises(zbfx.TraceError, match=r"test_known_values\.py"):
        zbfx.compile(Branching(decide), stages=1, microbatches=2, example_inputs=(torch.randn(2, 4),), loss_fn=squares)


def test_nothing_large_is_computed() -> None:
    """Masks of a long sequence would take 64 GiB: as truth values, and as the float32 that a mask is filled with."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(2**18)
            mask = places[:, None] <= places[None]
            filled = torch.full((2**17, 2**17), float("-inf")).triu(1)
            return self.layer(x) * mask[0, 0] + filled[0, 0].exp()

    with torch.device("meta"):
        model, x = Masked(), torch.empty(2, 4)
    pipe = zbfx.compile(model, stages=1, microbatches=2, example_inputs=(x,), loss_fn=squares)
    assert pipe.schedule.name


@pytest.mark.transformers
def test_models_of_transformers_make_no_mask_where_eager_makes_none() -> None:
    """The causal kernel, and keys that are not repeated for every head, as plain PyTorch runs them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, use_cache=False,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config).double(), torch.randint(0, 32, (4, 6))
    batch = {"input_ids": ids, "labels": ids}
    pipe = zbfx.compile(
        model, stages=2, microbatches=2, example_kwargs={name: value[:2] for name, value in batch.items()}
    )
    nodes = [node for stage in pipe.stages for node in stage.phases[Kind.F].module.graph.nodes]
    attention = [node for node in nodes if node.target in ATTENTION]
    assert [(node.args[4], node.kwargs.get("attn_mask")) for node in attention] == [(True, None)] * 2
    assert [node.args[1].meta["val"].shape[1] for node in attention] == [2, 2]
    loss = pipe.run_local()(**batch)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected = sum(
        model(**{name: value[part] for name, value in batch.items()}).loss / 2 for part in (slice(2), slice(2, 4))
    )
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-13)
