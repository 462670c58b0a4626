"""What ranks send."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zbfx
from zbfx.plan import Action, Kind
from zbfx.program.messages import SentValues, TensorLayout, messages_of, once_for_each_rank


class Skipping(nn.Module):
    """The second and the third of four stages read what the first one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first = self.layers[0](x).tanh()
        second = self.layers[1](first).tanh()
        third = self.layers[2](second + 0).tanh() + first
        return (self.layers[3](third) - target).square().mean()


def test_a_value_that_two_stages_of_a_rank_read_travels_once() -> None:
    pipe = zbfx.compile(
        Skipping(),
        stages=2,
        stages_per_rank=2,
        microbatches=2,
        cuts=["layers.1", "layers.2", "layers.3"],
        example_inputs=(torch.randn(2, 4), torch.randn(2, 4)),
        schedule="zb-v-order",
    )
    assert tuple(pipe.schedule.costs.placement) == (0, 1, 1, 0)
    (reads,) = {*pipe.stages[1].phases[Kind.F].values} & {*pipe.stages[2].phases[Kind.F].values}
    sent = [(m.key, m.names) for m in messages_of(pipe.stages, pipe.schedule) if m.producer == Action(Kind.F, 0, 0)]
    assert sent == [("F0.0>1", (reads,))]


def test_the_action_that_a_rank_runs_first_gets_what_others_of_the_rank_read() -> None:
    """In an order of forwards alone, a stage may run before one that it does not depend on."""
    layout = TensorLayout((2, 4), (4, 1), torch.float32)
    first, second, elsewhere = (Action(Kind.F, stage, 0) for stage in (1, 2, 3))
    readers = {
        first: SentValues(1, ("skip", "own"), (layout, layout)),
        second: SentValues(2, ("skip",), (layout,)),
        elsewhere: SentValues(3, ("skip",), (layout,)),
    }
    found = once_for_each_rank(readers, (0, 1, 1, 0), {second: 0, first: 1, elsewhere: 0})
    assert {reader: values.names for reader, values in found.items()} == {
        first: ("own",),
        second: ("skip",),
        elsewhere: ("skip",),
    }
    found = once_for_each_rank(readers, (0, 1, 1, 0), {first: 0, second: 1, elsewhere: 0})
    assert [(reader, values.names) for reader, values in found.items()] == [
        (first, ("skip", "own")),
        (elsewhere, ("skip",)),
    ]
