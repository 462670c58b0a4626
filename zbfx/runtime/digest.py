"""A pipeline -> hashes of the parts of its plan: whether ranks hold the same one, and what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from torch import fx

from zbfx._torch.operators import group_arguments, waited
from zbfx.compiled import Compiled
from zbfx.spelled import spelled


def digest(pipe: Compiled) -> dict[str, str]:
    """All equal where the plans are. What the programs are made from comes first, to tell where a difference begins."""
    phases = [phase.module.graph for stage in pipe.stages for phase in stage.phases.values()]
    programs = [program.module.graph for program in pipe.programs]
    messages = [message for program in pipe.programs for message in program.messages.values()]
    joint = pipe.joint
    return {
        "the model or its loss": hashed([*lines(joint.graph), spelled([joint.inputs, joint.outputs])]),
        "the shapes or dtypes of the example microbatch": hashed([spelled(pipe.signature.tensors)]),
        "the passes": hashed(given.told for given in pipe.options.passes),
        "microbatches": hashed([spelled(pipe.reduction.microbatches)]),
        "loss_reduction": hashed([spelled(pipe.reduction.name)]),
        "the stages": hashed(line for graph in phases for line in lines(graph)),
        "their placement": hashed([spelled(pipe.placement)]),
        "the schedule": hashed([str(pipe.schedule.ranks)]),
        "the programs": hashed([*(line for graph in programs for line in lines(graph)), *map(spelled, messages)]),
    }


def lines(graph: fx.Graph) -> Iterator[str]:
    """The nodes of a graph, with the shapes and dtypes of its inputs. Sharded ranks of a stage name groups of their
    own, which are left out."""
    inputs = {node: node.meta.get("val") for node in graph.find_nodes(op="placeholder")}
    for node in graph.nodes:
        target, args = (node.args[0], node.args[1:]) if node.target is waited else (node.target, node.args)
        own = group_arguments(target)
        told = [arg for index, arg in enumerate(args) if index not in own]
        named = {name: arg for name, arg in node.kwargs.items() if name not in own}
        yield f"{node.op} {node.name} {spelled(target)} {spelled(told)} {spelled(named)} {spelled(inputs.get(node))}"


def hashed(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{text}\n".encode())
    return found.hexdigest()
