"""What inductor has compiled once, it finds again."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from zbfx._torch.compiling import graph_module, inductor
from zbfx._torch.operators import aten


@pytest.mark.inductor
def test_a_graph_is_compiled_once() -> None:
    graph = torch.fx.Graph()
    x, total = graph.placeholder("x"), graph.placeholder("total")
    graph.call_function(aten.add_.Tensor, (total, graph.call_function(aten.sin.default, (x,))))
    graph.output((graph.call_function(aten.cos.default, (x,)),))
    for value in (x, total):
        value.meta["val"] = torch.empty(3, 5)
    for hits in (0, 1):
        before = dict(counters["inductor"])
        example = [torch.randn(3, 5), torch.ones(3, 5)]
        expected = example[0].cos(), 1 + example[0].sin()
        run = inductor(graph_module(torch.nn.Module(), graph, "phase"), example)
        told = {name: counters["inductor"][name] - before.get(name, 0) for name in counters["inductor"]}
        assert not told.get("fxgraph_cache_bypass", 0)
        assert told.get("fxgraph_cache_hit", 0) >= hits
        box = list(example)
        (found,) = run(box)
        assert not box, "each argument dies at its last use"
        torch.testing.assert_close(found, expected[0])
        torch.testing.assert_close(example[1], expected[1])
