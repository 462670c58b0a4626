"""Schedules and communication. (Case 55 needs GPUs; 57 is in tests/processes/test_processes.py.)"""

from __future__ import annotations

import pytest
import torch

from tests.cases.common import WIDTH, layers
from tests.support.models import Problem, gpt, numbers, squares
from tests.support.reference import compiled
from zbfx import InvalidSchedule, Kind, ZbfxError
from zbfx.plan import CostTable, Edge, StageCost
from zbfx.program import ops
from zbfx.schedule import plan, simulate

V_COSTS = CostTable(
    tuple(StageCost(2, 3, 5) for _ in range(4)), tuple(Edge(k, k + 1, 7, 7) for k in range(3)), (0, 1, 1, 0)
)


def test_case_53_orders_that_wait_for_each_other_are_rejected() -> None:
    """Rank 0 runs B3.0 before F0.1; rank 1 wants F0.1 before it makes what F3.0 needs."""
    orders = ["F0.0 F3.0 B3.0 F0.1 F3.1 B3.1 B0.0 B0.1 W3.0 W3.1 W0.0 W0.1"]
    orders += ["F1.0 F1.1 F2.0 F2.1 B2.0 B1.0 B2.1 B1.1 W2.0 W1.0 W2.1 W1.1"]
    with pytest.raises(InvalidSchedule) as caught:
        plan(V_COSTS, 2, schedule=orders)
    message = str(caught.value)
    assert "rank 1 waits at F1.1 for F0.1, which rank 0 runs only after F3.0" in message
    assert "rank 0 waits at F3.0 for F2.0, which rank 1 runs only after F1.1" in message
    reordered = [orders[0].replace("F3.0 B3.0 F0.1", "F0.1 F3.0 B3.0"), orders[1]]
    found = plan(V_COSTS, 2, schedule=reordered)
    assert [str(action) for action in found.ranks[0][:3]] == ["F0.0", "F0.1", "F3.0"]


def actions_in(channels: dict[int, list[str]]) -> dict[int, list[str]]:
    """The keys of messages between actions."""
    return {source: [key for key in keys if not key.startswith("loss")] for source, keys in channels.items()}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "auto"])
def test_case_54_nothing_waits_for_a_value_of_another_action(schedule: str) -> None:
    """Every receive stands right before the action that reads it; each channel is posted in the order of sending, and
    received in that order too (the loss, which no action reads, as soon as the plan says that it is there)."""
    problem = gpt(4)
    pipe = compiled(problem, 4, 4, schedule=schedule, stages_per_rank=2, check=False)
    sent: dict[tuple[int, int], list[str]] = {}
    for program in pipe.programs:
        for node in program.module.graph.find_nodes(op="call_function", target=ops.send):
            message = program.messages[str(node.args[1])]
            sent.setdefault((message.source, message.target), []).append(message.key)
    for program in pipe.programs:
        posted: dict[int, list[str]] = {}
        received: dict[int, list[str]] = {}
        waiting: list[torch.fx.Node] = []
        for node in program.module.graph.nodes:
            if node.target in (ops.post, ops.receive):
                message = program.messages[str(node.args[1])]
                order = posted if node.target is ops.post else received
                order.setdefault(message.source, []).append(message.key)
            if node.target is ops.receive and message.consumer is not None:
                waiting.append(node)
            elif node.op == "call_module" and node.meta.get("action"):
                read = {source.args[0] for source in node.all_input_nodes if source.op == "call_function"}
                assert set(waiting) <= read
                waiting = []
        assert {(source, program.rank): keys for source, keys in posted.items()} == {
            channel: keys for channel, keys in sent.items() if channel[1] == program.rank
        }
        assert actions_in(posted) == actions_in(received)
        assert sum(map(len, received.values())) > 0


@pytest.mark.slow
def test_case_58_schedule_owns_the_placement() -> None:
    problem = Problem(layers(4), squares, (numbers(6, WIDTH),))
    assert compiled(problem, 2, 3, schedule="zb-v").schedule.costs.placement == (0, 1, 1, 0)
    assert compiled(problem, 2, 3, schedule="interleaved-1f1b").schedule.costs.placement == (0, 1, 0, 1)
    looped = CostTable(V_COSTS.stages, V_COSTS.edges, (0, 1, 0, 1))
    for name in ("zb-v", "v-half", "v-min"):
        with pytest.raises(ZbfxError, match="placement"):
            plan(looped, 4, schedule=name)
    with pytest.raises(ZbfxError, match="for 2 ranks; found stages=4"):
        compiled(problem, 4, 3, schedule=plan(V_COSTS, 3, schedule="v-half"))


def test_case_59_splitting_that_does_not_pay_is_not_done() -> None:
    """B and W apart cost 12, together 8: the plan takes them together."""
    stages = tuple(StageCost(4, 11, 1, backward_s=8) for _ in range(2))
    costs = CostTable(stages, (Edge(0, 1, 7, 7),), (0, 1))
    found = plan(costs, 24, schedule="auto", budget_s=1.0)
    kinds = {action.kind for order in found.ranks for action in order}
    assert kinds == {Kind.F, Kind.BW}
    assert found.iteration_s <= plan(costs, 24, schedule="1f1b").iteration_s
    assert found.iteration_s >= 24 * 12
    assert found.iteration_s == pytest.approx(simulate(costs, 24, found.ranks).iteration_s)
    compared = {note.partition(":")[0] for note in found.notes}
    assert {"gpipe", "1f1b", "zb-h1", "zb-h2"} <= compared
