"""How the losses of microbatches make the loss of a batch, and the gradient that each backward starts from.

mean    the loss is the mean of the losses of m microbatches: every backward starts from 1 / m
sum     the loss is their sum: every backward starts from 1
tokens  a loss function may return (sum, count). The loss is the sum of all sums over the sum of all counts, so that
        ignored tokens, and microbatches with unequal counts, weigh right. The count depends on the batch alone and is
        known before the first forward, so that gradients are divided once, where they begin.

A loss function may return several (sum, count), each divided by a count of its own: the loss is the sum of the
quotients. Then the loss of a microbatch is a row of sums, and so is what its backward starts from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor, fx

from zbfx._torch.compiling import graph_module
from zbfx.errors import TraceError, ZbfxError
from zbfx.graphs import Joint, Role, TokenCount, copy_graph
from zbfx.trace.signature import on_device


class LossReduction(StrEnum):
    """How the losses of microbatches without counts make the loss of their batch."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class Reduction:
    """Makes the loss of a batch from the losses of its microbatches."""

    name: LossReduction
    microbatches: int
    dtype: torch.dtype  # of a microbatch's loss
    count: TokenCount | None
    shape: tuple[int, ...] = ()  # of a microbatch's loss: (k,) where it is the sum of k losses, each with a count

    @classmethod
    def of(cls, joint: Joint, name: str, microbatches: int) -> Reduction:
        if name not in tuple(LossReduction):
            raise ZbfxError(f"loss_reduction is one of {tuple(map(str, LossReduction))}; found {name!r}")
        losses = [node.meta["val"] for node in joint.outputs_of(Role.LOSS)] or [torch.empty(())]  # or none is asked for
        (loss,) = losses
        return cls(LossReduction(name), microbatches, loss.dtype, joint.count, tuple(loss.shape))

    def zeros(self, device: torch.device) -> Tensor:
        """Memory for the gradient of the batch's loss by the loss of a microbatch, in the dtype of the batch's loss.
        Backwards start from it in that of their own loss."""
        return torch.zeros(self.shape, dtype=dtype_of_batch_loss(self.dtype), device=device)

    def tokens(self, rows: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        """The count of a batch in float64, for each of its losses, from the tensors of its microbatches. None if losses
        have none."""
        return None if self.count is None else torch.stack([self.count(row).double() for row in rows]).sum(0)

    def weigh(self, weight: Tensor, tokens: Tensor | None, microbatches: int) -> None:
        """Fill `weight` with the gradient of the batch's loss by the loss of each microbatch. `tokens` is the count,
        and `microbatches` the number, of the batches of all replicas."""
        # The host must not wait for the device here. It would wait for the whole step before this one, and the device
        # then for the launches of this step.
        if tokens is None:
            weight.fill_(1.0 / microbatches if self.name is LossReduction.MEAN else 1.0)
        else:
            weight.copy_(on_device(torch.where(tokens > 0, 1.0 / tokens, 0.0), weight.device))

    def combine(self, losses: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """The batch's loss, a scalar, from those of the microbatches of all replicas, in float32 at least: half
        precision would round the sum once more."""
        whole = torch.stack(list(losses))
        whole = whole.to(dtype_of_batch_loss(whole.dtype))
        if self.name is LossReduction.MEAN and self.count is None:
            return whole.mean()
        return (whole.sum(0) * gradient).sum()


def dtype_of_batch_loss(dtype: torch.dtype) -> torch.dtype:
    """That of the batch's loss, where microbatches have losses of this one."""
    return torch.promote_types(dtype, torch.float32)


def separate_count(joint: Joint) -> Joint:
    """Take the count of a (sum, count) loss out of the joint graph, as a graph of its own over the microbatch. Raises
    `TraceError` if the count depends on more than the microbatch."""
    roles = [port.role for port in joint.outputs]
    if Role.COUNT not in roles:
        return joint
    index = roles.index(Role.COUNT)
    kept = [k for k in range(len(roles)) if k != index]
    graph = copy_graph(joint.graph)
    graph.output_node().args = (tuple(graph.output_node().args[0][k] for k in kept),)  # type: ignore[index]
    graph.eliminate_dead_code()
    count = token_count(joint, joint.output_values[index])
    return replace(joint, graph=graph, outputs=tuple(joint.outputs[k] for k in kept), count=count)


def token_count(joint: Joint, value: fx.Node) -> TokenCount:
    """The graph that computes a count, which is a value of the joint graph, from the microbatch alone."""
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
    return TokenCount(graph_module(torch.nn.Module(), graph, "TokenCount"), tuple(inputs))
