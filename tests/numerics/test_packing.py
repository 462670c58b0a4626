"""Documents in a row, told apart by their positions, equal documents by themselves: packed by the collator of the
transformers library, in microbatches of unlike lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbfx
from tests.support.reference import default_dtype

WIDTH, VOCABULARY, LONGEST = 8, 16, 12


class Attention(nn.Module):
    """Causal within each document, by a block-diagonal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        length = x.shape[1]
        same = document[:, :, None] == document[:, None, :]
        mask = (same & torch.ones(length, length, dtype=torch.bool).tril()).unsqueeze(1)
        q, k, v = self.into(x).view(1, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).reshape(1, length, WIDTH))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        document = (positions == 0).cumsum(-1)
        x = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x, document)
        return self.head(x)


def by_tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels are those of the collator: the first of each document is ignored."""
    following = labels[:, 1:].flatten()
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), following, ignore_index=-100, reduction="sum")
    return total, (following != -100).sum()


@pytest.mark.slow
@default_dtype(torch.float64)
def test_packed_documents_equal_separate_ones() -> None:
    transformers = pytest.importorskip("transformers")
    collate = transformers.DataCollatorWithFlattening(return_tensors="pt")
    torch.manual_seed(0)
    model = Packed()
    plain = copy.deepcopy(model)
    lengths = [[3, 5, 2], [9], [4, 2, 2, 7]]
    documents = [[torch.randint(VOCABULARY, (length,)) for length in of_one] for of_one in lengths]
    rows: list[Any] = []
    for of_one in documents:
        packed = collate([{"input_ids": ids.tolist()} for ids in of_one])
        rows.append(((packed["input_ids"], packed["position_ids"], packed["labels"]), {}))
    ids, positions, labels = rows[0][0]
    pipe = zbfx.compile(
        model,
        stages=2,
        microbatches=3,
        example_inputs=(ids, positions),
        example_targets=(labels,),
        loss_fn=by_tokens,
        schedule="zb-h1",
        check=False,
    )
    loss = pipe.run_local(on_new_shape="symbolic").run_split(rows)
    found = [
        by_tokens(plain(document[None], torch.arange(len(document))[None]), document[None])
        for of_one in documents
        for document in of_one
    ]
    expected = torch.stack([total for total, _ in found]).sum() / sum(int(count) for _, count in found)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=0, atol=1e-10)
