"""Every name of the transformers library that it does not document, each with the versions it was checked on. The
library is imported where a model of it is met.

get_model_conversion_mapping          5.24.0   how a model's names on disk become those of its modules
rename_source_key                     5.24.0   the first of the names that a stored tensor goes into
convert_and_load_state_dict_in_model  5.24.0   what from_pretrained calls: renames, merges, splits, casts
_adjust_missing_and_unexpected_keys   5.24.0   takes out of its report what a model is known to miss
_weight_conversions                   5.24.0   what save_pretrained reverts
_is_hf_initialized                    5.24.0   marks modules that are not initialised again
is_tracing, is_torchdynamo_exporting  5.17.0, 5.24.0   what makers of masks ask before they look at values
_name_or_path, _commit_hash, ...      5.24.0   where a model came from, and how it generates: no forward reads these
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

UNREAD = {  # attributes of models and configurations that forwards do not read
    "generation_config",
    "name_or_path",
    "transformers_version",
    "warnings_issued",
    "_commit_hash",
    "_name_or_path",
}
WRITTEN_BY_SAVING = {"architectures", "dtype"}  # attributes of configurations that save_pretrained writes


def conversions_of(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def targets(model: Any, conversions: list[Any]) -> Callable[[str], list[str]]:
    """A function of the name of a stored tensor: the names in the model that it may become a part of."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    whole = model.state_dict()

    def of(name: str) -> list[str]:
        found, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, whole)
        if found not in whole and name in whole:
            return [name]
        ends: list[str] = [] if pattern is None else by_pattern[pattern].target_patterns
        return [end for end in (found, *(found.replace(ends[0], other) for other in ends)) if end in whole]

    return of


def load_parts(model: Any, parts: Mapping[str, Any], conversions: list[Any]) -> Any:
    """Fill a model from tensors by name, which are indexed as they are needed; returns the library's report."""
    from transformers.modeling_utils import LoadStateDictConfig, convert_and_load_state_dict_in_model

    config = LoadStateDictConfig(device_map={"": None}, weight_mapping=conversions)
    with without_progress():
        found = convert_and_load_state_dict_in_model(model, dict(parts), config)
    info = found[0] if isinstance(found, tuple) else found
    model._adjust_missing_and_unexpected_keys(info)
    return info


def weight_conversions(model: Any) -> Any:
    """The conversions that a model's weights have gone through, and go back through as they are saved."""
    return getattr(model, "_weight_conversions", None)


def set_weight_conversions(model: Any, conversions: Any) -> None:
    model._weight_conversions = conversions


def initialize_anew(model: Any) -> None:
    """Initialise all parameters and buffers, also those that are taken for initialised already."""
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    model.initialize_weights()


@contextmanager
def without_progress() -> Iterator[None]:
    """Every rank reads a part: none shows a bar."""
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()


@contextmanager
def masks_as_in_eager(knows: Callable[[Any], bool]) -> Iterator[None]:
    """Let models make the masks of eager: none, for the causal kernels of attention, where nothing is padded and
    nothing packed. `knows` says of which tensors the tracer has values to look at."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    answers: dict[str, Callable[..., bool]] = {
        "is_tracing": lambda tensor=None: tensor is not None and not knows(tensor),
        "is_torchdynamo_exporting": lambda: False,
    }
    before = {name: getattr(masks, name) for name in answers if hasattr(masks, name)}
    try:
        for name in before:
            setattr(masks, name, answers[name])
        yield
    finally:
        for name, answer in before.items():
            setattr(masks, name, answer)
