"""Plans on disk: a loaded pipeline computes the bits of the compiled one, without a trace; other models are refused.

Run: pytest tests/plans/test_plans.py (CPU, one process).
"""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbfx
from tests.support.models import Maker, Problem, gpt, mean_squares, mixed, mlp, numbers, squares
from tests.support.reference import compiled, gradients
from tests.support.user_passes import sine_for_tanh
from zbfx._torch.tracing import capture_joint
from zbfx.compiled import Compiled
from zbfx.errors import ZbfxError
from zbfx.graphs import Phase, Stage
from zbfx.plans.conforming import conforms, kinds_within
from zbfx.plans.files import read_plan, write_plan
from zbfx.plans.operators import found_at
from zbfx.plans.saved import kinds
from zbfx.replicas import replicated

STEPS = 3


class Tied(nn.Module):
    """One weight in its first and its last layer, a constant in its code, a buffer that it writes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(6, 6)
        self.middle = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.BatchNorm1d(6), nn.Dropout(0.2))
        self.config = SimpleNamespace(scale=2.0)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, options: dict[str, Any]) -> Tensor:
        self.calls += 1
        x = self.middle(torch.tanh(self.ends(x))) * self.config.scale + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        return self.ends(x) + options["shift"][0]


def tied(microbatches: int) -> Problem:
    torch.manual_seed(0)
    rows = 2 * microbatches
    kwargs = {"options": {"shift": [numbers(rows, 6, seed=3), 1.5]}}
    return Problem(Tied(), mean_squares, (numbers(rows, 6),), (numbers(rows, 6, seed=2),), kwargs)


def counted_loss(output: Tensor, targets: Tensor) -> Any:
    kept = targets > 0
    return (
        F.mse_loss(output, targets, reduction="none")[kept].sum()
        if False
        else (
            (F.mse_loss(output, targets, reduction="none") * kept).sum(),
            kept.sum(),
        )
    )


def counted(microbatches: int) -> Problem:
    return replace(mlp(microbatches), loss_fn=counted_loss)


KINDS: list[tuple[Maker, dict[str, Any]]] = [
    (tied, {}),
    (mixed, {"schedule": "zb-v-order", "stages_per_rank": 2}),
    (counted, {"schedule": "auto", "mem_limit": "1.5x"}),
    (gpt, {"schedule": "1f1b", "recompute": "cheap"}),
]


class Traced(AssertionError):
    """A trace, or a plan, where there should be none."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a graph was captured and orders were planned."""
    found = {"traces": 0, "plans": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr("zbfx._torch.tracing.capture_joint", counting("traces", capture_joint))
    for module in ("candidate", "variants"):
        monkeypatch.setattr(f"zbfx.{module}.plan", counting("plans", zbfx.schedule.plan))
    return found


def trained(problem: Problem, pipe: zbfx.Pipeline) -> list[Tensor]:
    """Losses, gradients and buffers of some steps, from the same beginning each time."""
    before = copy.deepcopy(problem.model.state_dict())
    step = pipe.run_local(seed=3)
    found: list[Tensor] = []
    for _ in range(STEPS):
        problem.model.zero_grad()
        found.append(step(*problem.inputs, *problem.targets, **problem.kwargs))
        found += [gradient.clone() for gradient in gradients(problem.model).values() if gradient is not None]
        found += [buffer.clone() for buffer in problem.model.buffers()]
    problem.model.load_state_dict(before)
    return found


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > STEPS and all(map(torch.equal, one, other))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "options"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_loaded_plan_has_the_bits_of_the_compiled_one(
    tmp_path: Path, counts: dict[str, int], make: Maker, options: dict[str, Any]
) -> None:
    problem, file = make(4), tmp_path / "plan"
    pipe = compiled(problem, 2, 4, **options)
    pipe.save(file)
    once = dict(counts)
    assert once["traces"] >= 1
    assert once["plans"] >= 1
    loaded = zbfx.load_plan(file, problem.model, problem.loss_fn)
    assert same_bits(trained(problem, pipe), trained(problem, loaded))
    assert counts == once, "a loaded plan is neither traced nor planned"
    assert (loaded.schedule, loaded.memory) == (pipe.schedule, pipe.memory)
    assert [program.code for program in loaded.programs] == [program.code for program in pipe.programs]
    assert zbfx.check(loaded)


def test_what_a_plan_leaves_to_its_steps(tmp_path: Path, counts: dict[str, int]) -> None:
    """Further shapes and evaluation are traced when they are first met, as after compile."""
    problem, file = mlp(4), tmp_path / "plan"
    compiled(problem, 2, 4, check=False).save(file)
    step = zbfx.load_plan(file, problem.model, problem.loss_fn).run_local(on_new_shape="recompile")
    before = counts["traces"]
    step.evaluate(*problem.inputs, *problem.targets)
    step(*(torch.cat([tensor, tensor]) for tensor in (*problem.inputs, *problem.targets)))
    assert counts["traces"] == before + 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plans") / "plan"
    compiled(tied(4), 2, 4, check=False).save(file)
    return file


def with_changed(change: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        model = tied(4).model
        return change(model) or model

    return make


def set_to(path: str, value: Any) -> Callable[[], Any]:
    def change(model: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            model = getattr(model, owner)
        setattr(model, name, value)

    return with_changed(change)


class TiedOtherwise(Tied):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, options: dict[str, Any]) -> Tensor:
        return super().forward(x, mask, options=options) * 2


def of_another_source() -> nn.Module:
    model = tied(4).model
    model.__class__ = TiedOtherwise
    return model


OTHERS: list[tuple[Callable[[], nn.Module], str]] = [
    (with_changed(lambda model: model.eval()), "the model differs.*in train mode, found .*in eval mode"),
    (with_changed(lambda model: model.double()), r"tensor ends.weight differs.*float32 .*found.*float64"),
    (set_to("middle.1", nn.Linear(6, 6, bias=False)), "tensor middle.1.bias differs.*found none"),
    (set_to("middle.4.p", 0.3), "module middle.4: p differs.*expected 0.2, found 0.3"),
    (set_to("config.scale", 3.0), "the model: config differs.*expected .*found"),
    (with_changed(lambda model: [model.ends.weight.requires_grad_(False)].clear()), "tensor ends.weight differs"),
    (with_changed(lambda model: model.ends.register_forward_hook(print) and None), "module ends: hooks differs"),
    (of_another_source, "the model differs.*Tied in.*TiedOtherwise"),
]


@pytest.mark.parametrize(("make", "message"), OTHERS)
def test_another_model_is_refused_by_name(saved: Path, make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ZbfxError, match=message) as caught:
        zbfx.load_plan(saved, make(), mean_squares)
    assert "or compile again" in str(caught.value)


def test_another_source_or_loss_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZbfxError, match="the loss differs"):
        zbfx.load_plan(saved, tied(4).model, squares)
    monkeypatch.setattr("zbfx.plans.identity.source_of", lambda value: "another text")
    with pytest.raises(ZbfxError, match=r"source of .*Tied differs"):
        zbfx.load_plan(saved, tied(4).model, mean_squares)


@pytest.mark.parametrize("name", ["own_version", "torch_version"])
def test_another_version_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(f"zbfx.plans.saved.{name}", lambda: "9.9")
    with pytest.raises(ZbfxError, match=rf"is of {name.partition('_')[0].replace('own', 'zbfx')} .*; this is .* 9.9"):
        zbfx.load_plan(saved, tied(4).model, mean_squares)


def test_passes_are_given_again(tmp_path: Path) -> None:
    problem, given = mlp(4), [zbfx.Pass("joint", sine_for_tanh)]
    pipe = compiled(problem, 2, 4, passes=given, check=False)
    pipe.save(tmp_path / "plan")
    with pytest.raises(ZbfxError, match=r"compiled with the passes \[sine_for_tanh at joint .*; found \[\]"):
        zbfx.load_plan(tmp_path / "plan", problem.model, problem.loss_fn)
    loaded = zbfx.load_plan(tmp_path / "plan", problem.model, problem.loss_fn, passes=given)
    assert same_bits(trained(problem, pipe), trained(problem, loaded))


def test_autocast_and_switches_are_kept(tmp_path: Path) -> None:
    problem = mlp(4)
    with torch.autocast("cpu", torch.bfloat16):
        pipe = compiled(problem, 2, 4, check=False)
    pipe.save(tmp_path / "plan")
    loaded = zbfx.load_plan(tmp_path / "plan", problem.model, problem.loss_fn)
    assert same_bits(trained(problem, pipe), trained(problem, loaded))
    assert loaded.source.modes.autocasts == (("cpu", torch.bfloat16),)
    evaluated = [p.run_local().evaluate(*problem.inputs, *problem.targets) for p in (pipe, loaded)]
    assert torch.equal(*evaluated)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, pair: Pair) -> Tensor:
        return self.layers(pair.x + pair.y)


def test_what_a_file_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    file, problem = tmp_path / "plan", mlp(4)
    pairs = Problem(OfPairs(), squares, (Pair(numbers(8, 6), numbers(8, 6)),))
    with pytest.raises(ZbfxError, match=r"structure.* is Pair\(.*, a .*Pair, which a plan on disk cannot hold"):
        compiled(pairs, 2, 4, check=False).save(file)
    one = compiled(problem, 2, 4, check=False)
    with pytest.raises(ZbfxError, match=r"found one that is a function.*schedule=pipe.schedule"):
        compiled(problem, 2, 4, check=False, schedule=lambda costs, microbatches: one.schedule.ranks).save(file)
    with torch.device("cpu"), pytest.raises(ZbfxError, match="without function modes"):
        compiled(problem, 2, 4, check=False).save(file)
    assert not list(tmp_path.iterdir()), "a file is whole, or there is none"
    with pytest.raises(ZbfxError, match=r"cannot write the plan .*No such file"):
        one.save(tmp_path / "none" / "plan")


def test_replicas_of_a_pipeline_are_kept(tmp_path: Path) -> None:
    problem = tied(4)
    pipe = compiled(problem, 2, 4, check=False).replicated(2)
    pipe.save(tmp_path / "plan")
    loaded = zbfx.load_plan(tmp_path / "plan", problem.model, problem.loss_fn)
    assert loaded.compiled.reductions[0].buckets == pipe.compiled.reductions[0].buckets
    assert [program.code for program in loaded.programs] == [program.code for program in pipe.programs]
    assert replicated(loaded.compiled, 2).reductions[0].trailing == pipe.compiled.reductions[0].trailing


def rewritten(file: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A file with another document, and the hash of it."""
    contents = read_plan(file)
    change(contents.document)
    write_plan(to, contents.document, [torch.frombuffer(bytearray(o), dtype=torch.uint8) for o in contents.octets])
    return to


def nodes_of(document: dict[str, Any]) -> list[Any]:
    fields = document["compiled"]["record"][1]
    return fields["joint"]["record"][1]["graph"]["graph"]


def set_node(place: int, entry: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(document: dict[str, Any]) -> None:
        nodes_of(document)[place][entry] = value

    return change


MARK = Path("/tmp/zbfx_was_here")
HOSTILE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (set_node(-2, 2, "os.system.default"), "which is not among the operators"),
    (set_node(-2, 2, "aten.from_file.default"), "which is not among the operators"),
    (set_node(-2, 2, "aten.save.default"), "which is not among the operators"),
    (set_node(-2, 2, "builtins.eval"), "which is not among the operators"),
    (set_node(-2, 1, "x = __import__('os')"), "have names of Python; found"),
    (set_node(0, 2, "x=__import__('os').mknod('/tmp/zbfx_was_here')"), "have names of Python; found"),
    (set_node(-2, 4, {"map": [["x=print('hello'), y", 1]]}), "have names of Python; found"),
    (set_node(-2, 3, ["a comment\nimport os"]), "one line and no control characters"),
    (set_node(0, 0, 7), "index out of range"),
    (set_node(-2, 3, [{"node": 10**6}]), "index out of range"),
    (lambda document: document["compiled"].update(record=["Popen", {"args": "true"}]), "Popen"),
    (lambda document: document["compiled"]["record"][1].pop("stages"), "a Compiled has the fields"),
    (lambda document: document["compiled"]["record"][1].update(levels="none"), r"Compiled\.levels is a tuple"),
    (lambda document: document["compiled"]["record"][1].update(joint={"list": []}), r"Compiled\.joint is a "),
    (lambda document: document.update(digest={}), "are not those that were saved"),
    (lambda document: document.update(more=1), "found .*more"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_a_hostile_file_is_refused(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(ZbfxError, match=message):
        zbfx.load_plan(rewritten(saved, tmp_path / "plan", change), tied(4).model, mean_squares)
    assert not MARK.exists()


def test_a_damaged_file_is_refused(saved: Path, tmp_path: Path) -> None:
    file, whole = tmp_path / "plan", saved.read_bytes()
    for content in (b"", b"PK", whole[:-30], whole[: len(whole) // 2], whole.replace(b"tensors/0", b"tensors/1")):
        file.write_bytes(content)
        with pytest.raises(ZbfxError, match=r"is no plan of pipe.save, or a damaged one"):
            zbfx.load_plan(file, tied(4).model, mean_squares)
    with pytest.raises(ZbfxError, match=r"cannot read the plan .*No such file"):
        zbfx.load_plan(tmp_path / "none", tied(4).model, mean_squares)


def test_a_packed_bomb_is_refused_before_it_is_unpacked(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan"
    for text, message in ((b" " * (1 << 27), "bytes, packed as"), (b"[" * (1 << 23), "are not those that were")):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("sha256", "0" * 64)
            archive.writestr("plan.json", text, zipfile.ZIP_DEFLATED)
        with pytest.raises(ZbfxError, match=message):
            zbfx.load_plan(file, tied(4).model, mean_squares)


def test_the_text_is_data(saved: Path) -> None:
    """Every graph, record and number is JSON; the rest are bytes of tensors."""
    with zipfile.ZipFile(saved) as archive:
        document = json.loads(archive.read("plan.json"))
        assert set(archive.namelist()) == {"sha256", "plan.json", *(f"tensors/{k}" for k in range(4))}
    assert document["torch"] == torch.__version__.partition("+")[0]


def test_operators_are_looked_up_in_torch_alone() -> None:
    assert found_at("aten.add.Tensor", ()) is torch.ops.aten.add.Tensor
    for name in ("aten.from_file.default", "aten.from_file.out", "aten.add.out", "aten.set_.source_Tensor"):
        assert found_at(name, ()) is None, name
    for name in ("aten.save.default", "aten.manual_seed.default", "aten.warn.default"):
        assert found_at(name, ()) is None, name
    for name in ("aten.__class__.__mro__", "load_library.__call__.x", "symm_mem.nvshmem_put.default", "aten.add"):
        assert found_at(name, ()) is None, name


def test_kinds_follow_the_fields_of_records() -> None:
    assert {Compiled, Stage, Phase} <= {*kinds().values()}
    assert kinds_within(Phase).keys() == {"Phase", "Kind", "Port", "Role", "CallBytes"}


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, int | None, True),
        ("1", int | None, False),
        (1, float, True),
        (Fraction(1, 3), int | float | Fraction, True),
        ((1, 2), tuple[int, ...], True),
        ((1, "2"), tuple[int, ...], False),
        ((1,), tuple[int, str], False),
        ((1, "2"), tuple[int, str], True),
        ([1], tuple[int, ...], False),
        ({"a": 1}, dict[str, int], True),
        ({1: 1}, dict[str, int], False),
        (frozenset({"a"}), frozenset[str], True),
        (object(), Any, True),
        (0, None, False),
    ],
)
def test_values_conform_to_annotations(value: Any, hint: Any, expected: bool) -> None:
    assert conforms(value, hint) is expected
