"""Orders that were written down, read back: torch's own schedules, what `plan --json` prints, iterables of any kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.schedules as of_torch

from tests.support.models import mlp
from tests.support.reference import assert_same, compiled, default_dtype, reference, stepped
from zbfx import Action, CostTable, InvalidSchedule, StageCost, ZbfxError
from zbfx.cli import main
from zbfx.costs.tables import read_costs
from zbfx.schedule import V, check, from_torch_csv, improve, plan
from zbfx.schedule.orders.written import from_json, placement_of_orders, read_file, read_orders

UNLIKE = StageCost(2, 3, 5, 4, 3)
LETTERS = {"F": "F", "I": "B", "W": "W", "B": "BW"}


def of_kind(kind: Any, p: int, m: int) -> dict[int, list[Any]]:
    """A schedule of torch with two stages a rank, as torch makes it; None is a step in which a rank waits."""
    stage = SimpleNamespace(group_size=p, group_rank=0, num_stages=2 * p, stage_index=0, has_backward=True)
    schedule = SimpleNamespace(
        pp_group_size=p,
        n_local_stages=2,
        _num_stages=2 * p,
        num_stages=2 * p,
        _n_microbatches=m,
        _stage=stage,
        _stages=[stage] * 2,
    )
    return {rank: kind._calculate_single_rank_operations(schedule, rank) for rank in range(p)}


def flat(actions: list[Any]) -> Iterator[str]:
    """What torch's actions compute, in our words."""
    for action in actions:
        if action is not None and action.sub_actions is not None:
            yield from flat(action.sub_actions)
        elif action is not None:
            yield f"{LETTERS[action.computation_type.value]}{action.stage_index}.{action.microbatch_index}"


@pytest.mark.parametrize(("p", "m"), [(2, 4), (6, 12), (6, 17)])
@pytest.mark.parametrize("kind", [of_torch.ScheduleDualPipeV, of_torch.ScheduleZBVZeroBubble])
def test_schedules_of_torch_run_as_they_are(kind: Any, p: int, m: int, tmp_path: Path) -> None:
    made = of_kind(kind, p, m)
    of_torch.PipelineScheduleMulti._dump_csv(SimpleNamespace(pipeline_order=made), str(tmp_path / "o.csv"))  # type: ignore[arg-type]
    orders = from_torch_csv(tmp_path / "o.csv")
    assert [list(map(str, order)) for order in orders] == [list(flat(made[rank])) for rank in range(p)]
    assert read_file(tmp_path / "o.csv") == orders
    assert placement_of_orders(orders) == V.placement(p, 2)
    check(CostTable.chain([UNLIKE] * (2 * p), 7, V.placement(p, 2)), m, orders)


def test_transfers_of_torch_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "with_transfers.csv"
    path.write_text("0UNSHARD,0F0,0SEND_F0,1RECV_B0,0I0,0W0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,,1B0,1SEND_B0\n")
    assert from_torch_csv(path) == read_orders(["F0.0 B0.0 W0.0", "F1.0 BW1.0"])
    path.write_text("0F0,0F\n")
    with pytest.raises(ZbfxError, match=r"with_transfers.csv, row 0, 1: expected an action of torch .* found '0F'"):
        from_torch_csv(path)
    path.write_text("\n,\n")
    with pytest.raises(ZbfxError, match="a row of actions like 0F1 for each rank; found none"):
        from_torch_csv(path)
    path.write_bytes(b"0F0,\xe9")
    with pytest.raises(ZbfxError, match=r"with_transfers.csv is no text in UTF-8"):
        read_file(path)


@pytest.mark.slow
@default_dtype(torch.float64)
def test_an_order_of_torch_compiles(tmp_path: Path) -> None:
    """DualPipeV's order alone says where stages lie: two a rank, in a V."""
    path = tmp_path / "dual.csv"
    made = of_kind(of_torch.ScheduleDualPipeV, 2, 4)
    of_torch.PipelineScheduleMulti._dump_csv(SimpleNamespace(pipeline_order=made), str(path))  # type: ignore[arg-type]
    problem = mlp(4)
    pipe = compiled(problem, 2, 4, schedule=from_torch_csv(path))
    assert pipe.schedule.costs.placement == (0, 1, 1, 0)
    assert [str(action) for action in pipe.schedule.ranks[1]] == list(flat(made[1]))
    assert_same(stepped(problem, pipe), reference(problem, 4), 1e-12)


def test_placements_that_no_order_has() -> None:
    with pytest.raises(InvalidSchedule, match="found actions of stage 1 on ranks 0 and 1"):
        placement_of_orders(read_orders(["F0.0 F1.0", "F1.1"]))
    with pytest.raises(InvalidSchedule, match="found no action of stage 1"):
        placement_of_orders(read_orders(["F0.0", "F2.0"]))
    with pytest.raises(InvalidSchedule, match="at least one action; found none"):
        placement_of_orders(read_orders(["", ""]))


def test_orders_are_any_iterables() -> None:
    wanted = read_orders(["F0.0 F0.1 B0.0 W0.0 BW0.1"])
    parts: list[Action | str] = ["F0.0", "F0.1 B0.0 W0.0", *wanted[0][-1:]]
    assert read_orders(iter([(part for part in parts)])) == wanted
    costs = CostTable.chain([UNLIKE], 7)
    found = plan(costs, 2, schedule=lambda costs, m: (iter(parts) for _ in range(costs.rank_count)))
    assert found.ranks == wanted
    for nothing in ("F0.0", {0: "F0.0"}, 3):
        with pytest.raises(ZbfxError, match="one order of actions per rank"):
            read_orders(nothing)  # type: ignore[arg-type]
    with pytest.raises(ZbfxError, match="an order is a list of actions"):
        read_orders(wanted[0])  # type: ignore[arg-type]


def test_what_plan_prints_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order of a V goes to a table that names no placement."""
    table, v = tmp_path / "costs.json", tmp_path / "v.json"
    stages = [{"t_f": 2, "t_b": 3, "t_w": 5, "m_b": 4, "m_w": 3}] * 4
    table.write_text(json.dumps({"stages": stages, "t_comm": 7}))
    v.write_text(json.dumps({"stages": stages, "t_comm": 7, "placement": [0, 1, 1, 0]}))
    first = ["plan", "--costs", str(v), "--microbatches", "3", "--schedule", "zb-v-order", "--json"]
    assert main([*first, "--mem-limit", "30,29"]) == 0
    printed = capsys.readouterr().out
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(printed)
    written = json.loads(printed)
    assert (written["microbatches"], written["placement"], written["mem_limit"]) == (3, [0, 1, 1, 0], [30, 29])
    assert from_json(plan_file) == plan(read_costs(v), 3, schedule="zb-v-order").ranks

    again = ["plan", "--costs", str(table), "--microbatches", "3", "--order", str(plan_file), "--json"]
    assert main(again) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["schedule"], read["ranks"], read["placement"]) == ("custom", written["ranks"], [0, 1, 1, 0])
    assert main([*again, "--improve", "--budget", "0.3"]) == 0
    improved = json.loads(capsys.readouterr().out)
    assert improved["iteration_time"] < written["iteration_time"]
    assert improved["notes"][0].startswith(f"custom: iteration time {written['iteration_time']:g}, peak memory")


def test_files_that_hold_no_order(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rank": []}')
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ZbfxError, match=r"or its field 'ranks' alone; found \{'rank'"):
        read_file(tmp_path / "a.json")
    with pytest.raises(ZbfxError, match="is not JSON"):
        read_file(tmp_path / "b.json")
    for name, text, message in (
        ("deep", "[" * 100_000 + "]" * 100_000, "nested too deep"),
        ("twice", '{"ranks": ["F0.0"], "ranks": ["F0.1"]}', "found 'ranks' several times"),
        ("large", '{"ranks": ["F999999999999.0"]}', "found no action of stage 0"),
    ):
        (tmp_path / f"{name}.json").write_text(text)
        with pytest.raises(ZbfxError, match=message):
            placement_of_orders(read_file(tmp_path / f"{name}.json"))
    with pytest.raises(ZbfxError, match=r"from a file of \.csv or \.json; found .*c\.txt"):
        read_file(tmp_path / "c.txt")
    with pytest.raises(ZbfxError, match=r"cannot read the order .*c\.json: No such file"):
        read_file(tmp_path / "c.json")


def test_a_search_goes_on_from_an_order_of_ones_own() -> None:
    """Never above the start, whatever the time; the start breaks no rule but the limit."""
    costs = CostTable.chain([StageCost(2, 3, 5, 4, 3), StageCost(3, 2, 4, 4, 3)] * 2, 7)
    start = plan(costs, 9, schedule="zb-h1")
    for request in ("zb-h1", start, start.ranks, lambda costs, m: start.ranks):
        found = plan(costs, 9, schedule=improve(request), budget_s=1e-9)
        assert found.iteration_s <= start.iteration_s
        assert found.notes[0].endswith(f": iteration time {start.iteration_s:g}, peak memory {max(start.peak_bytes):g}")
    proven = plan(costs, 9, schedule=improve(start.ranks), budget_s=1)
    assert proven.iteration_s < start.iteration_s
    with pytest.raises(InvalidSchedule, match="is missing"):
        plan(costs, 9, schedule=improve([order[:-1] for order in start.ranks]))
    with pytest.raises(ZbfxError, match="did you mean 'zb-h1'"):
        plan(costs, 9, schedule=improve("zb_h1"))
