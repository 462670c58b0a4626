"""`zbfx.check` runs what was emitted: each kind of fault, planted into the programs of a right pipeline, is found and
named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zbfx
from tests.support.models import Problem, numbers, squares
from tests.support.reference import compiled, default_dtype
from zbfx.graphs import Role
from zbfx.program import ops
from zbfx.program.calls import PhaseCall

pytestmark = pytest.mark.usefixtures("known_traces")

WIDTH, MICROBATCHES = 4, 3


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield


class Model(nn.Module):
    """Two stages. Each writes a buffer in its forward, the second one in its backward too."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("amax", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.mean.copy_(x.detach().mean(0))
        x = torch.dropout(self.second(x), 0.4, True)
        x.register_hook(self.note)
        return x

    def note(self, gradient: Tensor) -> None:
        self.get_buffer("amax").mul_(0.5).add_(gradient.abs().amax())


def pipeline() -> zbfx.Pipeline:
    problem = Problem(Model(), squares, (numbers(2 * MICROBATCHES, WIDTH),))
    return compiled(problem, 2, MICROBATCHES, schedule="gpipe", cuts=["second"], check=False)


def calls(pipe: zbfx.Pipeline, rank: int, name: str) -> list[fx.Node]:
    """The nodes that call a phase, in the order of the program."""
    module = pipe.programs[rank].module
    nodes = [node for node in module.graph.nodes if node.op == "call_module"]
    found = [(node, module.get_submodule(str(node.target))) for node in nodes]
    return [node for node, part in found if isinstance(part, PhaseCall) and part.phase.name == name]


def phase_call(pipe: zbfx.Pipeline, rank: int, name: str) -> PhaseCall:
    return next(m for m in pipe.programs[rank].module.modules() if isinstance(m, PhaseCall) and m.phase.name == name)


def receives_are_swapped(pipe: zbfx.Pipeline) -> None:
    """What stage 1 receives for microbatches 0 and 1 changes places."""
    graph = pipe.programs[1].module.graph
    first, second, _ = calls(pipe, 1, "F1")
    one, other = first.args[1], second.args[1]
    assert isinstance(one, fx.Node)
    assert isinstance(other, fx.Node)
    posts = {str(node.args[1]): node for node in graph.find_nodes(op="call_function", target=ops.post)}
    for node in (posts["F0.1>1"], *other.all_input_nodes, other):  # received before the first is read
        first.prepend(node)
    first.args, second.args = (first.args[0], other), (second.args[0], one)


def a_w_is_left_out(pipe: zbfx.Pipeline) -> None:
    pipe.programs[0].module.graph.erase_node(calls(pipe, 0, "W0")[1])


def a_w_runs_twice(pipe: zbfx.Pipeline) -> None:
    node = calls(pipe, 0, "W0")[1]
    with pipe.programs[0].module.graph.inserting_after(node):
        pipe.programs[0].module.graph.node_copy(node)


def runs(change: Callable[[list[Any], Callable[[list[Any]], Any], int], Any]) -> Callable[[PhaseCall], None]:
    """Makes a call run otherwise: `change` gets its arguments, what it ran, and how often it has run."""

    def plant(call: PhaseCall) -> None:
        run, count = call.run, [0]

        def changed(box: list[Any]) -> Any:
            count[0] += 1
            return change(box, run, count[0] - 1)

        call.run = changed

    return plant


def an_accumulate_is_done_twice(pipe: zbfx.Pipeline) -> None:
    call = phase_call(pipe, 0, "W0")

    @runs
    def twice(box: list[Any], run: Any, count: int) -> Any:
        (*_, last) = call.accumulators
        before = last.clone()
        result = run(box)
        if count == 1:
            last.add_(last - before)
        return result

    twice(call)


def forwards_write_in_the_wrong_order(pipe: zbfx.Pipeline) -> None:
    """Each result goes where it belongs, and the last write is the right one."""
    first, second, _ = calls(pipe, 0, "F0")
    first.prepend(second)


def backwards_write_in_the_wrong_order(pipe: zbfx.Pipeline) -> None:
    first, second, _ = calls(pipe, 1, "B1")
    first.prepend(second)


def a_value_is_stale(pipe: zbfx.Pipeline) -> None:
    """A weight is read as it was in the first step."""
    call = phase_call(pipe, 0, "F0")
    kept: list[Tensor] = []
    place = [port.role for port in call.phase.ports].index(Role.PARAMETER)

    @runs
    def stale(box: list[Any], run: Any, count: int) -> Any:
        if count == 0:
            kept.append(box[place].clone())
        box[place] = kept[0]
        return run(box)

    stale(call)


def what_was_saved_is_stale(pipe: zbfx.Pipeline) -> None:
    """What the last F of a step saves for its W is given to the W of the next step too."""
    call = phase_call(pipe, 1, "W1")
    kept: list[Tensor] = []

    @runs
    def saved(box: list[Any], run: Any, count: int) -> Any:
        if count % MICROBATCHES == 2:
            kept.append(box[0].clone())
            box[0] = kept[0]
        return run(box)

    saved(call)


FAULTS: dict[Callable[[zbfx.Pipeline], None], tuple[str, str]] = {
    receives_are_swapped: (
        "loss 0: different",
        "step 1, F1.0 reads tanh of microbatch 1, in place of that of microbatch 0",
    ),
    a_w_is_left_out: ("W0.1: lost", "step 1, the gradient of first.weight lacks the part of microbatch 1"),
    a_w_runs_twice: ("W0.1: doubled", "step 1, the gradient of first.weight has twice the part of microbatch 1"),
    an_accumulate_is_done_twice: (
        "first.bias: different",
        "step 1, the gradient of first.bias has twice the part of microbatch 1",
    ),
    forwards_write_in_the_wrong_order: ("buffer mean: out of order: written for microbatches 1, 0, 2", ""),
    backwards_write_in_the_wrong_order: ("buffer amax: out of order: written for microbatches 1, 0, 2", ""),
    a_value_is_stale: ("loss 0 in step 2: stale", "step 2, F0.0 makes a wrong tanh"),
    what_was_saved_is_stale: ("second.weight in step 2: stale", ""),
}


def test_a_right_pipeline_is_right() -> None:
    """In two steps, by the programs and by the model: 3 losses, their mean, 4 gradients, 2 buffers. Losses and buffers
    have the same bits. Whether a product that is added to a gradient is rounded in between is up to a CPU's kernel."""
    report = zbfx.check(pipeline())
    assert (report.compared, report.findings, report.cause) == (40, (), "")
    assert 2 * 6 <= report.bitwise <= 20


@pytest.mark.slow
@pytest.mark.parametrize("plant", FAULTS)
def test_planted_faults_are_found_and_named(plant: Callable[[zbfx.Pipeline], None]) -> None:
    pipe = pipeline()
    plant(pipe)
    report = zbfx.check(pipe)
    finding, cause = FAULTS[plant]
    assert any(str(found).startswith(f"{finding} (") for found in report.findings), str(report)
    assert report.cause == cause, str(report)
    assert not any(found.of_model for found in report.findings), str(report)


def test_programs_that_wait_for_each_other_are_named() -> None:
    pipe = pipeline()
    graph = pipe.programs[0].module.graph
    for target in (ops.send, ops.release):
        (node,) = [n for n in graph.find_nodes(op="call_function", target=target) if n.args[1] == "F0.2>1"]
        graph.erase_node(node)
    (finding,) = zbfx.check(pipe).findings
    assert finding.name == "the programs"
    assert finding.kind.startswith("failed with AssertionError: programs deadlock: 0 waits for ")


COUNT = [0]


class Scaled(torch.autograd.Function):
    """A gradient that depends on how often it was asked for: no graph holds that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        COUNT[0] += 1
        return gradient * COUNT[0]


def test_gradients_of_the_model_itself_are_compared() -> None:
    model = Model()
    model.first.register_forward_hook(lambda module, args, output: Scaled.apply(output))
    problem = Problem(model, squares, (numbers(2 * MICROBATCHES, WIDTH),))
    pipe = compiled(problem, 2, MICROBATCHES, schedule="gpipe", check=False)
    names = {found.name.partition(" of ")[0] for found in zbfx.check(pipe).findings if found.of_model}
    assert names == {"first.weight", "first.bias"}
