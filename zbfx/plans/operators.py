"""What nodes of graphs in a file may call, by name: operators of torch that only compute, and a few functions of ours.

Takes   the target of a node, or its name.
Gives   its name, or the target.
Raises  `ZbfxError` for what is none of them: a name from a file is looked up here alone, and nothing is imported. An
        operator gives a tensor, or only checks values. One that takes a text (a mode, a message) takes a tensor too,
        and none writes into an argument by name: this leaves out all forms of `aten::from_file`, which maps, and may
        write, a file that its text names, and of operators that read memory they were not given.
Source  ours. torch.export's serialiser names operators likewise, but keeps exported programs: its graphs write into
        nothing, and its nodes have neither fake values nor the numbers that tie a backward to its forward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from zbfx._torch.operators import (
    ASSERT,
    ASSERT_WITH_MESSAGE,
    CHECKING_OPERATORS,
    NAMESPACES,
    UNCHECKED,
    Operator,
    schema_of,
)
from zbfx.errors import ZbfxError
from zbfx.rng import seeded

FUNCTIONS: Mapping[str, Callable[..., Any]] = {"getitem": operator.getitem, "seeded": seeded}
NAMES = {function: name for name, function in FUNCTIONS.items()}
EFFECTS = {*CHECKING_OPERATORS, ASSERT, ASSERT_WITH_MESSAGE}


def name_of(target: Any, namespaces: Collection[str]) -> str:
    """The name of what a node calls; of an operator like `aten.add.Tensor`. `namespaces` are allowed beside torch's."""
    if isinstance(target, Operator):
        name = str(target)
        if found_at(name, namespaces) is target:
            return name
        raise ZbfxError(
            f"the graph calls {name}, which is not among the operators that plans on disk may call: those of "
            f"{', '.join(NAMESPACES)} that give tensors. Name further libraries of operators in namespaces=, on "
            f"saving and on loading"
        )
    if callable(target) and target in NAMES:
        return NAMES[target]
    raise ZbfxError(
        f"the graph calls {getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}, a function of "
        f"Python, which a plan on disk cannot hold. Make it an operator (torch.library.custom_op) of a namespace of "
        f"yours, and name that in namespaces="
    )


def target_of(name: Any, namespaces: Collection[str]) -> Any:
    """What is called by a name in a file."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    found = found_at(name, namespaces)
    if found is None:
        raise ZbfxError(f"a graph calls {name!r}, which is not among the operators that plans on disk may call")
    return found


def found_at(name: str, namespaces: Collection[str]) -> Any:
    """The operator of this name, like `aten.add.Tensor`, if it is allowed."""
    namespace, *rest = name.split(".")
    if len(rest) != 2 or namespace not in (*NAMESPACES, *namespaces) or not all(p.isidentifier() for p in rest):
        return None
    packet = getattr(getattr(torch.ops, namespace), rest[0], None)
    found = getattr(packet, rest[1], None)
    if not isinstance(found, Operator) or str(found) != name:
        return None
    return found if found in EFFECTS or namespace in namespaces or only_computes(found) else None


def only_computes(found: Operator) -> bool:
    schema = schema_of(found)
    assert schema is not None, "operators have schemas"
    taken, given = ([str(value.type) for value in values] for values in (schema.arguments, schema.returns))
    if any(value.is_out for value in schema.arguments) or found.overloadpacket in UNCHECKED:
        return False
    takes_text = any("str" in kind for kind in taken)
    return any("Tensor" in kind for kind in given) and (not takes_text or any("Tensor" in kind for kind in taken))
