"""examples/packed.py: packs of documents, as a collator of transformers makes them, equal documents one by one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from examples.packed import TOKENS, made_up, model_of, packs, pipeline, train, train_plainly

pytestmark = [pytest.mark.transformers, pytest.mark.slow]


def test_packs_hold_every_document_once_and_differ_in_length() -> None:
    documents = made_up(0)
    found = packs(documents)
    lengths = [inputs["input_ids"].shape[1] for _, inputs in found]
    assert max(lengths) <= TOKENS
    assert len(set(lengths)) > 1
    assert sum(lengths) == sum(map(len, documents))
    assert sum(int((inputs["position_ids"] == 0).sum()) for _, inputs in found) == len(documents)


def test_losses_are_those_of_documents_one_by_one() -> None:
    plain = train_plainly(model_of(torch.float64), 3)
    packed = train(pipeline(model_of(torch.float64)).run_local(on_new_shape="symbolic"), 3)
    assert packed == pytest.approx(plain, rel=1e-9)
    assert packed[2] < packed[0]
