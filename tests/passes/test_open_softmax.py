"""The logarithm of a softmax in parts: the same values, and less to save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import cross_entropy

from tests.support.models import Problem
from tests.support.reference import compiled, traced
from zbfx._torch.operators import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, aten
from zbfx.graphs import Joint, Port, Role
from zbfx.passes.open_softmax import open_softmax
from zbfx.passes.recompute import Level
from zbfx.plan import Kind

VOCABULARY, TOKENS = 96, 8


def head(dtype: torch.dtype, cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> Problem:
    """A head whose loss is computed in float32 at least."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits.to(wide), targets)

    ids, targets = torch.randint(VOCABULARY, (2, TOKENS))
    return Problem(model, loss, (ids,), (targets,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_are_those_of_the_whole(dtype: torch.dtype) -> None:
    joint = traced(head(dtype))
    opened = open_softmax(joint)
    assert not opened.graph.find_nodes(op="call_function", target=LOG_SOFTMAX)
    assert_alike(opened, joint, {torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype])


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, VOCABULARY, dtype=logits.dtype)
    return cross_entropy(logits, targets, weight, ignore_index=7)


def of_rows(logits: Tensor, targets: Tensor) -> Tensor:
    return (cross_entropy(logits, targets, reduction="none") * logits[:, 0]).mean()


@pytest.mark.parametrize(
    "loss", [partial(cross_entropy, ignore_index=7), partial(cross_entropy, reduction="sum"), of_rows, weighted]
)
def test_gradients_at_targets_need_no_sum_over_the_row(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    joint = traced(head(torch.float64, loss))
    opened = open_softmax(joint)
    assert joint.graph.find_nodes(op="call_function", target=LOG_SOFTMAX_BACKWARD)
    for target in (LOG_SOFTMAX_BACKWARD, aten.nll_loss_backward.default):
        assert not opened.graph.find_nodes(op="call_function", target=target)
    sums = opened.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert [n for n in sums if n.args[0].meta["val"].shape[-1] == VOCABULARY and n.args[1] in ([1], [-1])] == [
        n for n in sums if n.args[0].target is aten.exp.default
    ]
    targets = torch.tensor([3, 7, 7, 0, VOCABULARY - 1, 5, 12, 7])
    assert_alike(opened, joint, 1e-13, targets)


def assert_alike(opened: Joint, joint: Joint, tolerance: float, targets: Tensor | None = None) -> None:
    """Both graphs give the same for random numbers and tokens, or these targets."""
    values = []
    for node in joint.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        tokens = torch.randint(VOCABULARY, fake.shape) if targets is None else targets
        values.append(torch.randn(fake.shape).to(fake.dtype) if fake.is_floating_point() else tokens)
    found, expected = (fx.Interpreter(fx.GraphModule({}, graph)).run(*values) for graph in (opened.graph, joint.graph))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "top"), [(torch.float16, 0.0), (torch.bfloat16, 17.0)])
def test_sums_of_half_precision_are_taken_in_float32(dtype: torch.dtype, top: float) -> None:
    logits = torch.zeros(1, 100_000, dtype=dtype)
    logits[0, 0] = top
    graph = fx.Graph()
    given = graph.placeholder("given")
    given.meta["val"] = logits
    node = graph.call_function(LOG_SOFTMAX, (given, -1, False))
    node.meta["val"] = torch.empty_like(logits)
    graph.output((node,))
    joint = Joint(graph, (Port(Role.INPUT, "given"),), (Port(Role.OUTPUT, "0"),), {})
    (found,) = fx.Interpreter(fx.GraphModule({}, open_softmax(joint).graph)).run(logits)
    assert torch.equal(found, logits.double().log_softmax(-1).to(dtype))


def test_compiled_stages_save_no_logits_in_float32() -> None:
    problem = head(torch.bfloat16)
    for backend, expected in (("eager", True), ("inductor", False)):
        pipe = compiled(problem, 1, 2, backend=backend, check=False)
        saved = pipe.stages[0].phases[Kind.F].results
        examples = [pipe.stages[0].examples[name] for name in saved]
        assert any(e.dtype is torch.float32 and e.shape == (TOKENS // 2, VOCABULARY) for e in examples) is expected
    assert pipe.compiled.levels == (Level.CHEAP,)
