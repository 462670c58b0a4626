"""A script of transformers' `Trainer` trains alike with and without a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.trainer_callback import TrainerCallback

import zbfx
from tests.hf import script
from tests.hf.script import STEPS, Points, Regression, Rows, arguments, history, llama, trainer, with_adapters
from tests.support.pool import Launch
from zbfx.checkpoint.distributed import stored_tensors, table_of
from zbfx.hf import PipelineTrainer

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore::FutureWarning")]

LOCAL: dict[str, Any] = {"compile_options": {"stages": 3, "schedule": "zb-h1"}}
TOLERANCE = {"loss": 1e-6, "eval_loss": 1e-6, "learning_rate": 0.0, "grad_norm": 1e-5}  # relative, in float32
TOLERANCE |= {"eval_right": 0.0, "eval_spread": 1e-5}


def assert_same(found: Mapping[str, list[float]], expected: Mapping[str, list[float]]) -> None:
    assert expected["loss"]
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE[name], abs=0.0), name


@pytest.mark.slow
def test_losses_are_those_without_a_pipeline(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """20 steps over two processes, with evaluations; then from a checkpoint in the middle, over three ranks."""
    folder = tmp_path_factory.mktemp("trainer")
    plain = trainer(transformers.Trainer, folder / "plain", llama(), {}, compute_metrics=script.measured)
    plain.train()
    expected = history(plain)
    assert [len(expected[name]) for name in ("loss", "eval_loss", "eval_spread")] == [STEPS, STEPS // 5, STEPS // 5]
    for found in launch(2, script.over_ranks, 2, str(folder / "ranks")).values():
        assert_same(found, expected)
    names = sorted(path.name for path in (folder / "ranks").iterdir())
    assert names == ["checkpoint-10", "checkpoint-20", "final"]
    other = transformers.AutoModelForCausalLM.from_pretrained(folder / "ranks" / "final")
    for value, wanted in zip(other.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)  # Adam divides roundings by small roots
    resumed = trainer(PipelineTrainer, folder / "ranks", llama(), {"eval_steps": 10}, **LOCAL)
    resumed.compute_metrics = script.measured
    resumed.train(resume_from_checkpoint=str(folder / "ranks" / "checkpoint-10"))
    assert_same(history(resumed), expected)


@pytest.mark.slow
def test_adapters_alone_are_saved(tmp_path: Path) -> None:
    """A model of peft, on resume too."""
    peft = pytest.importorskip("peft")
    options = {"max_steps": 6, "eval_steps": 3, "save_steps": 3, "learning_rate": 0.3}
    plain = trainer(transformers.Trainer, tmp_path / "plain", with_adapters(), options)
    plain.train()
    run = trainer(PipelineTrainer, tmp_path / "run", with_adapters(), options, **LOCAL)
    run.train()
    assert_same(history(run), history(plain))
    run = trainer(PipelineTrainer, tmp_path / "run", with_adapters(), options, compile_options={"stages": 2})
    run.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_same(history(run), history(plain))
    run.save_model(str(tmp_path / "final"))
    assert not list((tmp_path / "run").glob("**/model*.safetensors"))
    (folder,) = (tmp_path / "run" / "checkpoint-6" / "pipeline").iterdir()
    names = {name for name in stored_tensors(table_of(folder)) if name.startswith("model.")}
    assert names == {f"model.{name}" for name, p in plain.model.named_parameters() if p.requires_grad}
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "final")
    for value, wanted in zip(loaded.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


class Watcher(TrainerCallback):
    """Counts what the Trainer tells callbacks."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.told.append("step")

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.told.append("evaluate")


def test_losses_that_are_means(tmp_path: Path) -> None:
    """Of a model that is not told the number of items; with callbacks, and the best checkpoint at the end."""
    found: dict[type[Any], Any] = {}
    options: dict[str, Any] = {"max_steps": 8, "eval_steps": 2, "save_steps": 2, "per_device_eval_batch_size": 2}
    options |= {"load_best_model_at_end": True, "optim": "sgd", "learning_rate": 0.3, "save_total_limit": 1}
    kinds: list[tuple[type[Any], dict[str, Any]]] = [(transformers.Trainer, {}), (PipelineTrainer, LOCAL)]
    for kind, more in kinds:
        watcher, model = Watcher(), Regression()
        chosen = arguments(tmp_path / kind.__name__, **options)
        run = kind(model, chosen, train_dataset=Points(24), eval_dataset=Points(4), callbacks=[watcher], **more)
        run.train()
        known, unknown = run.predict(Points(4)), run.predict([{"x": Points(4)[row]["x"]} for row in range(3)])
        assert known.metrics["test_loss"] == pytest.approx(
            ((known.predictions - known.label_ids) ** 2).mean(), rel=1e-5
        )
        assert unknown.label_ids is None
        assert unknown.predictions == pytest.approx(known.predictions[:3], rel=1e-6)
        parameters = [p.detach().clone() for p in model.parameters()]
        found[kind] = history(run), watcher.told, parameters, known.predictions
    (expected, told, best, predicted), (losses, *others) = found.values()
    assert_same(losses, expected)
    assert others[0] == told
    for value, wanted in zip(others[1], best, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
    assert others[2] == pytest.approx(predicted, rel=1e-4)
    with pytest.raises(zbfx.ZbfxError, match="found 3 rows to evaluate, and microbatches of 2"):
        run.prediction_step(model, {"x": torch.zeros(3, 6), "labels": torch.zeros(3)}, True)
    with pytest.raises(zbfx.ZbfxError, match="a step takes 6 rows, and the last one of an epoch has 2"):
        run.filled({"x": torch.zeros(2, 6), "labels": torch.zeros(2)}, 6)


def test_checkpoints_are_whole_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while it saves, also over a checkpoint of before, leaves nothing that is resumed from."""

    def new(**more: Any) -> Any:
        options: dict[str, Any] = {"eval_strategy": "no", "max_steps": 4, "save_steps": 2, "optim": "sgd", **more}
        return PipelineTrainer(Regression(), arguments(tmp_path, **options), train_dataset=Points(24), **LOCAL)

    class Killed(BaseException):
        pass

    new().train()
    for step, method in ((2, "_save_rng_state"), (4, "_save")):
        run = new()
        as_always = getattr(run, method)

        def ends(*args: Any, run: Any = run, step: int = step, as_always: Any = as_always, **more: Any) -> None:
            as_always(*args, **more)
            if run.state.global_step == step:
                raise Killed

        monkeypatch.setattr(run, method, ends)
        with pytest.raises(Killed):
            run.train()
        with pytest.raises(zbfx.ZbfxError, match=f"checkpoint-{step}' was not written .* checkpoint-{6 - step} is the"):
            new().train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    run = new(max_steps=6)
    run.train(resume_from_checkpoint=True)
    (folder,) = (tmp_path / "checkpoint-6" / "pipeline").iterdir()
    assert (run.state.global_step, folder.name) == (6, "step-6")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    with pytest.raises(zbfx.ZbfxError, match="which has none that is whole"):
        new(output_dir=str(tmp_path / "other")).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("limit", "stays"), [(None, True), (2, False)])
def test_folders_without_a_state_go_if_checkpoints_are_counted(limit: int | None, stays: bool, tmp_path: Path) -> None:
    """By its name one of the Trainer's, half written or weights of the user's."""
    weights = tmp_path / "checkpoint-1" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    chosen = arguments(tmp_path, eval_strategy="no", max_steps=2, save_steps=2, save_total_limit=limit)
    PipelineTrainer(Regression(), chosen, train_dataset=Points(24), **LOCAL).train()
    assert (tmp_path / "checkpoint-2").is_dir()
    assert weights.is_file() is stays


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),
        ("fsdp", "full_shard"),
        ("gradient_checkpointing", True),
        ("label_smoothing_factor", 0.1),
        ("neftune_noise_alpha", 5.0),
        ("torch_compile", True),
        ("auto_find_batch_size", True),
    ],
)
def test_training_arguments_that_it_cannot_follow_are_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    chosen = arguments(tmp_path, eval_strategy="no")
    setattr(chosen, name, value)
    with pytest.raises(zbfx.ZbfxError, match=f"{name}=.*is not followed by a pipeline"):
        PipelineTrainer(Regression(), chosen, train_dataset=Points(6))


def test_what_else_it_cannot_follow_is_refused_by_name(tmp_path: Path) -> None:
    def refused(match: str, kind: type[Any] = PipelineTrainer, **more: Any) -> None:
        with pytest.raises(zbfx.ZbfxError, match=match):
            kind(Regression(), arguments(tmp_path, eval_strategy="no"), train_dataset=Points(6), **more)

    class Custom(PipelineTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...

    refused("compute_loss_func is not followed", compute_loss_func=dict)
    refused("Custom.compute_loss would not be called", Custom)
    run = trainer(PipelineTrainer, tmp_path, llama(), {}, **LOCAL)
    with pytest.raises(zbfx.ZbfxError, match=r"resume_from_checkpoint='.*' has no folder 'pipeline'"):
        run.train(resume_from_checkpoint=str(tmp_path))
    uneven = [
        {"input_ids": torch.zeros(2, length).long(), "labels": torch.zeros(2, length).long()} for length in (3, 4)
    ]
    with pytest.raises(zbfx.ZbfxError, match="rows of one shape; found others for input_ids, labels"):
        run.counted(uneven)
    assert len(Rows(3, 0)) == 3


@pytest.mark.parametrize("aside", [0.0, 1e-6])
def test_the_smallest_part_of_a_loss_that_does_not_divide_by_the_items_is_seen(aside: float) -> None:
    """Such as an auxiliary loss, which each microbatch would add whole."""

    def evaluate(*, num_items_in_batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return labels.sum() / num_items_in_batch + aside

    step = SimpleNamespace(evaluate=evaluate)
    trainer: Any = SimpleNamespace(is_additive=None, rows=2, bound=lambda: step)
    batch = {"num_items_in_batch": torch.tensor(6), "labels": torch.full((2, 3), 10.0)}
    assert PipelineTrainer.adds_up(trainer, batch) == (aside == 0.0)
