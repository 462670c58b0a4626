"""Arguments of `Trainer` and `TrainingArguments` that a pipeline cannot follow. In: what a script gives. Out: an error
that names the argument, and what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

from zbfx.errors import ZbfxError

WITHIN_MODEL = "a pipeline traces the model once, as it is"
ARGUMENTS = {
    "compute_loss_func": "the model's own loss is what is trained: give the model a loss function of yours",
    "model_init": "the model is traced before training begins: pass the model",
}
TRAINING_ARGUMENTS = {
    "activation_checkpointing": 'pass compile_options={"recompute": "full"} or a mem_limit',
    "gradient_checkpointing": 'pass compile_options={"recompute": "full"} or a mem_limit',
    "auto_find_batch_size": "a step has the sizes that it was compiled for",
    "bf16_full_eval": "parameters are evaluated in the dtype in which they are trained",
    "deepspeed": "the pipeline places the model",
    "enable_jit_checkpoint": "ranks would save at different steps",
    "fp16": "use bf16=True, or float32",
    "fp16_full_eval": "parameters are evaluated in the dtype in which they are trained",
    "fsdp": "the pipeline places the model",
    "label_smoothing_factor": "the model's own loss is what is trained",
    "neftune_noise_alpha": WITHIN_MODEL,
    "parallelism_config": "all processes are ranks of one pipeline",
    "save_on_each_node": "the first rank of all writes the model",
    "torch_compile": 'pass compile_options={"backend": "inductor"}',
    "torch_empty_cache_steps": "a step keeps its memory for the next one",
    "use_liger_kernel": WITHIN_MODEL,
}
METHODS = ("compute_loss", "training_step", "prediction_step", "get_batch_samples")  # what a pipeline runs instead


def refuse_arguments(
    trainer: type[Trainer], base: type[Trainer], given: Mapping[str, Any], arguments: TrainingArguments
) -> None:
    """Raises `ZbfxError` for the first argument of these that is not its default, and for methods that subclasses of
    `base` have in place of its own."""
    for name, reason in ARGUMENTS.items():
        if given.get(name) is not None:
            raise ZbfxError(f"{name} is not followed by a pipeline: {reason}")
    defaults = {field.name: field.default for field in fields(TrainingArguments) if field.default is not MISSING}
    for name, reason in TRAINING_ARGUMENTS.items():
        value = getattr(arguments, name, None)
        if value and value != defaults.get(name):
            raise ZbfxError(f"{name}={value!r} is not followed by a pipeline: {reason}")
    for name in METHODS:
        if inspect.getattr_static(trainer, name) is not inspect.getattr_static(base, name):
            raise ZbfxError(f"{trainer.__name__}.{name} would not be called: the pipeline runs a whole step at once")
