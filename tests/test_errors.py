"""Bad input is refused with a message that says what was expected, what was found, where, and what to do.

Run: pytest tests/test_errors.py (CPU, one process).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.support.models import Problem, gpt, mean_squares, mlp, numbers, squares
from tests.support.reference import assert_same, compiled, reference, stepped
from zbfx import InputError, InvalidSchedule, NoFeasibleSchedule, PipelineFault, TraceError, ZbfxError
from zbfx.options import placement_of

WIDTH = 6


def line_of(function: Callable[..., Any], text: str) -> str:
    """`file:line` of the line of a function that contains `text`."""
    lines, start = inspect.getsourcelines(function)
    offset = next(k for k, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{start + offset}"


def refusal(problem: Problem, kind: type[ZbfxError] = ZbfxError, stages: int = 2, **options: Any) -> str:
    """The message with which compile refuses a problem of two microbatches."""
    with pytest.raises(kind) as caught:
        compiled(problem, stages, 2, **options)
    assert isinstance(caught.value, ZbfxError)
    return str(caught.value)


def step_refusal(problem: Problem, *args: Any, **kwargs: Any) -> str:
    """The message with which a step of `problem` refuses other arguments; nothing has run when it comes."""
    step = compiled(problem, 2, 2).run_local()
    with pytest.raises(InputError) as caught:
        step(*args, **kwargs)
    assert all(parameter.grad is None for parameter in problem.model.parameters())
    assert step.count == 0
    return str(caught.value)


def test_every_error_is_a_zbfx_error_and_a_value_error() -> None:
    errors = (InputError, InvalidSchedule, NoFeasibleSchedule, PipelineFault, TraceError)
    assert all(issubclass(error, ZbfxError) for error in errors)
    assert issubclass(ZbfxError, ValueError)
    assert issubclass(PipelineFault, RuntimeError)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h * 2 if h.sum() > 0 else h - 1


class Routing(Branching):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        chosen = int(h.sum(0).argmax().item())
        return h * chosen


class Selecting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h[h > 0]


@pytest.mark.parametrize(
    ("model", "text"),
    [(Branching, "if h.sum() > 0"), (Routing, ".item()"), (Selecting, "h[h > 0]")],
    ids=["if", "item", "mask"],
)
def test_control_flow_by_values(model: type[nn.Module], text: str) -> None:
    message = refusal(Problem(model(), squares, (numbers(4, WIDTH),)), TraceError)
    assert line_of(model.forward, text) in message
    assert "value" in message
    assert "Use torch.where, or take the decision outside the model" in message


def test_error_of_the_model_itself_names_its_line() -> None:
    class Wrong(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ x

    message = refusal(Problem(Wrong(), squares, (numbers(4, WIDTH),)), TraceError)
    assert line_of(Wrong.forward, "@ x") in message
    assert "the arguments of the example do not fit the model, which fails on them without zbfx too" in message


def test_model_that_cannot_be_copied() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model.stream = (word for word in ("a", "b"))  # type: ignore[assignment]
    message = refusal(Problem(model, squares, (numbers(4, WIDTH),)), TraceError)
    assert "copy.deepcopy" in message
    assert "generator" in message


def test_weight_that_a_hook_computed_before_the_model_was_converted() -> None:
    layer = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    problem = Problem(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer).double(), squares, (numbers(4, WIDTH).double(),))
    assert refusal(problem, TraceError) == (
        f"the model replaces 1.weight, torch.float32 of shape {(WIDTH, WIDTH)}, by torch.float64 of shape "
        f"{(WIDTH, WIDTH)}: one graph cannot hold both. Keep shape and dtype, or keep the value out of the model. If "
        f"it only is what a forward made before the model was converted (model.double()), run the model once before "
        f"compile: model(*example_inputs) under torch.no_grad()"
    )
    with torch.no_grad():
        problem.model(numbers(4, WIDTH).double())
    compiled(problem, 2, 2).run_local()(*problem.inputs)


def test_write_into_an_input() -> None:
    class Writing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return self.layer(x)

    message = refusal(Problem(Writing(), squares, (numbers(4, WIDTH),)), TraceError)
    assert "inputs[0]" in message
    assert line_of(Writing.forward, "x += 1") in message
    assert "x.clone()" in message


def test_write_into_a_parameter() -> None:
    class Writing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
            return self.layer(x)

    message = refusal(Problem(Writing(), squares, (numbers(4, WIDTH),)), TraceError)
    assert "layer.weight" in message


def test_loss_that_does_not_require_grad() -> None:
    problem = mlp(2)
    problem.model.requires_grad_(False)
    message = refusal(problem, TraceError)
    assert "loss_fn" in message
    assert "does not require grad" in message
    assert "requires_grad of the parameters" in message


def test_detached_loss() -> None:
    problem = replace(mlp(2), loss_fn=lambda output, targets: squares(output - targets).detach())
    assert "detaches the loss" in refusal(problem, TraceError)


def test_complex_loss() -> None:
    problem = replace(mlp(2), loss_fn=lambda output, targets: squares(output - targets) * 1j)
    assert "loss_fn must return a real loss, as backward asks for; found torch.complex" in refusal(problem, TraceError)
    counting: Any = lambda output, targets: (output.sum(), (targets * 1j).sum())  # noqa: E731
    assert "found a count of torch.complex" in refusal(replace(mlp(2), loss_fn=counting), TraceError)
    real = replace(mlp(2), loss_fn=lambda output, targets: (squares(output - targets) * 1j).imag)
    assert_same(stepped(real, compiled(real, 2, 2)), reference(real, 2), 1e-6)


class Distributed(nn.Module):
    """Draws by the reparametrisation trick; a log-probability. What torch checks by default, a process may change."""

    def __init__(self, *, validate_args: bool) -> None:
        super().__init__()
        self.first, self.last, self.validate_args = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), validate_args

    def forward(self, x: Tensor) -> Tensor:
        found = torch.distributions.Normal(self.first(x), 1.0, validate_args=self.validate_args)
        return self.last(found.rsample() + found.log_prob(x))


def test_distributions_that_check_their_arguments() -> None:
    problem = Problem(Distributed(validate_args=True), squares, (numbers(4, WIDTH),))
    message = refusal(problem, TraceError)
    assert "decides by a tensor's value" in message
    assert "test_errors.py" in message
    assert "pass validate_args=False" in message
    problem = replace(problem, model=Distributed(validate_args=False))
    assert torch.isfinite(compiled(problem, 2, 2).run_local()(*problem.inputs))

    class Deciding(Distributed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.first(x).sum() > 0 else x

    assert "Use torch.where" in refusal(replace(problem, model=Deciding(validate_args=False)), TraceError)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_loss_that_is_a_parameter(name: str) -> None:
    class Returning(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return getattr(self.layer, name).view(-1)[0]

    message = refusal(Problem(Returning(), lambda output: output, (numbers(4, WIDTH),)), TraceError)
    assert "no gradient of any parameter" in message
    assert "loss.clone()" in message


def test_loss_that_is_no_scalar() -> None:
    problem = replace(mlp(2), loss_fn=lambda output, targets: (output - targets).square())
    message = refusal(problem, TraceError)
    assert "scalar loss" in message
    assert "shape (2, 8)" in message


def test_loss_that_is_a_class() -> None:
    message = refusal(replace(mlp(2), loss_fn=nn.MSELoss), ZbfxError)  # type: ignore[arg-type]
    assert message == (
        "loss_fn is an instance of a module, or a function; found the class MSELoss: call it to make an instance"
    )


@pytest.mark.parametrize("loss", [None, 3.0, {"loss": 1}])
def test_loss_that_is_no_tensor(loss: Any) -> None:
    message = refusal(replace(mlp(2), loss_fn=lambda output, targets: loss), TraceError)
    assert f"found {type(loss).__name__}" in message


def test_model_without_a_loss() -> None:
    message = refusal(replace(mlp(2), loss_fn=None, targets=()), TraceError)
    assert "the model must return a scalar loss" in message
    assert "Pass loss_fn=" in message


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


def test_attributes_that_cannot_be_copied_are_named() -> None:
    problem = mlp(2)
    problem.model.register_module("inner", nn.ReLU())
    problem.model.inner.seen = [problem.model[0](torch.ones(1, problem.model[0].in_features))]  # type: ignore
    message = refusal(problem, TraceError)
    assert "copy.deepcopy of it failed for inner.seen: RuntimeError: " in message


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


def test_infeasible_memory_limit_names_the_smallest() -> None:
    problem = gpt(2)
    with pytest.raises(NoFeasibleSchedule) as caught:
        compiled(problem, 2, 2, schedule="auto", mem_limit=1)
    limit = caught.value.smallest_limit
    assert limit > 1
    assert max(compiled(problem, 2, 2, schedule="auto", mem_limit=limit).schedule.peak_bytes) <= limit


def test_batch_that_does_not_divide() -> None:
    message = step_refusal(mlp(2), numbers(5, 8), numbers(5, 8))
    assert "inputs[0]" in message
    assert "(4, 8)" in message
    assert "2 microbatches of 2 each" in message
    assert "found (5, 8). Give a batch of that size, compile again" in message
    assert "drop_last" not in message


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_last_batch_that_is_shorter(rows: int) -> None:
    message = step_refusal(mlp(2), numbers(rows, 8), numbers(rows, 8))
    assert message == (
        f"inputs[0]: expected shape (4, 8) (2 microbatches of 2 each, as in the example), found ({rows}, 8). Leave out "
        f"a last batch that is shorter (DataLoader(..., drop_last=True)), compile again with another example "
        f"microbatch or microbatches=, or run sizes that divide into 2 microbatches with on_new_shape='recompile'"
    )


@pytest.mark.parametrize("on_new_shape", ["recompile", "symbolic"])
def test_new_shape_that_does_not_divide(on_new_shape: str) -> None:
    step = compiled(mlp(2), 2, 2).run_local(on_new_shape=on_new_shape)
    with pytest.raises(InputError) as caught:
        step(numbers(3, 8), numbers(3, 8))
    assert str(caught.value) == (
        "inputs[0]: expected 2 dimensions, the first divisible into 2 microbatches; found shape (3, 8). Leave out a "
        "last batch that is shorter (DataLoader(..., drop_last=True)), or pad it"
    )


def test_targets_that_are_too_short() -> None:
    message = step_refusal(mlp(2), numbers(4, 8), numbers(2, 8))
    assert "targets[0]" in message
    assert "found (2, 8)" in message


def test_other_inner_shape() -> None:
    assert "found (4, 7)" in step_refusal(mlp(2), numbers(4, 7), numbers(4, 8))


def test_other_dtype() -> None:
    message = step_refusal(mlp(2), numbers(4, 8).double(), numbers(4, 8))
    assert "expected dtype torch.float32" in message
    assert "found torch.float64" in message


def test_tensors_without_data_and_sparse_ones() -> None:
    x = numbers(4, 8).float()
    meta = "inputs[0]: expected a tensor with data, found one on the meta device"
    sparse = "inputs[0]: expected a dense tensor, found one of layout torch.sparse_coo. Pass .to_dense()"
    assert step_refusal(mlp(2), x.to("meta"), x) == meta
    assert step_refusal(mlp(2), x.to_sparse(), x) == sparse
    step = compiled(mlp(2), 2, 2).run_local()
    for found, message in ((x.to("meta"), meta), (x.to_sparse(), sparse)):
        with pytest.raises(InputError) as caught:
            step.evaluate(found, x)
        assert str(caught.value) == message
    with pytest.raises(InputError) as caught:
        step.run_split([((x[:2].to("meta"), x[:2]), {})] * 2)
    assert str(caught.value) == meta
    with pytest.raises(InputError) as caught:
        zbfx.compile(mlp(2).model, stages=1, microbatches=2, loss_fn=mean_squares, example_inputs=(x.to_sparse(),))
    assert str(caught.value) == sparse


@pytest.mark.parametrize("name", ["tolerance", "floor"])
def test_tolerances_of_check(name: str) -> None:
    pipe = compiled(mlp(2), 2, 2)
    for value in ("x", None, -1.0, float("nan")):
        with pytest.raises(
            ZbfxError, match=rf"^{name} is how far results may differ, .*, a number >= 0; found {value!r}"
        ):
            zbfx.check(pipe, **{name: value})  # type: ignore[arg-type]


def test_missing_and_unknown_arguments() -> None:
    message = step_refusal(mlp(2), numbers(4, 8))
    assert "expected (inputs[0], targets[0])" in message
    assert "found (inputs[0])" in message
    assert "mask" in step_refusal(mlp(2), numbers(4, 8), numbers(4, 8), mask=numbers(4))


@pytest.mark.parametrize("value", [None, 3.0, "text", [1.0, 2.0]])
def test_something_else_where_a_tensor_was(value: Any) -> None:
    assert "inputs[0]" in step_refusal(mlp(2), value, numbers(4, 8))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Any = 1.0, mode: str | None = None) -> Tensor:
        return torch.tanh(self.layer(x)) * scale


@pytest.mark.parametrize(
    "given",
    [{"scale": 3.0, "mode": "a"}, {"scale": 2, "mode": "a"}, {"scale": 2.0, "mode": "b"}, {"scale": 2.0, "mode": None}],
)
def test_value_that_the_graph_holds_must_stay(given: dict[str, Any]) -> None:
    problem = Problem(Scaled(), squares, (numbers(4, 8),), (), {"scale": 2.0, "mode": "a"})
    message = step_refusal(problem, *problem.inputs, **given)
    changed = "mode" if given["mode"] != "a" else "scale"
    assert message.startswith(f"{changed} was {problem.kwargs[changed]!r} when the model was traced")
    assert f"found {given[changed]!r}" in message
    assert "Pass it as a tensor, or compile again" in message


def test_tensor_where_a_value_was() -> None:
    problem = Problem(Scaled(), squares, (numbers(4, 8),), (), {"scale": 2.0})
    assert "scale was 2.0" in step_refusal(problem, *problem.inputs, scale=torch.tensor(2.0))


def test_tensor_that_every_microbatch_gets_whole() -> None:
    problem = Problem(Scaled(), squares, (numbers(4, 8),), (), {"scale": torch.ones(8)})
    pipe = zbfx.compile(
        problem.model,
        stages=1,
        microbatches=2,
        example_inputs=(numbers(2, 8),),
        example_kwargs={"scale": torch.ones(8)},
        loss_fn=squares,
        schedule="gpipe",
    )
    with pytest.raises(InputError, match="given to every microbatch whole") as caught:
        pipe.run_local()(numbers(4, 8), scale=torch.ones(4))
    assert "found (4,)" in str(caught.value)


def test_microbatches_that_are_cut_already() -> None:
    problem = mlp(2)
    step = compiled(problem, 2, 2).run_local()
    cut: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]]
    cut = [((x, y), {}) for x, y in zip(numbers(4, 8).chunk(2), numbers(4, 8, seed=2).chunk(2), strict=True)]
    loss = step.run_split(cut)
    assert torch.equal(loss, compiled(problem, 2, 2).run_local()(*problem.inputs, *problem.targets))
    with pytest.raises(InputError, match="expected 2 microbatches, found 1"):
        step.run_split(cut[:1])


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        (None, "found NoneType None"),
        ("ab", "found str 'ab'"),
        ([numbers(2, 8)] * 2, "found a tensor of shape (2, 8) for microbatch 0"),
        ([(numbers(2, 8), numbers(2, 8))] * 2, "found tuple (tensor("),
        ([((numbers(2, 8), numbers(2, 8)), {}), ((numbers(2, 8),), None)], "for microbatch 1"),
    ],
)
def test_microbatches_that_are_no_pairs(batches: Any, found: str) -> None:
    step = compiled(mlp(2), 2, 2).run_local()
    with pytest.raises(InputError) as caught:
        step.run_split(batches)
    assert "run_split takes a list of (positional arguments, keyword arguments), like ((inputs, targets), {}), one" in (
        str(caught.value)
    )
    assert found in str(caught.value)


class Weighted(nn.Module):
    """The classes are as many as the rows of a microbatch, and so are their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["x"] - 2 * batch["z"])


def weighted(output: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets, weights)


@pytest.mark.parametrize("on_new_shape", ["refuse", "recompile"])
def test_tensor_that_is_as_long_as_a_microbatch_by_coincidence(on_new_shape: str) -> None:
    x, targets, weights = numbers(12, 8), torch.arange(12) % 4, torch.arange(4) + 1.0
    pipe = zbfx.compile(
        Weighted(),
        stages=1,
        microbatches=3,
        example_inputs=({"x": x[:4], "z": x[4:8]},),
        example_targets=(targets[:4], weights),
        loss_fn=weighted,
        schedule="gpipe",
    )
    step = pipe.run_local(on_new_shape=on_new_shape)
    for call in (step, step.evaluate):
        with pytest.raises(InputError) as caught:
            call({"x": x, "z": x}, targets, weights)
        message = str(caught.value)
        assert message.startswith(
            "targets[1]: expected 3 microbatches of 4 each, as in the example, found (4,), the shape"
        )
        assert "class weights" in message
        assert "a buffer of the model or of a loss module" in message


def test_dicts_match_by_key() -> None:
    x, z = numbers(12, 8), numbers(12, 8, seed=3)
    problem = Problem(Weighted(), squares, ({"x": x, "z": z},))
    step = compiled(problem, 1, 3).run_local()
    expected = step({"x": x, "z": z})
    assert torch.equal(step({"z": z, "x": x}), expected)
    assert not torch.equal(step({"z": x, "x": z}), expected)
    for wrong in ({"x": x}, {"x": x, "z": z, "y": z}, {"x": x, "y": z}, [x, z]):
        with pytest.raises(InputError, match=r"expected \(inputs\[0\]\['x'\], inputs\[0\]\['z'\]\), found"):
            step(wrong)


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


def test_fault_in_a_local_step_names_rank_step_and_action(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mlp(2)
    step = compiled(problem, 2, 2).run_local()
    step(*problem.inputs, *problem.targets)
    call = next(call for call in step.engine.runners[1].calls if call.phase.name == "B1")
    monkeypatch.setattr(call, "take", failing)
    with pytest.raises(PipelineFault) as caught:
        step(*problem.inputs, *problem.targets)
    assert "rank 1, step 1, action B1.0 (stage 1, microbatch 0)" in str(caught.value)
    assert "ArithmeticError: on purpose" in str(caught.value)
    assert isinstance(caught.value.__cause__, ArithmeticError)


def failing(*_: Any) -> Any:
    raise ArithmeticError("on purpose")
