"""What tests of messages share: every text with which the library can raise an error that users see, read off its code.

A message is the text of such an error, with `…` for each name or number that is put in. Constants of modules are
spelled out. Where a function is handed the text (`HANDED`), those that its callers hand over are messages; where a
function makes it for another one (`MAKERS`), those that it returns.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import zbfx.errors
from tests.support.documents import ROOT

ERRORS = {
    name for name, kind in vars(zbfx.errors).items() if inspect.isclass(kind) and issubclass(kind, zbfx.ZbfxError)
}
PUT_IN = "…"
LEAST_SIGNS = 8  # of a fixed text, without "found": less is no text that a page could be searched for

# Functions that raise with a text, or a part of one, that their callers hand over.
HANDED = {"_fail", "require_amount", "positive_number", "first_fault", "end_process"}
# Functions that make the text of an error which another one raises.
MAKERS = {
    ("zbfx/comm/history.py", "difference"),
    ("zbfx/comm/history.py", "known_fault"),
    ("zbfx/runtime/agreement.py", "first_difference"),
    ("zbfx/runtime/agreement.py", "refused"),
    ("zbfx/runtime/batch_checks.py", "difference"),
    ("zbfx/runtime/worker.py", "unsettled"),
    ("zbfx/runtime/verdict.py", "settle"),
    ("zbfx/selfcheck.py", "refusal"),
    ("zbfx/timing/simulate.py", "describe_deadlock"),
    ("zbfx/timing/validity.py", "_check_memory"),
}


@dataclass(frozen=True)
class Message:
    place: str
    text: str


@cache
def modules() -> dict[Path, ast.Module]:
    """The library's files, without docstrings."""
    return {
        path: ast.parse(path.read_text()) for path in sorted([*ROOT.glob("zbfx/**/*.py"), *ROOT.glob("passes/*.py")])
    }


@cache
def constants() -> dict[str, str]:
    """Texts that modules hold under a name."""
    found: dict[str, str] = {}
    for tree in modules().values():
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                texts = texts_of(statement.value, {}) if is_text(statement.value) else []
                if len(texts) == 1:
                    found[statement.targets[0].id] = texts[0]
    return found


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def texts_of(node: ast.expr, known: dict[str, str]) -> list[str]:
    """The texts that an expression can be."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(choice) for choice in product(*(texts_of(part, known) for part in parts))]
        case ast.FormattedValue(value=ast.IfExp() as inner) if all(map(is_text, (inner.body, inner.orelse))):
            return texts_of(inner, known)
        case ast.FormattedValue(value=ast.Name(id=name)):
            return [known.get(name, PUT_IN)]
        case ast.IfExp(body=one, orelse=other):
            return texts_of(one, known) + texts_of(other, known)
        case ast.BinOp(left=one, op=ast.Add(), right=other):
            return ["".join(both) for both in product(texts_of(one, known), texts_of(other, known))]
        case ast.Subscript(value=inner):  # a text that is cut to a length
            return texts_of(inner, known)
        case ast.Name(id=name):
            return [known.get(name, PUT_IN)]
    return [PUT_IN]


def speaks(text: str) -> bool:
    """Whether enough of a text is fixed."""
    return sum(sign.isalnum() or sign in "<>=" for sign in text.replace("found", "")) >= LEAST_SIGNS


def called(node: ast.Call) -> str:
    """The name of what is called, without where it comes from."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def returned(function: ast.FunctionDef) -> list[ast.expr]:
    """What a function returns, or collects and returns then."""
    found: list[ast.expr | None] = []
    for node in ast.walk(function):
        match node:
            case ast.Return(value=value) | ast.Assign(value=value):
                found.append(value)
            case ast.Call(func=ast.Attribute(attr="append"), args=[value]):
                found.append(value)
    return [value for value in found if value is not None]


@cache
def messages() -> tuple[Message, ...]:
    """Every message of the library."""
    found = []
    for path, tree in modules().items():
        file = str(path.relative_to(ROOT))
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")))) if path.stem == "errors":
                    given = node.args[:1]
                case ast.Call() if called(node) in ERRORS:
                    given = node.args[:1]
                case ast.Call() if called(node) in HANDED:
                    given = [one for one in node.args if is_text(one) and " " in texts_of(one, {})[0]]
                case ast.FunctionDef(name=name) if (file, name) in MAKERS:
                    given = returned(node)
                case _:
                    continue
            texts = [text for one in given for text in texts_of(one, constants())]
            found += [Message(f"{file}:{node.lineno}", text) for text in texts if speaks(text)]
    return tuple(dict.fromkeys(found))
