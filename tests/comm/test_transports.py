"""Channels within one process keep the order of posts and of sends, as those between processes do."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

import zbfx
from tests.support.devices import Device, Events
from tests.support.models import mlp
from tests.support.reference import assert_same, compiled, gradients, reference
from zbfx.comm.group import GroupTransport
from zbfx.comm.local import LocalTransport, Mailbox
from zbfx.program.calls import PhaseCall
from zbfx.program.messages import Message, TensorLayout
from zbfx.runtime.engine import take_turns
from zbfx.runtime.runner import Wait

LAYOUT = TensorLayout((2,), (1,), torch.float32)
MESSAGES = {
    key: Message(key, None, None, source, 1 - source, (key,), (LAYOUT,))
    for key, source in {"a": 0, "b": 0, "back": 1}.items()
}


@pytest.fixture
def ends() -> tuple[LocalTransport, LocalTransport]:
    mailbox = Mailbox()
    return LocalTransport("rank 0", MESSAGES, mailbox), LocalTransport("rank 1", MESSAGES, mailbox)


def test_sends_end_when_they_are_posted_and_channels_do_not_wait_for_each_other(
    ends: tuple[LocalTransport, LocalTransport],
) -> None:
    first, second = ends
    value = torch.tensor([1.0, 2.0])
    first.send("a", (value,))
    first.post("back")
    second.send("back", (value * 2,))
    assert first.ready("back")
    assert not first.ready("a")
    second.post("a")
    assert first.ready("a")
    assert torch.equal(second.receive("a")[0], value)
    assert torch.equal(first.receive("back")[0], value * 2)
    for end in ends:
        end.finish()
    assert len(first.mailbox) == 0


@pytest.mark.parametrize("send_first", [True, False])
def test_a_post_that_meets_another_message_names_both(
    ends: tuple[LocalTransport, LocalTransport], send_first: bool
) -> None:
    first, second = ends
    value = (torch.zeros(2),)
    refused = pytest.raises(AssertionError, match=r"rank 0 sends .*'a'.* where rank 1 posts .*'b'")
    if send_first:
        first.send("a", value)
        with refused:
            second.post("b")
    else:
        second.post("b")
        with refused:
            first.send("a", value)


def test_nothing_is_posted_or_sent_twice(ends: tuple[LocalTransport, LocalTransport]) -> None:
    first, second = ends
    first.send("a", (torch.zeros(2),))
    second.post("a")
    with pytest.raises(AssertionError, match="rank 0: a is sent again before it is released"):
        first.send("a", (torch.zeros(2),))
    with pytest.raises(AssertionError, match="rank 1: a is posted twice"):
        second.post("a")


def test_ranks_that_wait_for_each_other_are_named(ends: tuple[LocalTransport, LocalTransport]) -> None:
    """Both wait until what they sent has arrived before they post anything."""

    def run(end: LocalTransport, key: str, posted: str) -> Generator[Wait, None, None]:
        end.send(key, (torch.zeros(2),))
        while not end.ready(key):
            yield Wait(1, key)
        end.post(posted)

    with pytest.raises(AssertionError, match="programs deadlock: 0 waits for a, 1 waits for back"):
        take_turns([run(ends[0], "a", "back"), run(ends[1], "back", "a")])


def test_what_is_under_way_is_joined_where_a_graph_ends() -> None:
    """What one graph begins no other can wait for: messages, and shards of parameters that are first read later."""
    events = Events(inbox=0, lines=False)
    device = Device(events, 0)
    waited: list[str] = []

    class Shards:
        def wait(self) -> None:
            waited.append("shards")

    device.join_shards = lambda flat: Shards()  # type: ignore[attr-defined]
    transport = GroupTransport(MESSAGES, device)  # type: ignore[arg-type]
    with device.capturing() as tape:
        transport.gather("bucket", torch.zeros(2))
        transport.send("a", (torch.zeros(2),))
        transport.post("back")
        assert transport.join() == {"back"}
        begun = {transfer for transfer, waits, _ in tape if not waits}
        assert len(begun) == 2
        assert {transfer for transfer, waits, _ in tape if waits} == begun
    assert waited == ["shards"]
    transport.gathered("bucket")  # in the next graph
    transport.release("a")
    assert transport.receive("back")[0].shape == (2,)
    assert waited == ["shards"]


def test_a_step_that_failed_can_be_called_again() -> None:
    """In one process; between processes the channels are closed."""
    problem = mlp(3)
    step = compiled(problem, 2, 3).run_local()
    call = next(c for c in step.engine.runners[1].calls if c.phase.name == "B1")
    take = PhaseCall.take

    def fail(box: list[object]) -> None:
        raise ArithmeticError("on purpose")

    call.take = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(zbfx.PipelineFault, match=r"action B1\.0 "):
        step(*problem.inputs, *problem.targets)
    call.take = take.__get__(call)  # type: ignore[method-assign]
    problem.model.zero_grad()
    loss = step(*problem.inputs, *problem.targets)
    assert_same((loss, gradients(problem.model)), reference(problem, 3), 1e-6)
