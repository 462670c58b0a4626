"""How the losses of microbatches make the loss of a batch, and the gradient that each backward starts from.

"mean"  the mean of the microbatches' losses: every backward starts from 1 / m
"sum"   their sum: from 1
tokens  loss functions that return (sum, count): the sum of all sums over the sum of all counts, so that ignored
        tokens and microbatches of unequal weight count for what they are. The count depends on the batch alone,
        and is known before the first forward: gradients are divided once, where they begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zbfx.errors import TraceError, ZbfxError
from zbfx.graphs import Joint, Role, TokenCount, copy_graph
from zbfx.trace.signature import on_device

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Reduction:
    """Makes one loss of the microbatches' losses."""

    name: str
    microbatches: int
    dtype: torch.dtype
    count: TokenCount | None

    def __post_init__(self) -> None:
        if self.name not in REDUCTIONS:
            raise ZbfxError(f"loss_reduction is one of {REDUCTIONS}; found {self.name!r}")

    @classmethod
    def of(cls, joint: Joint, name: str, microbatches: int) -> Reduction:
        loss = next(v for v, p in zip(joint.output_values, joint.outputs, strict=True) if p.role is Role.LOSS)
        return cls(name, microbatches, loss.meta["val"].dtype, joint.count)

    def tokens(self, rows: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        """The count of a batch, a float64 scalar; `rows` are its microbatches' tensors. None: losses have no count."""
        return None if self.count is None else torch.stack([self.count(row).double() for row in rows]).sum()

    def weigh(self, weight: Tensor, tokens: Tensor | None, replicas: int = 1) -> None:
        """Make `weight` the gradient of the batch's loss by each microbatch's loss; `tokens` counts the batches of all
        replicas. The host must not wait here: it would for the whole step before, and the device then for the launches
        of this one."""
        if tokens is None:
            weight.fill_(1.0 / (self.microbatches * replicas) if self.name == "mean" else 1.0)
        else:
            weight.copy_(on_device(torch.where(tokens > 0, 1.0 / tokens, 0.0), weight.device))

    def combine(self, losses: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """The batch's loss, a scalar, from those of the microbatches of all replicas."""
        if self.name == "mean" and self.count is None:
            return torch.stack(list(losses)).mean()
        return torch.stack(list(losses)).sum() * gradient


def separate_count(joint: Joint) -> Joint:
    """Take the count of a (sum, count) loss out of the joint graph, as a graph of its own over the microbatch.

    Raises `TraceError` if the count depends on more than the microbatch.
    """
    roles = [port.role for port in joint.outputs]
    if Role.COUNT not in roles:
        return joint
    index = roles.index(Role.COUNT)
    kept = [k for k in range(len(roles)) if k != index]
    graph = copy_graph(joint.graph)
    graph.output_node().args = (tuple(graph.output_node().args[0][k] for k in kept),)  # type: ignore[index]
    graph.eliminate_dead_code()
    return Joint(
        graph,
        joint.inputs,
        tuple(joint.outputs[k] for k in kept),
        joint.constants,
        token_count(joint, joint.output_values[index]),
        joint.replaced,
    )


def token_count(joint: Joint, value: fx.Node) -> TokenCount:
    graph = copy_graph(joint.graph)
    names = {node.name: node for node in graph.nodes}
    graph.output_node().args = (names[value.name],)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))  # random ops may go
    ports = dict(zip((node.name for node in joint.placeholders), joint.inputs, strict=True))
    inputs = []
    for placeholder in graph.find_nodes(op="placeholder"):
        port = ports[placeholder.name]
        if placeholder.users and port.role is not Role.INPUT:
            raise TraceError(
                f"the count of a (sum, count) loss may depend on the microbatch alone, for example "
                f"(targets != -100).sum(); found that it depends on {port}. Return a mean loss instead"
            )
        if placeholder.users:
            inputs.append(port.name)
        else:
            graph.erase_node(placeholder)
    return TokenCount(fx.GraphModule(torch.nn.Module(), graph, "TokenCount"), tuple(inputs))
