"""A pipeline -> hashes of the parts of its plan: whether ranks hold the same one, and what differs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from torch import Tensor

from zbfx.compiled import Compiled
from zbfx.graphs import Joint


def digest(pipe: Compiled) -> dict[str, str]:
    """All equal where the plans are. What the programs are made from comes first, to tell where a difference begins."""
    phases = [phase.module.code for stage in pipe.stages for phase in stage.phases.values()]
    programs = [program.code for program in pipe.programs]
    programs += [str(message) for program in pipe.programs for message in program.messages.values()]
    return {
        "the model or its loss": hashed(described(pipe.joint)),
        "the shapes or dtypes of the example microbatch": hashed([str(pipe.signature.tensors)]),
        "microbatches": hashed([str(pipe.reduction.microbatches)]),
        "loss_reduction": hashed([pipe.reduction.name]),
        "the stages": hashed(phases),
        "their placement": hashed([str(pipe.placement)]),
        "the schedule": hashed([str(pipe.schedule.ranks)]),
        "the programs": hashed(programs),
    }


def described(joint: Joint) -> list[str]:
    """The nodes of a graph, and the shapes and dtypes of its inputs."""
    lines = [f"{node.name} = {node.target} {node.args} {node.kwargs}\n" for node in joint.graph.nodes]
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        lines += [f"{node.name}: {tuple(value.shape)} {value.dtype}\n"] if isinstance(value, Tensor) else []
    return lines + [str(port) for port in (*joint.inputs, *joint.outputs)]


def hashed(texts: Sequence[str]) -> str:
    """A hash of what graphs say, apart from what each rank has of its own."""
    anywhere = re.sub(r"index=\d+", "index", "".join(texts))  # its device
    anywhere = re.sub(r"(_c10d_functional\.[^\n]*), '\d+'\)", r"\1)", anywhere)  # and groups to shard over
    return hashlib.sha256(anywhere.encode()).hexdigest()
