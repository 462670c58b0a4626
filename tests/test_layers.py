"""Import rules, read from the syntax trees. Run: pytest tests/test_layers.py (imports nothing of zbfx)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted(
    [*(ROOT / "passes").glob("*.py"), *(f for f in (ROOT / "zbfx").rglob("*.py") if "passes" not in f.parts)]
)


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = ("zbfx", *parts) if parts[0] == "passes" else parts
    return ".".join(parts).removesuffix(".__init__")


def imports(source: str, module: str, is_package: bool) -> set[str]:
    """Every dotted name that `source` imports, also inside functions; `from a import b` gives `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            anchor = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def imports_of(file: Path) -> set[str]:
    return imports(file.read_text(), module_name(file), file.name == "__init__.py")


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def private_torch_names(source: str) -> set[str]:
    """Dotted names below `torch` with a part that starts with one underscore: imports and attribute chains."""
    names = {name for name in imports(source, "", False) if within(name, ("torch",))}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if within(dotted, ("torch",)) and dotted.replace(".", "").replace("_", "").isalnum():
                names.add(dotted)
    return {
        name for name in names if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }


def files_under(*prefixes: str) -> list[Path]:
    return [file for file in LIBRARY if within(module_name(file), prefixes)]


def test_reader_sees_all_forms_of_import() -> None:
    source = "import a.b as c\nfrom . import d\nfrom .e import f\ndef g():\n    from h.i import j"
    assert imports(source, "zbfx.schedule", True) == {"a.b", "zbfx.schedule.d", "zbfx.schedule.e.f", "h.i.j"}
    assert imports(source, "zbfx.schedule.x", False) == {"a.b", "zbfx.schedule.d", "zbfx.schedule.e.f", "h.i.j"}


def test_reader_sees_private_torch_names() -> None:
    source = "from torch._x import y\nimport torch\ntorch._C.z()\ntorch.nn.Module.__init__\nfrom torch.fx import _lazy"
    assert private_torch_names(source) == {"torch._x.y", "torch._C", "torch._C.z", "torch.fx._lazy"}


def test_plan_imports_only_errors() -> None:
    ours = {name for name in imports_of(ROOT / "zbfx" / "plan.py") if within(name, ("zbfx", "torch"))}
    assert ours == {"zbfx.errors.ZbfxError"}


PLANNING = (  # from below to above
    "zbfx.errors",
    "zbfx.plan",
    "zbfx.timing",
    "zbfx.show",
    "zbfx.schedule.schedule",
    "zbfx.schedule.orders",
    "zbfx.schedule.bounds",
    "zbfx.schedule.integer",
    "zbfx.schedule.search",
    "zbfx.schedule",
)


@pytest.mark.parametrize("file", files_under(*PLANNING), ids=module_name)
def test_planner_and_pictures_know_neither_torch_nor_models(file: Path) -> None:
    names = imports_of(file)
    own = next(level for level, room in enumerate(PLANNING) if within(module_name(file), (room,)))
    allowed = PLANNING[: own + 1]
    assert {name for name in names if within(name, ("zbfx",)) and not within(name, allowed)} == set()
    assert {name for name in names if within(name, ("torch",))} == set()


@pytest.mark.parametrize("file", files_under("zbfx.passes"), ids=module_name)
def test_passes_never_import_what_comes_after_them(file: Path) -> None:
    allowed = ("zbfx.graphs", "zbfx.plan", "zbfx.errors", "zbfx.rng", "zbfx._torch", "zbfx.passes")
    assert {name for name in imports_of(file) if within(name, ("zbfx",)) and not within(name, allowed)} == set()


@pytest.mark.parametrize("file", [file for file in LIBRARY if file.name != "_torch.py"], ids=module_name)
def test_private_torch_names_stay_in_one_file(file: Path) -> None:
    assert private_torch_names(file.read_text()) == set()
