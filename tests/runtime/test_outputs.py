"""What forwards return: outputs by path, by function and by pytree, in both modes, equal to the model's own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbfx
from tests.support.live_bytes import measured_peaks
from tests.support.reference import default_dtype
from zbfx.plan import Kind
from zbfx.verify import verify

pytestmark = pytest.mark.usefixtures("known_traces")

M, ROWS, WIDTH, CLASSES = 3, 2, 6, 5


class Returning(nn.Module):
    """A model with hidden states, a number and None in its output, which can leave parts of it out."""

    def __init__(self, drop: float = 0.5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(drop)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, scale: Tensor | None = None, *, hidden: bool = True) -> dict[str, Any]:
        one = self.norm(self.first(x)).tanh()
        two = self.second(one).tanh()
        logits = self.head(self.dropout(two))
        logits = logits if scale is None else logits * scale[:, None]
        return {"logits": logits, "states": (one, two) if hidden else None, "size": logits[:, :1], "count": 7}


def loss_fn(output: dict[str, Any], labels: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], labels)


def chosen(output: dict[str, Any], labels: Tensor) -> Tensor:
    return output["logits"].log_softmax(-1).gather(-1, labels[:, None])[:, 0]


class Case:
    """One compiled pipeline for all tests of this file; `model` is a copy that plain PyTorch runs."""

    def __init__(self, schedule: str = "zb-h1", drop: float = 0.5) -> None:
        torch.manual_seed(0)
        self.x, self.labels = torch.randn(M * ROWS, WIDTH), torch.randint(CLASSES, (M * ROWS,))
        self.trained = Returning(drop)
        self.pipe = zbfx.compile(
            self.trained,
            stages=2,
            microbatches=M,
            example_inputs=(self.x[:ROWS],),
            example_targets=(self.labels[:ROWS],),
            loss_fn=loss_fn,
            schedule=schedule,
            check=False,
        )
        self.step = self.pipe.run_local(seed=3, on_new_shape="recompile")
        self.model = copy.deepcopy(self.trained)

    def plain(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with torch.no_grad():
            found: dict[str, Any] = self.model.eval()(*args, **kwargs)
        return found


@pytest.fixture(scope="module", params=["zb-h1", "zb-v-order"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with default_dtype(torch.float64):
        yield Case(request.param)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_all_that_the_model_returns(case: Case) -> None:
    found, expected = case.step.forward(case.x), case.plain(case.x)
    assert list(found) == list(expected)
    assert found["count"] == 7
    close(found["logits"], expected["logits"])
    close(found["states"], expected["states"])
    close(found["size"], expected["size"])
    assert found["size"].untyped_storage().nbytes() == found["size"].nbytes, "not the logits that it is a part of"


@pytest.mark.slow
def test_paths_functions_and_trees_of_them(case: Case) -> None:
    expected = case.plain(case.x)
    close(case.step.forward(case.x, outputs="logits"), expected["logits"])
    close(case.step.forward(case.x, outputs="states.-1"), expected["states"][1])
    one, two = case.step.forward(case.x, outputs=["states.0", "states.1"])
    close((one, two), expected["states"])
    close(case.step.forward(case.x, case.labels, outputs=chosen), chosen(expected, case.labels))
    found = case.step.forward(
        case.x, outputs={"shares": lambda out: out["logits"].softmax(-1), "rows": "logits"}, join=1
    )
    assert torch.equal(found["rows"], torch.cat(expected["logits"].chunk(M), 1))
    total = case.step.forward(case.x, outputs=lambda out: out["logits"].sum())
    close(total, torch.stack([part.sum() for part in expected["logits"].chunk(M)]))


def test_per_microbatch_and_any_number_of_them(case: Case) -> None:
    x = torch.randn(5 * ROWS, WIDTH)
    found = case.step.forward(x, outputs="logits", join=None)
    close(found, list(case.plain(x)["logits"].split(ROWS)))


@pytest.mark.slow
def test_beside_the_loss_of_an_evaluation(case: Case) -> None:
    loss, logits = case.step.evaluate(case.x, case.labels, outputs="logits")
    close(loss, case.step.evaluate(case.x, case.labels))
    close(logits, case.plain(case.x)["logits"])


def test_other_arguments_than_the_examples(case: Case) -> None:
    scale = torch.randn(M * ROWS)
    close(case.step.forward(case.x, scale=scale, outputs="logits"), case.plain(case.x, scale)["logits"])
    with pytest.raises(zbfx.InputError, match="Pass others of the model by name"):
        case.step.forward(case.x, scale, outputs="logits")
    assert case.step.forward(case.x, hidden=False)["states"] is None


@pytest.mark.slow
@pytest.mark.parametrize("option", ["refuse", "recompile", "symbolic"])
def test_other_sizes_follow_on_new_shape(case: Case, option: str) -> None:
    step = case.pipe.run_local(on_new_shape=option)
    for rows in (4, 5):
        x = torch.randn(M * rows, WIDTH)
        if option == "refuse" and rows % ROWS:
            with pytest.raises(zbfx.InputError, match="on_new_shape='recompile'"):
                step.forward(x, outputs="logits")
        else:
            close(step.forward(x, outputs="logits"), case.plain(x)["logits"])


def test_forwards_of_a_request_are_traced_once(case: Case) -> None:
    def ask(k: int) -> Tensor:
        return case.step.forward(case.x, outputs=lambda out: out["logits"] * k)

    before = len(case.step.pipelines)
    close(ask(2), 2 * case.plain(case.x)["logits"])
    ask(2)
    assert len(case.step.pipelines) == before + 1, "a lambda made anew is the one of before"
    close(ask(3), 3 * case.plain(case.x)["logits"])
    assert len(case.step.pipelines) == before + 2


WHICH = 1


@dataclass(slots=True)
class Part:
    factor: int = 1


class Picks:
    shared = 1

    def __init__(self) -> None:
        self.own, self.part, self.unread = 1, Part(), 1

    @property
    def factor(self) -> int:
        return self.own * self.shared * self.part.factor

    def scaled(self, out: dict[str, Any]) -> Tensor:
        return out["logits"] * self.factor


def scaled(out: dict[str, Any]) -> Tensor:
    return out["logits"] * WHICH


def test_functions_are_traced_again_once_what_they_read_has_changed(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    picks, held, logits = Picks(), {"by": [1]}, case.plain(case.x)["logits"]

    def is_traced(outputs: Any, factor: int) -> bool:
        before = len(case.step.pipelines)
        close(case.step.forward(case.x, outputs=outputs), factor * logits)
        return len(case.step.pipelines) > before

    def made_anew() -> Any:
        return lambda out: scaled(out)

    def by_list(out: dict[str, Any]) -> Tensor:
        return out["logits"] * held["by"][0]

    assert is_traced(made_anew(), 1)
    assert is_traced(by_list, 1)
    assert is_traced(picks.scaled, 1)
    monkeypatch.setattr(sys.modules[__name__], "WHICH", 2)
    held["by"][0] = 3
    picks.own = 5
    assert is_traced(made_anew(), 2)
    assert is_traced(by_list, 3)
    assert is_traced(picks.scaled, 5)
    monkeypatch.setattr(Picks, "shared", 2)
    assert is_traced(picks.scaled, 10)
    picks.part.factor = 7
    assert is_traced(picks.scaled, 70)
    picks.unread = 2
    assert not any([is_traced(made_anew(), 2), is_traced(by_list, 3), is_traced(picks.scaled, 70)])
    assert [is_traced(itemgetter("logits"), 1) for _ in range(2)] == [True, False]


def test_forwards_have_no_backward_and_hold_what_was_asked_for(case: Case) -> None:
    case.step.forward(case.x, outputs="logits")
    pipe = case.step.pipelines[-1]
    for found in (pipe for pipe in case.step.pipelines if not pipe.trains):
        assert {action.kind for order in found.schedule.ranks for action in order} == {Kind.F}
        assert all(memory.static.gradients == 0 for memory in found.memory)
        verify(found.stages, after="extract", given=None)
        verify(found.programs, after="generate", given=found.schedule)
    assert not any(phase.has_loss for stage in pipe.stages for phase in stage.phases.values())


@pytest.mark.slow
def test_memory_does_not_grow_with_microbatches_but_by_what_was_asked_for(case: Case) -> None:
    """By the walk of the programs, which an executor that counts live storages confirms to the byte."""
    peaks = []
    for count in (12, 20):
        x = torch.randn(count * ROWS, WIDTH)
        case.step.forward(x, outputs=lambda out: out["logits"].sum())
        pipe = replace(case.pipe, compiled=case.step.pipelines[-1])
        counters = measured_peaks(pipe, [[part] for part in x.split(ROWS)])
        assert [memory.highest.peak_bytes for memory in pipe.memory] == [counter.peak for counter in counters]
        peaks.append([counter.peak for counter in counters])
    for few, many in zip(*peaks, strict=True):
        assert many - few <= 8 * (20 - 12), "a scalar a microbatch"


@pytest.mark.slow
def test_nothing_changes_in_eval_mode_and_train_mode_is_that_of_a_plain_forward() -> None:
    with default_dtype(torch.float64):
        case = Case(drop=0.0)
        case.step.forward(case.x)
        for name, tensor in case.model.state_dict().items():
            assert torch.equal(case.trained.state_dict()[name], tensor), name
        found = case.step.forward(case.x, outputs="logits", train=True)
        with torch.no_grad():
            expected = torch.cat([case.model.train()(part)["logits"] for part in case.x.split(ROWS)])
        close(found, expected)
        for name, tensor in case.model.state_dict().items():
            close(case.trained.state_dict()[name], tensor)
        assert all(parameter.grad is None for parameter in case.trained.parameters())


def test_random_numbers_are_those_of_the_next_step_again_each_time(case: Case) -> None:
    one, two = (case.step.forward(case.x, outputs="logits", train=True) for _ in range(2))
    assert torch.equal(one, two)
    assert (one - case.plain(case.x)["logits"]).abs().max() > 1e-3
    case.trained.load_state_dict(case.model.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": "logit"}, "the model returns a dict with logits, states, size, count, which has no 'logit'"),
        ({"outputs": 3}, "outputs is a path of attributes, keys and indices .* found int 3"),
        ({"outputs": "count"}, "what is asked for has no tensor in it"),
        ({"outputs": lambda out: {"x": object()}}, r"outputs\['x'\] is a object: a pipeline returns tensors"),
        ({"outputs": "logits", "join": 2}, r"join=2 joins outputs along that dimension; found .* \(2, 5\)"),
        ({"join": "x"}, "join is the dimension along which"),
        ({"everywhere": 1}, "everywhere is True or False; found 1"),
        ({"train": "yes"}, "train is True or False; found 'yes'"),
    ],
)
def test_what_no_forward_returns_is_refused(case: Case, options: dict[str, Any], message: str) -> None:
    with pytest.raises(zbfx.ZbfxError, match=message):
        case.step.forward(case.x, **options)


class Counted(nn.Module):
    """Counts its forwards in a buffer, which it replaces, and returns the count of before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.count
        self.count = self.count + 1
        return self.linear(x), before


def test_a_buffer_is_returned_as_it_was_before_it_was_replaced() -> None:
    def loss_of(found: tuple[Tensor, Tensor]) -> Any:
        return found[0].square().mean(), {"before": zbfx.Metric(found[1][:], "sum")}

    x = torch.randn(4, 3)
    pipe = zbfx.compile(Counted(), stages=1, microbatches=2, example_inputs=(x[:2],), loss_fn=loss_of, check=False)
    step = pipe.run_local()
    assert step.forward(x, outputs="1").tolist() == [0, 1]
    step(x)
    assert step.metrics["before"].item() == 2 + 3


def test_a_keyword_that_means_two_things_is_refused() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor, train: Tensor | None = None) -> Tensor:
            return super().forward(x) * (1 if train is None else train)

    x = torch.randn(4, 3)
    step = zbfx.compile(
        Named(3, 3),
        stages=1,
        microbatches=2,
        example_inputs=(x[:2],),
        example_kwargs={"train": x[:2]},
        loss_fn=lambda out: out.square().mean(),
        check=False,
    ).run_local()
    with pytest.raises(zbfx.ZbfxError, match=r"train is an argument of step\.forward, and a keyword argument of the"):
        step.forward(x, train=True)


class AddsInPlace(nn.Module):
    """Logits to which a bias is added where they are, beside their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(CLASSES))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.first(x))
        logits += self.bias
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_an_output_that_was_written_where_it_is() -> None:
    torch.manual_seed(0)
    model, x, labels = AddsInPlace().double(), torch.randn(4, WIDTH, dtype=torch.float64), torch.tensor([0, 3, 1, 4])
    batch = {"x": x, "labels": labels}
    example = {name: value[:2] for name, value in batch.items()}
    step = zbfx.compile(model, stages=2, microbatches=2, example_kwargs=example, check=False).run_local()
    loss, logits = step.evaluate(x=x, labels=labels, outputs="logits")
    expected = model(x, labels)
    close((loss, logits), (expected["loss"].detach(), expected["logits"].detach()))
