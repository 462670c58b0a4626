"""Outputs and metrics over ranks and replicas, for test_outputs.py: a function of the rank (tests/support/pool.py)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbfx
from tests.processes.replicas_worker import mesh_of
from tests.processes.worker import refusal
from tests.support.reference import default_dtype

REPLICAS, RANKS, M, ROWS, WIDTH, CLASSES = 2, 2, 3, 2, 6, 5


class Generating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).tanh()
        return {"hidden": hidden, "logits": self.head(hidden)}

    def generate(self, x: Tensor) -> Tensor:
        return self(x)["logits"].argmax(-1)


def measured(output: dict[str, Tensor], labels: Tensor) -> Any:
    logits, known = output["logits"], labels > 0
    total = F.cross_entropy(logits, labels, reduction="none") * known
    return (total.sum(), known.sum()), {
        "mean": logits.mean(),
        "accuracy": ((logits.argmax(-1) == labels).sum(), known.sum()),
        "sum": zbfx.Metric(known.sum(), "sum"),
        "max": zbfx.Metric(output["hidden"].amax(0), "max"),
        "last": zbfx.Metric(logits.argmax(-1), "last"),
    }


def plain(output: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the metrics of one process with the batches of all replicas."""
    logits, hidden, known = output["logits"], output["hidden"], labels > 0
    loss = (F.cross_entropy(logits, labels, reduction="none") * known).sum() / known.sum()
    metrics = {
        "mean": logits.mean(),
        "accuracy": (logits.argmax(-1) == labels).sum() / known.sum(),
        "sum": known.sum(),
        "max": hidden.amax(0),
        "last": logits[-ROWS:].argmax(-1),
    }
    return loss, metrics


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.detach().double() - expected.detach().double()).abs().max())


@default_dtype(torch.float64)
def asked(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Generating()
    x, labels = torch.randn(REPLICAS * M * ROWS, WIDTH), torch.randint(CLASSES, (REPLICAS * M * ROWS,))
    replica = rank // RANKS
    own, own_labels = x.chunk(REPLICAS)[replica], labels.chunk(REPLICAS)[replica]
    reference = copy.deepcopy(model)
    expected = reference(x)
    loss, metrics = plain(expected, labels)
    loss.backward()
    example: dict[str, Any] = {"example_inputs": (x[:ROWS],), "example_targets": (labels[:ROWS],)}
    pipe = zbfx.compile(
        model, stages=RANKS, microbatches=M, loss_fn=measured, cuts=["head"], schedule="zb-h1", check=False, **example
    )
    step = pipe.bind(mesh_of(REPLICAS, RANKS))
    here = step.forward(own, outputs={"hidden": "hidden", "logits": "logits"})
    everywhere = step.forward(own, outputs=["hidden", "logits"], everywhere=True)
    parts = step.forward(own, outputs="hidden", everywhere=True, join=None)
    _, beside = step.evaluate(own, own_labels, outputs="logits", everywhere=True)
    results: dict[str, Any] = {
        "here": [name for name, value in here.items() if value is not None],
        "evaluated": {name: difference(step.metrics[name], value) for name, value in metrics.items()},
        "loss": difference(step(own, own_labels), loss),
        "metrics": {name: difference(step.metrics[name], value) for name, value in metrics.items()},
        "refused": refusal(lambda: model.generate(own))["text"],
    }
    parts = torch.cat(list(parts))
    chunks = {name: value.detach().chunk(REPLICAS)[replica] for name, value in expected.items()}
    results["outputs"] = [
        difference(everywhere[0], chunks["hidden"]),
        difference(everywhere[1], chunks["logits"]),
        difference(parts, chunks["hidden"]),
        difference(beside, chunks["logits"]),
        *(difference(value, chunks[name]) for name, value in here.items() if value is not None),
    ]
    pairs = [(p.grad, dict(reference.named_parameters())[name].grad) for name, p in step.named_parameters()]
    results["gradient"] = max(difference(a, b) for a, b in pairs if a is not None and b is not None)
    step.close()
    results["closed"] = refusal(lambda: model.generate(own))["text"]
    model.load_state_dict(reference.state_dict())
    results["generated"] = torch.equal(model.generate(own), chunks["logits"].argmax(-1))
    return results
