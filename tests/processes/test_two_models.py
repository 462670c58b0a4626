"""A policy and a frozen reference in one step: the examples of DPO and GRPO, over two processes, in one, and without a
pipeline, in float64. The reference has no backward."""

from __future__ import annotations

import pytest
import torch

from examples import dpo
from examples.tiny_lm import TinyLM, chosen_log_probs, chunked_gradients, chunked_log_probs
from tests.processes import two_models_worker as worker
from tests.support.live_bytes import LiveBytes
from tests.support.pool import Launch
from zbfx.plan import Kind


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_ten_steps_are_those_of_one_process(launch: Launch, name: str) -> None:
    """Losses and metrics: in all bits over processes, to rounding in plain PyTorch."""
    found, alone, plain = launch(2, worker.trained, name), worker.one_process(name), worker.plain(name)
    assert len(alone) == worker.STEPS
    assert found == {0: alone, 1: alone}
    for one, other in zip(alone, plain, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)
    assert alone[0] != alone[-1]


@pytest.mark.slow
def test_a_frozen_reference_has_no_backward() -> None:
    """Its stages have forwards alone, no rank has memory for its gradients, and its parameters get none."""
    model = dpo.pair_of_models()
    pipe = dpo.pipeline(model)
    frozen, trained = (dict(part.named_parameters(prefix=name)) for name, part in model.named_children())
    for stage in pipe.stages:
        for kind in (Kind.B, Kind.W):
            phase = stage.phases[kind]
            assert not frozen.keys() & {*phase.parameters}, phase.name
    assert {name for stage in pipe.stages for phase in stage.phases.values() for name in phase.gradients} == {*trained}
    size = sum(parameter.numel() * parameter.element_size() for parameter in trained.values())
    assert sum(memory.static.gradients for memory in pipe.memory) == size
    read = [{*stage.phases[Kind.F].parameters} for stage in pipe.stages]
    assert read[0] & frozen.keys(), "both are cut over the ranks"
    assert all(own & trained.keys() for own in read)
    pipe.run_local()(dpo.made_up(0))
    assert all(parameter.grad is None for parameter in frozen.values())
    assert all(parameter.grad is not None for parameter in trained.values())


def test_log_probabilities_of_a_large_vocabulary_in_chunks() -> None:
    """Forward and backward hold a chunk of logits, and not those of all tokens in float32, which are 2 GiB here."""
    tokens, vocabulary, width, chunk = 4096, 128_256, 4, 16
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width)
    chosen = torch.randint(vocabulary, (tokens,))
    with LiveBytes() as counter:
        found = chunked_log_probs(hidden[: 4 * chunk], weight, chosen[: 4 * chunk], chunk)
        chunked_gradients(torch.ones_like(found), hidden[: 4 * chunk], weight, chosen[: 4 * chunk], chunk)
    assert counter.peak < 5 * chunk * vocabulary * 4 + 2 * weight.nbytes < tokens * vocabulary * 4 / 20


def test_log_probabilities_in_chunks_are_those_of_log_softmax() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    tokens, scale = torch.randint(11, (7,)), torch.randn(7, dtype=torch.float64)
    found = chosen_log_probs(hidden, weight, tokens, 3)
    expected = (hidden @ weight.T).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(
        torch.autograd.grad(found, (hidden, weight), scale), torch.autograd.grad(expected, (hidden, weight), scale)
    )


def test_the_model_of_the_examples_generates_what_its_log_probabilities_say() -> None:
    torch.manual_seed(0)
    model = TinyLM(length=8)
    ids = model.generate(torch.zeros(4, 2, dtype=torch.long), 8, torch.Generator().manual_seed(0))
    assert ids.shape == (4, 8)
    logits = model.head(model.hidden(ids))[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(model(ids), expected)
