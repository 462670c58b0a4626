"""Layers that run the same are traced once: the graph is the one that tracing each of them gives, and code that might
make another one is traced whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbfx
from tests.support.models import Problem, numbers, squares
from tests.support.reference import assert_same, compiled, reference, stepped
from tests.support.traces import joints, stamped, told
from zbfx.errors import ZbfxError

Sizes = dict[str, Any]
LAYERS, WIDTH = 6, 4


class Layer(nn.Module):
    """A layer whose code each test changes: `rule(layer, x)` runs between its two products."""

    scale: Tensor

    def __init__(self, index: int, rule: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.index, self.rule, self.calls = index, rule, 0
        self.register_buffer("scale", torch.full((2 * WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.rule(self, self.up(x)))


class Stack(nn.Module):
    """Layers one after the other. The first one's input needs no gradient, so its backward is another."""

    layers: Any

    def __init__(self, rule: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(index, rule) for index in range(LAYERS))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * sum(tensor.mean() for tensor in self.kept) if self.kept else x


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def gelu(layer: Layer, x: Tensor) -> Tensor:
    return F.gelu(x) * layer.scale


def halves_without_gradient(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        shift = x.mean()
    return F.gelu(x) - shift


def every_second(layer: Layer, x: Tensor) -> Tensor:
    return F.gelu(x) if layer.index % 2 else torch.tanh(x)


@pytest.mark.parametrize(
    ("rule", "count"), [(gelu, LAYERS - 1), (halves_without_gradient, LAYERS - 1), (every_second, 0)]
)
def test_the_graph_is_that_of_the_whole(rule: Any, count: int) -> None:
    shared, whole = joints(Stack(rule), (numbers(4, WIDTH),), loss=mean_square)
    assert told(shared) == told(whole)
    assert (stamped(shared), stamped(whole)) == (count, 0)


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, num_hidden_layers=4, use_cache=False, **changes))


def gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops: Sizes = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ids: Sizes = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**ids, n_positions=16, n_embd=16, n_layer=4, n_head=2, use_cache=False, **drops))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    drops: Sizes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **drops, vocab_size=32, num_hidden_layers=4))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 5,
        "num_decoder_layers": 2,
        "num_heads": 2,
    }
    sizes |= {"vocab_size": 32, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, use_cache=False))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    options: Sizes = {"num_local_experts": 4, "output_router_logits": True, "use_cache": False}
    return MixtralForCausalLM(MixtralConfig(**sizes, **options, vocab_size=32, num_hidden_layers=4))


def gemma() -> nn.Module:
    """Every second layer has a sliding window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    kinds = ["sliding_attention", "full_attention"] * 4
    windows: Sizes = {"num_hidden_layers": 8, "sliding_window": 4, "layer_types": kinds, "head_dim": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **windows, vocab_size=32, use_cache=False))


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (llama, 4),
        pytest.param(lambda: llama().bfloat16(), 4, marks=pytest.mark.slow),
        (lambda: gpt2(0.0), 4),
        (lambda: gpt2(0.1), 4),
        pytest.param(bert, 4, marks=pytest.mark.slow),
        pytest.param(t5, 0, marks=pytest.mark.slow),
        pytest.param(mixtral, 0, marks=pytest.mark.slow),
        pytest.param(gemma, 8, marks=pytest.mark.slow),
    ],
    ids=["llama", "llama in bfloat16", "gpt2", "dropout", "bert", "t5", "mixture", "sliding windows"],
)
def test_graphs_of_transformers_are_those_of_the_whole(make: Callable[[], nn.Module], count: int) -> None:
    """T5's layers read one bias of positions, and the mixture's loss reads what routers inside of layers make."""
    ids = torch.arange(2 * 8).reshape(2, 8)
    shared, whole = joints(make(), kwargs={"input_ids": ids, "labels": ids})
    assert told(shared) == told(whole)
    assert (stamped(shared), stamped(whole)) == (count, 0)


def test_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shared, whole = joints(Stack(gelu), (numbers(4, WIDTH).float(),), loss=lambda out: out.float().square().mean())
    assert told(shared) == told(whole)
    assert stamped(shared) == LAYERS - 1


# Traps: layers that run other code than the first one, or that act beside their results.

FORWARDS = [0]


def by_index(layer: Layer, x: Tensor) -> Tensor:
    return x * (1 + layer.index)


def by_own_calls(layer: Layer, x: Tensor) -> Tensor:
    layer.calls = 1 - layer.calls
    return x.sin()


def by_global_count(layer: Layer, x: Tensor) -> Tensor:
    FORWARDS[0] = FORWARDS[0] % LAYERS + 1  # as it was after every forward
    return x * FORWARDS[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


def by_custom_function(layer: Layer, x: Tensor) -> Tensor:
    doubled: Tensor = Doubled.apply(x)
    return doubled


def by_hook(layer: Layer, x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda gradient: gradient * (1 + layer.index))
    return y


def by_hook_on_a_node(layer: Layer, x: Tensor) -> Tensor:
    y = gelu(layer, x)
    node: Any = y.grad_fn
    node.register_prehook(lambda gradients: (gradients[0] * (1 + layer.index),))
    return y


def by_checkpoint(layer: Layer, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(torch.sin, x, use_reentrant=False)
    return found


def by_constant(layer: Layer, x: Tensor) -> Tensor:
    return x * torch.tensor(float(layer.index), dtype=x.dtype)


def by_writing(layer: Layer, x: Tensor) -> Tensor:
    layer.scale.mul_(1.25)
    return x * layer.scale


def in_double(rule: Callable[[Layer, Tensor], Tensor]) -> Problem:
    return Problem(Stack(rule).double(), squares, (numbers(8, WIDTH).double(),))


@pytest.mark.parametrize(
    "rule",
    [
        by_index,
        by_own_calls,
        by_global_count,
        by_custom_function,
        by_hook,
        by_hook_on_a_node,
        by_checkpoint,
        by_constant,
        by_writing,
    ],
)
def test_traps_are_traced_whole(rule: Any) -> None:
    FORWARDS[0] = 0
    problem = in_double(rule)
    expected = reference(problem, 2)
    pipe = compiled(problem, 2, 2, check=False)
    assert stamped(pipe.compiled.joint) == 0
    assert_same(stepped(problem, pipe), expected, 1e-12)


class Leaking(Stack):
    """What the third layer makes inside is read by the model."""

    def forward(self, x: Tensor) -> Tensor:
        inner: list[Tensor] = []

        def keep(_: Layer, x: Tensor) -> Tensor:
            inner.append(x.sin())
            return inner[0]

        self.layers[2].rule = keep
        return super().forward(x) * inner[0].mean()


class Tied(Stack):
    """Two layers have one weight."""

    def __init__(self) -> None:
        super().__init__(gelu)
        self.layers[3].up.weight = self.layers[1].up.weight


class Twice(Stack):
    """The layers are run again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Reader(Layer):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + memory * memory


class Remembering(Stack):
    """All layers read one tensor, the gradient of which is a sum."""

    def __init__(self) -> None:
        super().__init__(gelu)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Reader(index, gelu) for index in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.first(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Strided(Stack):
    """The gradient of the last layer's result has other strides than the result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous()


@pytest.mark.parametrize("make", [lambda: Leaking(gelu), Tied, lambda: Twice(gelu), Remembering, lambda: Strided(gelu)])
def test_models_around_layers(make: Callable[[], nn.Module]) -> None:
    shared, whole = joints(make(), (numbers(4, WIDTH),), loss=mean_square)
    assert told(shared) == told(whole)


def hooked(model: Stack) -> Stack:
    model.layers[2].register_forward_hook(lambda module, args, output: output * 2)
    model.layers[3].up.register_forward_hook(lambda module, args, output: output * 3)
    return model


def test_hooks_of_one_layer() -> None:
    shared, whole = joints(hooked(Stack(gelu)), (numbers(4, WIDTH),), loss=mean_square)
    assert told(shared) == told(whole)
    assert stamped(shared) == LAYERS - 2


def test_frozen_layers_are_no_others() -> None:
    model = Stack(gelu)
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    shared, whole = joints(model, (numbers(4, WIDTH),), loss=mean_square)
    assert told(shared) == told(whole)
    assert stamped(shared) == 0


def test_gradients_are_those_of_plain_autograd_and_the_option_turns_it_off() -> None:
    problem = in_double(gelu)
    pipe = compiled(problem, 2, 2)
    assert stamped(pipe.compiled.joint) == LAYERS - 1
    assert_same(stepped(problem, pipe), reference(problem, 2), 1e-12)
    assert stamped(compiled(problem, 2, 2, share_layers=False).compiled.joint) == 0
    with pytest.raises(ZbfxError, match="share_layers"):
        zbfx.compile(problem.model, stages=1, microbatches=1, share_layers="yes")  # type: ignore[arg-type]
