"""`step.save` and `step.load` in one process; tests/processes/test_checkpoints.py has those over several."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim.swa_utils import AveragedModel

import zbfx
from tests.checkpoint.kills import kill_often
from tests.checkpoint.models import different, on_meta, plain, plain_pipe, tensors
from zbfx.checkpoint.distributed import read_into, table_of
from zbfx.checkpoint.optimizers import optimizer_state
from zbfx.checkpoint.parts import PartSaver, Piece, boxes_of
from zbfx.errors import ZbfxError
from zbfx.runtime.step import Step

pytestmark = pytest.mark.usefixtures("known_traces")


def stepping(seed: int = 0, stages: int = 2, **options: Any) -> tuple[nn.Module, Step]:
    torch.manual_seed(seed)
    model = plain()
    return model, plain_pipe(model, stages, **options).run_local(seed=seed)


def trained(step: Step, optimizer: Any, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(step.count)
        x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
        losses.append(float(step(x, y)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(step: Step) -> torch.optim.Optimizer:
    return torch.optim.AdamW(step.parameters(), lr=0.05, amsgrad=True)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (3, 1, 4), (2, 3, 2, 2)])
def test_ranges_of_elements_are_boxes(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for begin, end in itertools.combinations(range(whole.numel() + 1), 2):
        found = []
        for offsets, sizes in boxes_of(shape, begin, end):
            box = whole
            for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
                box = box.narrow(dim, at, size)
            found += box.flatten().tolist()
        assert found == list(range(begin, end))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_pieces_of_memory_are_boxes_of_the_tensor(order: tuple[int, ...]) -> None:
    """Whatever the strides, as with channels last."""
    shape = (2, 3, 2, 2)
    memory = torch.arange(24)
    permuted = memory.view([shape[dim] for dim in order])
    tensor = permuted.permute([order.index(dim) for dim in range(4)])
    assert tuple(tensor.shape) == shape
    for begin, end in [(0, 24), (5, 19), (7, 8), (11, 13)]:
        piece = Piece("weight", shape, tensor.stride(), begin, end, 2)
        found = torch.full(shape, -1)
        flat = torch.cat([torch.zeros(2, dtype=torch.long), memory[begin:end]])
        for offsets, block in piece.part(flat).blocks.items():
            found[tuple(slice(at, at + size) for at, size in zip(offsets, block.shape, strict=True))] = block
        inside = (tensor >= begin) & (tensor < end)
        assert torch.equal(found, torch.where(inside, tensor, -1))


def test_parts_are_written_and_read(tmp_path: Path) -> None:
    """Of two processes with a part each, read as three."""
    whole = torch.arange(24.0).view(4, 6)
    ranges = ((0, 11), (11, 24))
    parts = [Piece("w", (4, 6), (6, 1), begin, end, 0).part(whole.flatten()[begin:end]) for begin, end in ranges]
    planners = [PartSaver() for _ in parts]
    for planner, part in zip(planners, parts, strict=True):
        planner.set_up_planner({"w": part})
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    writer = FileSystemWriter(tmp_path)
    plans = writer.prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for plan, planner in zip(plans, planners, strict=True)
    ]
    writer.finish(metadata, results)
    for begin, end in ((0, 5), (5, 15), (15, 24)):
        flat = torch.zeros(end - begin)
        part = Piece("w", (4, 6), (6, 1), begin, end, 0).part(flat)
        read_into(tmp_path, table_of(tmp_path), {"w": part})
        assert torch.equal(flat, whole.flatten()[begin:end])


def test_training_goes_on_as_if_unbroken(tmp_path: Path) -> None:
    """Another placement, another seed before, an average of the model, a schedule of the learning rate."""
    found: dict[str, Any] = {}
    for name, stages in (("unbroken", 2), ("broken", 3)):
        model, step = stepping(seed=0 if name == "unbroken" else 1, stages=stages)
        optimizer = adamw(step)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
        average = AveragedModel(model)
        objects: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "average": average}
        if name == "unbroken":
            for _ in range(3):
                trained(step, optimizer, 1)
                scheduler.step()
                average.update_parameters(model)
            assert step.save(tmp_path, **objects).wait() == tmp_path / "step-3"
        else:
            assert step.load(tmp_path, **objects) == tmp_path / "step-3"
            assert step.count == 3
        losses = []
        for _ in range(3):
            losses += trained(step, optimizer, 1)
            scheduler.step()
            average.update_parameters(model)
        state = {f"{k} {n}": t for k, s in optimizer.state_dict()["state"].items() for n, t in s.items()}
        found[name] = losses, tensors(model), tensors(average), state
    (losses, *unbroken), (others, *broken) = found.values()
    assert losses == others
    assert [different(one, other) for one, other in zip(unbroken, broken, strict=True)] == [[], [], []]


def test_weights_of_a_checkpoint_fill_a_model(tmp_path: Path) -> None:
    model, step = stepping()
    trained(step, optimizer := adamw(step))
    step.save(tmp_path, optimizer=optimizer)
    other = on_meta(plain)
    plain_pipe(other, 3).run_local(weights=tmp_path)
    assert different(tensors(other), tensors(model)) == []


def test_last_checkpoints_are_kept(tmp_path: Path) -> None:
    """Two of one count are two; what a killed process left goes."""
    _, step = stepping()
    optimizer = adamw(step)
    (tmp_path / ".partial-7-abc").mkdir()
    for _ in range(3):
        trained(step, optimizer, 1)
        step.save(tmp_path, keep=2, optimizer=optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    step.save(tmp_path, keep=2, optimizer=optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-3.1"]
    assert step.load(tmp_path, optimizer=optimizer) == tmp_path / "step-3.1"
    assert step.load(tmp_path / "step-3", optimizer=optimizer) == tmp_path / "step-3"
    step.count = 1
    with pytest.raises(ZbfxError, match=r"has step-3.1, which would stay its newest"):
        step.save(tmp_path, optimizer=optimizer)


def test_checkpoint_written_aside_is_of_its_moment(tmp_path: Path) -> None:
    model, step = stepping()
    optimizer = adamw(step)
    trained(step, optimizer)
    before = {name: tensor.clone() for name, tensor in tensors(model).items()}
    saved = step.save(tmp_path, async_=True, optimizer=optimizer)
    trained(step, optimizer)
    assert saved.wait() == tmp_path / "step-2"
    assert saved.is_done
    assert different(tensors(model), before) != []
    step.load(tmp_path, optimizer=optimizer)
    assert different(tensors(model), before) == []
    step.save(tmp_path / "closed", async_=True, optimizer=optimizer)
    step.close()
    assert (tmp_path / "closed" / "step-2").is_dir()


def test_what_cannot_be_written_is_said_and_harms_nothing(tmp_path: Path) -> None:
    _, step = stepping()
    optimizer = adamw(step)
    (tmp_path / "file").write_text("")
    with pytest.raises(ZbfxError, match=r"was not saved: .*Those before are as they were"):
        step.save(tmp_path / "file", optimizer=optimizer)
    trained(step, optimizer)
    step.save(tmp_path, optimizer=optimizer)


def test_validated_optimizer_has_its_verdict_back(tmp_path: Path) -> None:
    def optimizer_of(step: Step) -> zbfx.optim.PostValidated:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return zbfx.optim.PostValidated(adamw(step), step, max_norm=0.1, grad_scaler=scaler)

    _, step = stepping()
    optimizer = optimizer_of(step)
    trained(step, optimizer, 3)
    step.save(tmp_path, optimizer=optimizer)
    assert optimizer.grad_scaler is not None
    assert optimizer.grad_scaler.get_scale() == 16.0
    _, step = stepping(seed=1, stages=3)
    other = optimizer_of(step)
    step.load(tmp_path, optimizer=other)
    assert (other.counts, other.verdict, other.grad_scaler.state_dict()) == (  # type: ignore[union-attr]
        optimizer.counts,
        optimizer.verdict,
        optimizer.grad_scaler.state_dict(),
    )


class Wide(torch.optim.Optimizer):
    """Keeps float32 beside parameters in bfloat16, which torch's own `load_state_dict` would cast."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.float())
            master.sub_(0.1 * p.grad.float())
            p.copy_(master)
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


def test_state_keeps_its_dtype(tmp_path: Path) -> None:
    def bf16_step() -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2))).bfloat16()
        rows = torch.ones(2, 6, dtype=torch.bfloat16)
        return plain_pipe(model, 2, example=rows).run_local()

    step = bf16_step()
    optimizer = Wide(step.parameters())
    step(torch.ones(4, 6, dtype=torch.bfloat16), torch.zeros(4, 6, dtype=torch.bfloat16))
    optimizer.step()
    step.save(tmp_path, optimizer=optimizer)
    other_step = bf16_step()
    other = Wide(other_step.parameters())
    other_step.load(tmp_path, optimizer=other)
    for p, q in zip(step.parameters(), other_step.parameters(), strict=True):
        assert optimizer.state[p]["steps"] == other.state[q]["steps"] == 1
        masters = {"it": optimizer.state[p]["master"]}, {"it": other.state[q]["master"]}
        assert masters[0]["it"].dtype is torch.float32
        assert different(*masters) == []


class Holding:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_objects_are_plain_data(tmp_path: Path) -> None:
    _, step = stepping()
    kept = {"epoch": 3, "order": torch.randperm(5), "seen": Counter("aab"), "nested": [{"x": (1, 2.5, None)}]}
    step.save(tmp_path, loader=Holding(kept))
    loader = Holding({})
    step.load(tmp_path, loader=loader)
    assert {name: value for name, value in loader.state.items() if name != "order"} == {
        name: value for name, value in kept.items() if name != "order"
    }
    assert torch.equal(loader.state["order"], kept["order"])  # type: ignore[arg-type]
    with pytest.raises(ZbfxError, match="the state of loader holds more than tensors"):
        step.save(tmp_path, loader=Holding({"path": Path("x"), "of": Holding}))


def refusal(call: Any, *arguments: Any, **objects: Any) -> str:
    with pytest.raises(ZbfxError) as refused:
        call(*arguments, **objects)
    return str(refused.value)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    model, step = stepping()
    optimizer = adamw(step)
    trained(step, optimizer)
    step.save(tmp_path, optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in tensors(model).items()}
    assert "no checkpoint of step.save that is whole" in refusal(step.load, tmp_path / "none")
    assert step.load(tmp_path / "none", missing_ok=True) is None
    more = {"scheduler": Holding({}), "optimizer": optimizer}
    assert "no state of scheduler, but of optimizer" in refusal(step.load, tmp_path, **more)
    assert "was saved from an optimizer" in refusal(step.load, tmp_path, optimizer=Holding({}))
    assert "found int 3" in refusal(step.save, tmp_path, loader=3)
    assert "keep is how many checkpoints" in refusal(step.save, tmp_path, keep=0)
    assert "model is the name of what the step itself saves" in refusal(step.save, tmp_path, model=Holding({}))
    strange = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert "optimizer has 1 parameters that are not of this step" in refusal(step.save, tmp_path, optimizer=strange)
    some = torch.optim.SGD(list(step.parameters())[:1])
    step.save(tmp_path / "some", optimizer=some)
    assert "has no state of" in refusal(step.load, tmp_path / "some", optimizer=optimizer)
    parameters = list(step.parameters())
    split: list[dict[str, Any]] = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}]
    groups = torch.optim.AdamW(split, lr=0.2)
    step.save(tmp_path / "groups", optimizer=groups)
    assert "has parameters of the groups [0, 1]" in refusal(step.load, tmp_path / "groups", optimizer=optimizer)
    step.count = 0
    with pytest.warns(UserWarning, match="also has the state of optimizer, which is not loaded"):
        step.load(tmp_path)
    assert step.count == 2
    assert different(tensors(model), before) == []
    wide = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    other = plain_pipe(wide, 1).run_local()
    assert "has no 1.weight: it was saved from another model" in refusal(other.load, tmp_path)


def test_optimizer_that_runs_with_the_step_is_not_left_out(tmp_path: Path) -> None:
    _, step = stepping()
    optimizer = zbfx.optim.PostValidated(adamw(step), step)
    for call in (step.save, step.load):
        assert "is not among what is saved or loaded" in refusal(call, tmp_path)
    assert optimizer.counts.steps == 0


def test_the_empty_parameter_of_a_rank_without_any_is_not_saved() -> None:
    empty, other = nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(1))
    state = optimizer_state("adam", torch.optim.Adam([empty]), [], frozenset())
    assert (state.tensors, state.plain["members"]) == ({}, {})
    with pytest.raises(ZbfxError, match="adam has 1 parameters that are not of this step"):
        optimizer_state("adam", torch.optim.Adam([empty, other]), [], frozenset())


@pytest.mark.parametrize(
    ("pattern", "text"), [("*.distcp", "is damaged"), ("training.pt", "damaged"), (".metadata", "no table of contents")]
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, pattern: str, text: str) -> None:
    _, step = stepping()
    optimizer = adamw(step)
    trained(step, optimizer)
    path = step.save(tmp_path, optimizer=optimizer).wait()
    (file,) = path.glob(pattern)
    for size in (file.stat().st_size // 2, 0):
        file.write_bytes(file.read_bytes()[:size])
        assert text in (said := refusal(step.load, tmp_path, optimizer=optimizer))
        assert str(path) in said
    trained(step, optimizer)


@pytest.mark.slow
def test_killed_saves_lose_and_mix_nothing() -> None:
    """`python -m tests.checkpoint.kills` does it more often."""
    kinds, wrong = kill_often(6, seed=1)
    assert wrong == []
    assert kinds["had a whole one"] > 0
