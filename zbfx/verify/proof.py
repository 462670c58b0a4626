"""What `verify` proves of the programs of all ranks, in numbers."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zbfx.program import ops
from zbfx.program.calls import AddToGradient
from zbfx.program.codegen import Program
from zbfx.program.streams import Beside
from zbfx.schedule.schedule import Schedule
from zbfx.verify import verify
from zbfx.verify.flow import Flow, called_by

WIDTH, INDENT = 116, 17


@dataclass(frozen=True)
class Proof:
    """What was found of all programs together; each line of `str(proof)` is something that was proven."""

    ranks: int
    microbatches: int
    nodes: int
    calls: int
    beside: int
    messages: int
    message_bytes: int
    channels: int
    values: int
    gradients: int
    shared: int
    sums: int
    updates: int
    peak_bytes: tuple[int, ...]
    limits: tuple[float, ...] | None

    @classmethod
    def of(cls, programs: Sequence[Program], schedule: Schedule, peak_bytes: Sequence[int]) -> Proof:
        """Raises `BrokenGraph` for programs that break a rule."""
        verify(tuple(programs), after="generate", given=schedule)
        flows = [Flow.of(program) for program in programs]
        sent = {m.key: m for flow in flows for m in flow.program.messages.values() if m.source == flow.program.rank}
        phases = {call.phase.name: call.phase for flow in flows for call in flow.calls}.values()
        modules = [called_by(node) for flow in flows for node in flow.place if node.op == "call_module"]
        added = Counter(module.name for module in modules if isinstance(module, AddToGradient))
        begun = [node for flow in flows for nodes in flow.buckets.values() for node in nodes]
        return cls(
            ranks=len(flows),
            microbatches=schedule.microbatches,
            nodes=sum(len(flow.place) for flow in flows),
            calls=sum(len(flow.calls) for flow in flows),
            beside=sum(is_beside(call.node) for flow in flows for call in flow.calls),
            messages=len(sent),
            message_bytes=sum(layout.size_bytes for message in sent.values() for layout in message.layouts),
            channels=len({(message.source, message.target) for message in sent.values()}),
            values=sum(len(flow.holds) for flow in flows),
            gradients=len({name for phase in phases for name in phase.gradients} | added.keys()),
            shared=len(added),
            sums=sum(node.target is ops.reduce for node in begun),
            updates=len({name for phase in phases for name in phase.updates}),
            peak_bytes=tuple(peak_bytes),
            limits=schedule.mem_limit,
        )

    def __str__(self) -> str:
        batch = f"{self.microbatches} microbatches"
        found = {
            "messages": f"{self.messages}, {self.message_bytes:,} bytes, on {self.channels} channels: each is sent "
            "once and received once, with equal shapes, strides and dtypes, in the order of its channel",
            "waits": "each rank comes to its end, also where a transfer ends only once both its ranks are there",
            "values": f"{self.values}, of {self.calls} calls and of messages: each is made before it is read, read by "
            "what is of its microbatch, and let go after its last reader",
            "gradients": f"{self.gradients}, each from all {batch}; {self.shared} shared ones are added up once they "
            f"are whole, and {self.sums} sums over replicas begin once their gradients are",
            "buffers": f"{self.updates} are written, by one microbatch after the other",
            "beside others": f"{self.beside} calls, joined before anything reads what they write; none writes what "
            "a call at the same time reads or writes",
        }
        for rank, peak in enumerate(self.peak_bytes):
            limit = "" if self.limits is None else f", limit {self.limits[rank]:,.0f}"
            found[f"memory, rank {rank}"] = f"{peak:,} bytes at its peak{limit}"
        head = f"proven of the programs of {self.ranks} ranks, {self.nodes} nodes, {batch}:"
        return "\n".join([head, *(paragraph(title, text) for title, text in found.items())])


def paragraph(title: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{title:{INDENT}}", subsequent_indent=" " * INDENT)


def is_beside(node: fx.Node) -> bool:
    module = node.graph.owning_module
    assert module is not None, "a program's graph"
    return isinstance(module.get_submodule(str(node.target)), Beside)
