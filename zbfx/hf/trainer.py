"""`PipelineTrainer`: transformers' `Trainer`, whose steps a pipeline runs.

To the `Trainer` there is one process: every rank reads the same batches, and gets the same losses, and the first writes
files. Its microbatches wait until an optimizer step has all of them, and run as one step of the pipeline.

Methods of `Trainer` that it does not document, overridden or called here; checked on transformers 5.24.0:
    _build_accelerator_args         what the accelerator is made with
    _clip_grad_norm, _get_grad_norm the norm of gradients, clipped or not
    _get_num_items_in_batch         tokens that count, by which models divide their loss
    _load_best_model, _load_from_checkpoint, _load_optimizer_and_scheduler
    _move_model_to_device           before training
    _prepare_for_training           makes the optimizer, and loads what is resumed
    _prepare_inputs                 a batch on its device
    _save, _save_optimizer_and_scheduler, _save_rng_state
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

import zbfx
from zbfx.errors import ZbfxError, listed
from zbfx.hf.refused import refuse_arguments
from zbfx.hf.whole_checkpoints import begin_checkpoint, newest_whole, refuse_partial
from zbfx.runtime.step import Step

STATE = "pipeline"  # the folder of a checkpoint in which the step's own is
ITEMS = "num_items_in_batch"
MANY = 2**20  # times the items: a power of two, by which numbers divide without rounding


class PipelineTrainer(Trainer):
    """A `Trainer` that runs under torchrun over the ranks of one pipeline, with what its script passes to `Trainer`.

    `gradient_accumulation_steps` are the microbatches of a step, `per_device_train_batch_size` the rows of each.
    Checkpoints have the model, as always, and in `pipeline/` what `step.save` writes: any number of ranks resumes from
    it. With the model on the meta device and `bind_options={"weights": folder}` no rank holds more than its stages.

    compile_options  further arguments of `zbfx.compile`: schedule, backend, mem_limit, ... Without a launcher
                     {"stages": 2} runs that many ranks in one process
    bind_options     further arguments of `bind`: weights, on_new_shape, ...

    Raises `ZbfxError` by name for arguments that a pipeline cannot follow. `step` is the pipeline's step, from the
    first `train()` or `evaluate()` on."""

    def __init__(
        self,
        *args: Any,
        compile_options: Mapping[str, Any] | None = None,
        bind_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = inspect.signature(Trainer).bind(*args, **kwargs).arguments
        arguments = given.get("args") or TrainingArguments(output_dir="tmp_trainer")
        refuse_arguments(type(self), PipelineTrainer, given, arguments)
        self.compile_options, self.bind_options = dict(compile_options or {}), dict(bind_options or {})
        self.step: Step | None = None
        self.microbatches: list[dict[str, Any]] = []  # of the step that is coming
        state = arguments.distributed_state
        if state is not None:
            state.num_processes, state.distributed_type = 1, DistributedType.NO
        super().__init__(**given | {"args": arguments})

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """The model is neither moved nor wrapped; `bound` sets the precision."""
        return super()._build_accelerator_args(**kwargs) | {"mixed_precision": "no", "device_placement": False}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    # ---- The pipeline ----

    def bound(self, dataloader: DataLoader[Any] | None = None) -> Step:
        """The step, compiled for the first batch of a loader."""
        if self.step is None:
            with torch.random.fork_rng(devices=[]):
                example = next(iter(self.get_train_dataloader() if dataloader is None else dataloader))
            inputs = self.counted([self._prepare_inputs(example)])
            bf16 = torch.autocast(self.args.device.type, torch.bfloat16, enabled=bool(self.args.bf16))
            is_alone = not dist.is_initialized()
            options: dict[str, Any] = {
                "stages": 1 if is_alone else dist.get_world_size(),
                "microbatches": self.args.gradient_accumulation_steps,
                "loss_reduction": "sum" if ITEMS in inputs else "mean",
                "device": self.args.device,
            }
            assert self.model is not None, "the Trainer wants one"
            self.model.train()
            with bf16:
                pipe = zbfx.compile(self.model, example_kwargs=inputs, **(options | self.compile_options))
            bind: Callable[..., Step] = pipe.run_local if is_alone else pipe.bind
            self.step = bind(**({"seed": self.args.seed, "on_new_shape": "recompile"} | self.bind_options))
            self.rows = rows_of(inputs)
            self.is_additive: bool | None = None
        return self.step

    def counted(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """Batches as one, with the number of tokens that count where the model takes it."""
        count = self._get_num_items_in_batch(batches, self.args.device)
        joined = joined_batches(batches)
        return joined | {ITEMS: torch.as_tensor(count)} if count is not None else joined

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The loss of the whole step, with its last microbatch; 0 with those before, which wait."""
        model.train()
        self.microbatches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self.microbatches = self.microbatches, []
        step = self.bound()
        loss = step(**self.filled(self.counted(batches), self.rows * step.microbatches))
        return loss.to(self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss, where there are labels, and unless it is wanted alone, all other outputs of the model on all ranks,
        and the labels."""
        batch = self.counted([self._prepare_inputs(inputs)])
        labels = tuple(batch.get(name) for name in self.label_names)
        has_loss = all(value is not None for value in labels)
        if not labels:  # as for CLIP
            has_loss = bool(batch.get("return_loss", self.can_return_loss))
        rows = rows_of(batch)
        whole = -(-rows // self.rows) * self.rows
        if has_loss and whole != self.rows and not self.adds_up(batch):
            raise ZbfxError(
                f"the model's loss does not divide by the number of items, so that those of microbatches do not add "
                f"up; found {rows} rows to evaluate, and microbatches of {self.rows}. Evaluate batches of "
                f"per_device_train_batch_size rows"
            )
        step, outputs = self.bound(), other_outputs(self.ignored(ignore_keys), has_loss=has_loss)
        if prediction_loss_only:
            loss = step.evaluate(**self.filled(batch, whole)) if has_loss else None
            return None if loss is None else loss.to(self.args.device), None, None
        if not has_loss:
            found = step.forward(**with_rows(batch, whole), outputs=outputs, everywhere=True)
            return None, single(first_rows(found, rows, whole)), None
        loss, found = step.evaluate(**self.filled(batch, whole), outputs=outputs, everywhere=True)
        return (
            loss.to(self.args.device),
            single(first_rows(found, rows, whole)),
            single(labels) if labels else None,
        )

    def ignored(self, ignore_keys: list[str] | None) -> tuple[str, ...]:
        """The outputs that are no predictions, by name."""
        default = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", [])
        return ("loss", *(default if ignore_keys is None else ignore_keys))

    def filled(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
        """A batch with so many rows: those that are missing are copies whose labels count for nothing."""
        found = rows_of(batch)
        if found == rows:
            return batch
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not self.adds_up(batch):
            raise ZbfxError(
                f"a step takes {rows} rows, and the last one of an epoch has {found}; rows that count for nothing "
                f"cannot be added to this model's batches. Set dataloader_drop_last=True, and use a number of examples "
                f"that per_device_train_batch_size * gradient_accumulation_steps divides"
            )
        filled = with_rows(batch, rows)
        return filled | {"labels": torch.cat([labels, torch.full_like(filled["labels"][found:], -100)])}

    def adds_up(self, batch: dict[str, Any]) -> bool:
        """Whether the losses of parts of a batch, each divided by the items of all, add up to that of the batch."""
        if self.is_additive is None:
            if ITEMS not in batch:
                return False
            one = {k: t[torch.arange(self.rows) % len(t)] if t.ndim else t for k, t in batch.items()}
            step = self.bound()
            # What does not divide by the items stays as it is while the rest becomes a millionth: none of it is too
            # small to be seen.
            losses = [step.evaluate(**one | {ITEMS: batch[ITEMS] * times}) for times in (1, MANY)]
            self.is_additive = torch.allclose(losses[0], MANY * losses[1], rtol=1e-3)
        return self.is_additive

    # ---- What the Trainer asks ----

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader[Any]]:
        self.microbatches = []
        self.bound()
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = train_dataloader
        return handler.model, train_dataloader

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that the arguments ask for, over what this rank trains."""
        optimizer = super().create_optimizer(model)
        if isinstance(optimizer, zbfx.optim.PostValidated):
            raise ZbfxError("optimizers holds plain optimizers of torch: gradients are clipped by max_grad_norm")
        own = {id(parameter) for parameter in self.bound().parameters()}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.bound().clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.bound().clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        self.bound(self.get_train_dataloader() if self.train_dataset is not None else dataloader)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model as `from_pretrained` loads it, of a model with adapters these alone. All ranks call it."""
        state = self.bound().full_state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """What adapters leave as it is, is not in it."""
        is_whole = self.model is None or all(parameter.requires_grad for parameter in self.model.parameters())
        objects: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        self.bound().save(Path(output_dir) / STATE, keep=1, frozen=is_whole, **objects)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The step loads it, once it is bound."""
        if not (Path(resume_from_checkpoint) / STATE).is_dir():
            raise ZbfxError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} has no folder {STATE!r}: it was saved without a "
                f"pipeline, or with save_only_model=True. Start from its weights: make the model on the meta device, "
                f"and pass bind_options={{'weights': {resume_from_checkpoint!r}}}"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        assert checkpoint is not None, "resumed"
        self.bound().load(Path(checkpoint) / STATE, optimizer=self.optimizer, scheduler=self.lr_scheduler)

    def _load_best_model(self) -> None:
        self._load_optimizer_and_scheduler(self.state.best_model_checkpoint)

    # ---- Checkpoints are whole, or refused ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_whole(Path(str(self.args.output_dir))))
        elif isinstance(resume_from_checkpoint, str):
            refuse_partial(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:
            folder, rotates = Path(self._get_output_dir(trial=trial)), (self.args.save_total_limit or 0) > 0
            begin_checkpoint(folder, self.state.global_step, rotates=rotates)
        super()._save_checkpoint(model, trial)


@cache  # a step traces forwards again for another function
def other_outputs(ignored: tuple[str, ...], *, has_loss: bool) -> Callable[[Any], tuple[Any, ...]]:
    """A function of what a model returns: all but the loss, and what is ignored."""

    def chosen(output: Any) -> tuple[Any, ...]:
        if isinstance(output, dict):
            return tuple(value for name, value in output.items() if name not in ignored)
        return tuple(output[1:] if has_loss else output)

    return chosen


def single(values: tuple[Any, ...]) -> Any:
    """The Trainer's way: one value is not in a tuple."""
    return values[0] if len(values) == 1 else values


def first_rows(value: Any, rows: int, filled: int) -> Any:
    """Without what rows give that were added; a row may give several entries of an output."""
    if isinstance(value, list | tuple):
        return tuple(first_rows(part, rows, filled) for part in value)
    return value[: len(value) * rows // filled] if rows != filled else value


def with_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """A batch with so many rows: those that are missing are copies of its first ones."""
    found = rows_of(batch)
    cut = {k: t for k, t in batch.items() if isinstance(t, Tensor) and t.ndim and len(t) == found}
    more = torch.arange(rows - found) % found
    return dict(batch) | {name: torch.cat([t, t[more.to(t.device)]]) for name, t in cut.items()}


def rows_of(batch: Mapping[str, Any]) -> int:
    """The rows of a batch: the length of its first tensor."""
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim)


def joined_batches(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Several batches one after the other. Raises `ZbfxError` where their rows have other shapes."""
    first = dict(batches[0])
    if len(batches) == 1:
        return first
    shapes = [{k: t.shape[1:] for k, t in batch.items() if isinstance(t, Tensor) and t.ndim} for batch in batches]
    if other := next((shape for shape in shapes if shape != shapes[0]), None):
        wrong = [name for name in shapes[0] if other.get(name) != shapes[0][name]] or sorted(other)
        raise ZbfxError(
            f"the microbatches of a step have rows of one shape; found others for {listed(wrong)}. Pad to one length: "
            f'padding="max_length", or pad_to_multiple_of of the collator'
        )
    return first | {name: torch.cat([batch[name] for batch in batches]) for name in shapes[0]}
