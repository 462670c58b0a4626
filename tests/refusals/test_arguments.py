"""Arguments that compile, bind and check refuse, with messages that say what was expected, found, where, and what to
do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from tests.refusals.common import refusal
from tests.support.models import Problem, gpt, mlp, numbers, squares
from tests.support.reference import compiled
from zbfx import InputError, InvalidSchedule, NoFeasibleSchedule, PipelineFault, TraceError, ZbfxError
from zbfx.options import placement_of

pytestmark = pytest.mark.usefixtures("known_traces")

WIDTH = 6


def test_every_error_is_a_zbfx_error_and_a_value_error() -> None:
    errors = (InputError, InvalidSchedule, NoFeasibleSchedule, PipelineFault, TraceError)
    assert all(issubclass(error, ZbfxError) for error in errors)
    assert issubclass(ZbfxError, ValueError)
    assert issubclass(PipelineFault, RuntimeError)


def test_more_stages_than_can_be_cut() -> None:
    problem = Problem(nn.Linear(WIDTH, WIDTH), squares, (numbers(4, WIDTH),))
    message = refusal(problem, stages=40)
    assert "stages=40" in message
    assert "at most" in message
    most = int(message.split("at most ")[1].split()[0])
    assert len(compiled(problem, most, 2).stages) == most


@pytest.mark.parametrize("stages", [0, -1, 1.5, "2"])
def test_stages_that_are_no_count(stages: Any) -> None:
    message = refusal(mlp(2), stages=stages)
    assert repr(stages) in message
    assert "integer >= 1" in message


@pytest.mark.parametrize("microbatches", [0, -3, 2.0, None])
def test_microbatches_that_are_no_count(microbatches: Any) -> None:
    problem = mlp(1)
    with pytest.raises(ZbfxError, match="microbatches") as caught:
        zbfx.compile(
            problem.model,
            stages=2,
            microbatches=microbatches,
            example_inputs=problem.inputs,
            example_targets=problem.targets,
            loss_fn=problem.loss_fn,
            schedule="gpipe",
        )
    assert repr(microbatches) in str(caught.value)


@pytest.mark.parametrize("size", [{"microbatches": 10**9}, {"stages": 10**9}, {"stages_per_rank": 10**9}])
@pytest.mark.parametrize("schedule", ["auto", "interleaved-1f1b"])
def test_sizes_that_would_fill_memory(size: dict[str, int], schedule: str) -> None:
    problem, sizes = mlp(1), {"stages": 2, "microbatches": 2} | size
    with pytest.raises(ZbfxError, match=r"33,554,432 actions at most.* 1,000,000,000|2,000,000,000"):
        zbfx.compile(problem.model, **sizes, example_inputs=problem.inputs, schedule=schedule)  # type: ignore[arg-type]


def test_notes_on_schedules_that_were_not_compared_speak_of_these_stages_alone() -> None:
    """A pipeline has no field of a file to change."""
    notes = "\n".join(compiled(mlp(2), 2, 2, schedule="auto", check=False).schedule.notes)
    for name in ("interleaved-1f1b", "zb-v-order", "v-half", "v-min"):
        assert f"{name}: not compared, {name} puts " in notes
    assert "found placement (0, 1)\n" in notes
    assert not {"field", "table", "Set "} & {word for word in ("field", "table", "Set ") if word in notes}


def test_unknown_cut() -> None:
    message = refusal(mlp(2), cuts=["no_such_layer"])
    assert "'no_such_layer'" in message
    assert "Known: 0, 1, 2" in message


def test_wrong_number_of_cuts() -> None:
    twice = refusal(mlp(2), stages=2, cuts=["2", "2"])
    assert (
        "2 stages have 1 cuts, each named once; found 2: ['2', '2']. There are stages= times stages_per_rank=" in twice
    )
    message = refusal(mlp(2), stages=3, cuts=["4"])
    assert "3 stages have 2 cuts" in message
    assert "found 1" in message


@pytest.mark.parametrize("cuts", [["8", "4"], ["0", "4"], ["4", "4"]])
def test_cuts_out_of_order(cuts: list[str]) -> None:
    message = refusal(mlp(2), stages=3, cuts=cuts)
    assert "in the order in which they run" in message
    assert str(cuts) in message


def test_schedule_for_other_ranks() -> None:
    schedule = compiled(mlp(2), 3, 2).schedule
    message = refusal(mlp(2), schedule=schedule)
    assert "the schedule is for 3 ranks" in message
    assert "stages=2" in message
    assert compiled(mlp(2), 3, 2, schedule=schedule).schedule.ranks == schedule.ranks


@pytest.mark.parametrize("device", ["gpu", "cuda:x", ""])
def test_unknown_device(device: str) -> None:
    assert repr(device) in refusal(mlp(2), device=device)


@pytest.mark.parametrize("device", ["mps", "xpu", "xla", "mtia", "vulkan", "hpu", "lazy", "privateuseone"])
def test_devices_that_no_pipeline_runs_on(device: str) -> None:
    assert refusal(mlp(2), device=device) == (
        f"a pipeline runs on a CPU or on CUDA GPUs; found device={device!r}. Use device='cpu' or 'cuda', with the "
        f"model's tensors there or on meta"
    )


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built with CUDA")
def test_device_that_this_torch_does_not_have() -> None:
    message = refusal(mlp(2), device="cuda")
    assert "built without CUDA" in message
    assert "device='cpu'" in message


@pytest.mark.parametrize("model_device", ["cpu", "meta"])
def test_meta_is_no_device_to_run_on(model_device: str) -> None:
    problem = mlp(2)
    message = refusal(replace(problem, model=problem.model.to(model_device)), device="meta")
    assert message.startswith("device='meta' has no memory to run on. Name the device")


@pytest.mark.parametrize(
    ("schedule", "count", "has"),
    [
        ("zb-v", 1, "2 stages a rank, down the ranks and back up"),
        ("v-half", 3, "2 stages a rank, down the ranks and back up"),
        ("zb-h1", 2, "1 stage a rank"),
        ("zb-2p", 2, "1 stage a rank"),
        ("interleaved-1f1b", 1, "2 or more stages a rank"),
    ],
)
def test_stages_per_rank_that_a_schedule_does_not_have(schedule: str, count: int, has: str) -> None:
    message = refusal(mlp(2), schedule=schedule, stages_per_rank=count)
    assert message.startswith(
        f"schedule={schedule!r} has {has}; found stages_per_rank={count}. Leave stages_per_rank out"
    )
    held = {"zb-v": 2, "v-half": 2, "interleaved-1f1b": 2}.get(schedule, 1)
    assert placement_of(schedule, 2, held) == placement_of(schedule, 2, None)


@pytest.mark.parametrize("slots", [-1, "2", float("nan"), float("inf"), True])
def test_optimizer_slots(slots: Any) -> None:
    message = refusal(mlp(2), optimizer_slots=slots)
    assert (
        f"optimizer_slots is how many tensors the optimizer keeps for each parameter, a number >= 0; found {slots!r}"
        in (message)
    )


def test_memory_limits_that_are_no_bytes() -> None:
    message = refusal(mlp(2), mem_limit=1.5)
    assert message == (
        "mem_limit is a number of bytes; found 1.5. Say '1.5x' for so many times what the activations of 1F1B need"
    )


FORMS = (
    'a memory limit is a number of bytes, also like "24GiB" (B, KiB to TiB, kB to TB), a multiple like "2x", or one '
    "number of bytes per rank"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (b"1x", f"{FORMS}, above 0; found b'1x'"),
        ({0: 1}, f"{FORMS}, above 0; found {{0: 1}}"),
        ([None, 10**9], f"{FORMS}, above 0; found None"),
        ([10**9, True], f"{FORMS}, above 0; found True"),
        ([10**9, -1], f"{FORMS}, above 0; found -1"),
        ([10**9, "2x"], f"{FORMS}; found '2x'"),
        ("2 bytes", f"{FORMS}; found '2 bytes'"),
        ("1e30GiB", f"{FORMS}; found '1e30GiB'"),
        ("1xx", f"{FORMS}; found '1xx'"),
        (["1GiB"], "one memory limit per rank: expected 2, found 1"),
    ],
)
def test_memory_limits_of_other_forms(limit: Any, message: str) -> None:
    assert refusal(mlp(2), mem_limit=limit) == message


def test_text_and_numbers_as_limits_of_ranks() -> None:
    assert compiled(mlp(2), 2, 2, mem_limit=["1.5GiB", 10**9]).schedule.mem_limit == (1.5 * 2**30, 1e9)


def test_orders_that_need_more_than_a_multiple() -> None:
    message = refusal(mlp(2), InvalidSchedule, schedule="gpipe", mem_limit="0.5x")
    assert message.startswith("rank 0, step 1: F0.1 raises memory to ")
    assert message.endswith(
        "\nmem_limit='0.5x' allows 0.5 times what the activations of 1F1B need, beside what is static. Raise it, or "
        "leave the order to schedule='auto'"
    )


def test_limits_without_a_plan_say_what_helps() -> None:
    fixed = refusal(mlp(2), schedule="zb-h1", mem_limit=1, recompute="none")
    assert fixed.endswith(
        " Raise the limit, allow recompute='auto', use smaller microbatches, or cut the model into more stages."
    )
    free = refusal(mlp(2), schedule="zb-h1", mem_limit=1)
    assert free.endswith(" Raise the limit, use smaller microbatches, or cut the model into more stages.")


def test_pipelines_have_short_names() -> None:
    assert repr(compiled(mlp(2), 3, 2, schedule="zb-h1")) == "Pipeline(zb-h1: 3 stages on 3 ranks, 2 microbatches)"


def test_arguments_of_bind_run_local_and_check() -> None:
    pipe = compiled(mlp(2), 2, 2)
    for timeout_s in (-1, 0, "a", float("nan"), float("inf"), None):
        with pytest.raises(ZbfxError, match=r"timeout_s is how many seconds to wait .*, a number > 0; found"):
            pipe.bind(timeout_s=timeout_s)  # type: ignore[arg-type]
    with pytest.raises(ZbfxError, match="transport is one of auto, copies, group; found 'nccl'"):
        pipe.bind(transport="nccl")
    with pytest.raises(ZbfxError, match=r"transport='copies' needs CUDA devices; found cpu\. Use 'auto'"):
        pipe.bind(transport="copies")
    for seed in ("x", 1.5, True):
        with pytest.raises(ZbfxError, match="seed is an integer"):
            pipe.run_local(seed=seed)  # type: ignore[arg-type]
        with pytest.raises(ZbfxError, match="seed is an integer"):
            zbfx.check(pipe, seed=seed)  # type: ignore[arg-type]


def test_unknown_schedule() -> None:
    message = refusal(mlp(2), schedule="zb-h9")
    assert "'zb-h9'" in message
    assert "zb-h1" in message


def test_order_that_lacks_an_action() -> None:
    message = refusal(mlp(2), InvalidSchedule, stages=1, schedule=["F0.0 F0.1 B0.0 B0.1 W0.0"])
    assert "W0.1 is missing" in message


def test_order_that_waits_for_itself() -> None:
    orders = ["F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1"]
    assert "deadlock" in refusal(mlp(2), InvalidSchedule, schedule=orders)


@pytest.mark.slow
def test_infeasible_memory_limit_names_the_smallest() -> None:
    problem = gpt(2)
    with pytest.raises(NoFeasibleSchedule) as caught:
        compiled(problem, 2, 2, schedule="auto", mem_limit=1)
    limit = caught.value.smallest_limit
    assert limit > 1
    assert max(compiled(problem, 2, 2, schedule="auto", mem_limit=limit).schedule.peak_bytes) <= limit


@pytest.mark.parametrize("name", ["tolerance", "floor"])
def test_tolerances_of_check(name: str) -> None:
    pipe = compiled(mlp(2), 2, 2)
    for value in ("x", None, -1.0, float("nan")):
        with pytest.raises(
            ZbfxError, match=rf"^{name} is how far results may differ, .*, a number >= 0; found {value!r}"
        ):
            zbfx.check(pipe, **{name: value})  # type: ignore[arg-type]


def test_model_without_data() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipe = compiled(replace(mlp(2), model=model), 2, 2)
    with pytest.raises(ZbfxError, match=r"0\.bias is on the meta device") as caught:
        pipe.run_local()
    assert "to_empty" in str(caught.value)


def test_bind_without_torch_distributed() -> None:
    with pytest.raises(ZbfxError, match="torchrun") as caught:
        compiled(mlp(2), 2, 2).bind()
    assert "init_process_group" in str(caught.value)
    assert "run_local()" in str(caught.value)
