"""What may import what, and which names may mean what, in the library: read from the syntax trees.

python -m tests.layers   prints the rooms with their imports, and everything that is wrong; exits 1 if anything is
pytest tests/test_layers.py   runs the same rules as tests

This script imports nothing of zbfx. The import of a package by one of its own modules is not counted.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import networkx

from tests.layers_comparisons import COMPARISONS

ROOT = Path(__file__).parents[1]
THIS, TABLE = "tests/layers.py", "tests/layers_comparisons.py"

# Rooms by floor, from below. A room is a module, or a folder with all that it holds but rooms of their own. A module
# imports from its own floor and those below.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("rng", "_torch", "_transformers", "arguments", "documents", "memo", "metrics", "modes", "progress", "spelled"),
    ("plan",),
    ("graphs",),
    ("timing",),
    ("show",),
    ("schedule.schedule", "schedule.orders", "schedule.bounds"),
    ("schedule.integer",),
    ("schedule.search",),
    ("schedule",),
    ("passes",),
    ("user_pass",),
    ("options",),
    ("trace",),
    ("program",),
    ("comm",),
    ("verify",),
    ("memory",),
    ("costs",),
    ("compiled",),
    ("checkpoint",),
    ("runtime",),
    ("optim",),
    ("plans",),
    (
        "gradient_check",
        "check_causes",
        "checked_runs",
        "replayed",
        "candidate",
        "fit",
        "variants",
        "replicas",
        "between",
        "report",
        "selfcheck",
        "loaded",
        "handle",
        "pipeline",
        "zbfx",
    ),
    ("cli", "asked", "named_model", "measured_step", "playground", "__main__", "hf", "testing"),
)

BELOW_SEARCH = ("schedule.schedule", "schedule.orders", "schedule.bounds", "schedule.integer")
PLANNER = (*BELOW_SEARCH, "schedule.search", "schedule")

# Rooms that know less than their floor allows: of the library, they may import these rooms alone.
KNOW_ONLY: Mapping[str, tuple[str, ...]] = {
    "plan": ("errors",),
    "timing": ("errors", "plan", "timing"),
    "show": ("errors", "plan", "timing", "show"),
    "schedule.schedule": ("documents", "plan", "show"),
    "schedule.orders": ("documents", "errors", "plan", "schedule.orders"),
    "schedule.bounds": ("plan", "timing", "schedule.bounds"),
    "schedule.integer": ("errors", "timing", "schedule.integer"),
    "schedule.search": ("plan", "timing", *BELOW_SEARCH, "schedule.search"),
    "schedule": ("errors", "plan", "timing", *PLANNER),
    "passes": ("errors", "rng", "_torch", "plan", "graphs", "passes"),
}
WITHOUT_TORCH = ("documents", "errors", "plan", "timing", "show", *PLANNER)

PRIVATE_NAMES = ("_torch", "_transformers", "hf")  # the rooms of all private names of torch and of transformers
PYTHONS = ("_exit", "_getframe", "_replace")  # names with an underscore that Python documents

# Names that several modules may define, each with its reason.
DEFINED_OFTEN: Mapping[str, str] = {
    "__all__": "what a package offers: each has its own",
    "check": "both are public: zbfx.check a model, zbfx.schedule.check orders",
}


@dataclass(frozen=True)
class Module:
    """A file of the library; `path` begins at the repository's root."""

    name: str
    path: str
    tree: ast.Module
    line_count: int

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


class Finding(NamedTuple):
    """Something that breaks a rule, and the file and line where it does."""

    path: str
    line: int
    text: str

    @property
    def key(self) -> str:
        """How the table of what remains names it: without the line, which moves."""
        return f"{self.path}: {self.text}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


Library = Mapping[str, Module]


@cache
def library() -> Library:
    """Every module of the library by its name without `zbfx.`; the package itself is `zbfx`."""
    links = [file for file in (ROOT / "zbfx").rglob("*.py") if "passes" not in file.parts]
    return {
        module.name: module
        for file in sorted([*(ROOT / "passes").glob("*.py"), *links])
        for module in [module_of(str(file.relative_to(ROOT)), file.read_text())]
    }


def module_of(path: str, source: str) -> Module:
    name = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__").removeprefix("zbfx.")
    return Module(name, path, ast.parse(source), source.count("\n"))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def room_of(name: str) -> str | None:
    """The room of a module: the longest name in `FLOORS` that it is, or is below."""
    rooms = [room for floor in FLOORS for room in floor if name == room or (room != "zbfx" and within(name, room))]
    return max(rooms, key=len, default=None)


def floor_of(name: str) -> int | None:
    room = room_of(name)
    return next((index for index, floor in enumerate(FLOORS) if room in floor), None)


def imported_names(module: Module) -> Iterator[tuple[str, int]]:
    """Every dotted name that a module imports, and the line; `from a import b` gives `a.b`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = ["zbfx", *module.name.split(".")] if module.name != "zbfx" else ["zbfx"]
            anchor = parts[: len(parts) - node.level + module.is_package] if node.level else []
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def imported_modules(module: Module, modules: Library) -> Iterator[tuple[str, int]]:
    """The modules of the library that a module imports, also for types alone and inside functions, each once."""
    found: dict[str, int] = {}
    for name, line in imported_names(module):
        if within(name, "zbfx"):
            parts = name.removeprefix("zbfx.").split(".")
            prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
            target = next((prefix for prefix in prefixes if prefix in modules), "zbfx")
            if target != module.name:
                found.setdefault(target, line)
    yield from found.items()


def without_room(modules: Library) -> Iterator[Finding]:
    for module in modules.values():
        if room_of(module.name) is None:
            yield Finding(module.path, 1, "has no room: give it a place in FLOORS")
    rooms = {room_of(name) for name in modules}
    for room in (room for floor in FLOORS for room in floor if room not in rooms):
        yield Finding(THIS, 1, f"{room} is a room without files")


def against_the_order(modules: Library) -> Iterator[Finding]:
    for module in modules.values():
        for target, line in imported_modules(module, modules):
            above, own = floor_of(target), floor_of(module.name)
            if above is not None and own is not None and above > own:
                yield Finding(module.path, line, f"imports {target}, which is above it")


def circles(modules: Library) -> Iterator[Finding]:
    graph = networkx.DiGraph()
    for module in modules.values():
        graph.add_edges_from((module.name, target) for target, _ in imported_modules(module, modules))
    for circle in networkx.strongly_connected_components(graph):
        if len(circle) > 1:
            first, *others = sorted(circle)
            yield Finding(modules[first].path, 1, f"is in a circle of imports with {', '.join(others)}")


def too_much_known(modules: Library) -> Iterator[Finding]:
    for module in modules.values():
        room = str(room_of(module.name))
        if room in KNOW_ONLY:
            for target, line in imported_modules(module, modules):
                if room_of(target) not in KNOW_ONLY[room]:
                    yield Finding(module.path, line, f"imports {target}: {room} knows {', '.join(KNOW_ONLY[room])}")
        if room in WITHOUT_TORCH:
            for name, line in imported_names(module):
                if within(name, "torch"):
                    yield Finding(module.path, line, f"imports {name}: {room} knows no torch")


def is_private(name: str) -> bool:
    return re.match(r"_[^_]", name) is not None


def names_of_our_own(modules: Library) -> set[str]:
    """The names that classes, functions and modules of the library define."""
    found = set[str]()
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                # An attribute set on another object than `self` may be torch's.
                if isinstance(node, ast.Name):
                    found.add(node.id)
                elif ast.unparse(node.value) == "self":
                    found.add(node.attr)
    return found


def private_names(modules: Library) -> Iterator[Finding]:
    """Names of torch with one underscore: imported, in a chain of attributes, of a value, or a text for `getattr`."""
    ours = names_of_our_own(modules)
    for module in modules.values():
        if room_of(module.name) in PRIVATE_NAMES:
            continue
        for name, line in imported_names(module):
            if within(name, "torch") and any(map(is_private, name.split("."))):
                yield Finding(module.path, line, f"imports {name}: private names of torch are in {PRIVATE_NAMES[0]}")
        for node in (node for node in ast.walk(module.tree) if isinstance(node, ast.expr)):
            attribute = attribute_of(node)
            if attribute and is_private(attribute) and attribute not in ours and attribute not in PYTHONS:
                text = ast.unparse(node)
                yield Finding(module.path, node.lineno, f"{text}: private names of torch are in {PRIVATE_NAMES[0]}")


def attribute_of(node: ast.expr) -> str | None:
    """The attribute that an expression names: `x.y`, `getattr(x, "y")`, `vars(x)["y"]`."""
    match node:
        case ast.Attribute(attr=name):
            return name
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, ast.Constant(name), *_]
        ):
            return str(name)
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(name)):
            return str(name)
    return None


def definitions(body: list[ast.stmt]) -> Iterator[tuple[str, int, ast.expr | None]]:
    """The names that statements at the top of a module define, with their lines, and the value of a constant."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno, None
            case ast.Assign(targets=targets, value=value):
                names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
                yield from ((name.id, node.lineno, value) for name in names if isinstance(name.ctx, ast.Store))
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                yield name, node.lineno, value
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                yield from definitions([*inner, *other])


def defined_twice(modules: Library) -> Iterator[Finding]:
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for module in modules.values():
        for name, line, _ in definitions(module.tree.body):
            places[name].setdefault(module.name, line)
    for name, lines in sorted(places.items()):
        if len(lines) > 1 and name not in DEFINED_OFTEN:
            first, *others = lines
            yield Finding(modules[first].path, lines[first], f"defines {name}, as do {', '.join(others)}")


def is_text(node: ast.expr | None) -> bool:
    """Whether an expression is a text, or a collection of texts."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, str)
        case ast.JoinedStr():
            return True
        case ast.Tuple(elts=entries) | ast.List(elts=entries) | ast.Set(elts=entries):
            return any(map(is_text, entries))
        case ast.Dict(keys=keys):
            return any(map(is_text, keys))
        case ast.BinOp(left=left, right=right):
            return is_text(left) or is_text(right)
        case ast.Call(func=ast.Name(id="frozenset" | "set" | "tuple"), args=args):
            return any(map(is_text, args))
    return False


def comparisons(modules: Library) -> Iterator[Finding]:
    """Every comparison with a text, with a constant that is one, or with an attribute called `name`."""
    texts = {n for module in modules.values() for n, _, value in definitions(module.tree.body) if is_text(value)}

    def is_name(node: ast.expr) -> bool:
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                return name in texts or (name == "name" and isinstance(node, ast.Attribute))
            case ast.Tuple(elts=entries) | ast.List(elts=entries) | ast.Set(elts=entries):
                return any(map(is_name, entries))
        return is_text(node)

    for module in modules.values():
        for node in ast.walk(module.tree):
            match node:
                case ast.Compare(left=left, ops=ops, comparators=right) if any(map(is_name, [left, *right])):
                    found = any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in ops)
                case ast.Call(func=ast.Attribute(attr="startswith" | "endswith")):
                    found = True
                case ast.MatchValue(value=value):
                    found = is_name(value)
                case _:
                    found = False
            if found:
                yield Finding(module.path, node.lineno, ast.unparse(node))  # type: ignore[attr-defined]


def unexplained_comparisons(modules: Library) -> Iterator[Finding]:
    """Comparisons with names that the table gives no reason for, and entries of the table that are gone."""
    known = {
        f"{path}: {text}": path
        for files in COMPARISONS.values()
        for path, comparisons_there in files.items()
        for text in comparisons_there
    }
    found = list(comparisons(modules))
    for finding in found:
        if finding.key not in known:
            yield finding._replace(text=f"compares names, for no reason in the table: {finding.text}")
    for key in known.keys() - {finding.key for finding in found}:
        yield Finding(TABLE, 1, f"`{key}` is gone from the library")


RULES: Mapping[str, Callable[[Library], Iterator[Finding]]] = {
    "every file has a room": without_room,
    "imports go down": against_the_order,
    "no circle of imports": circles,
    "rooms know no more than they need": too_much_known,
    "private names of torch are in one room": private_names,
    "a name is defined once": defined_twice,
    "no behaviour by names": unexplained_comparisons,
}


def broken(rule: str) -> list[str]:
    """What breaks a rule."""
    return list(map(str, RULES[rule](library())))


def report(modules: Library) -> Iterator[str]:
    """A line a room, from above: its files, their lines, and the rooms that they import."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        arrows[str(room_of(module.name))] |= {str(room_of(target)) for target, _ in imported_modules(module, modules)}
    order = [room for floor in reversed(FLOORS) for room in floor]
    for room in order:
        own = [module for module in modules.values() if room_of(module.name) == room]
        lines = sum(module.line_count for module in own)
        targets = [target for target in order if target in arrows[room] and target != room]
        yield f"{room:16} {len(own):3} files {lines:6} lines   {' '.join(targets)}"
    count = sum(len(targets - {room}) for room, targets in arrows.items())
    yield f"{len(order)} rooms, {len(modules)} files, {count} imports between rooms"


def main() -> int:
    print(*report(library()), sep="\n")
    wrong = {rule: broken(rule) for rule in RULES}
    for rule, lines in wrong.items():
        print(f"\n{rule}: {len(lines)} wrong")
        print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "")
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
