"""Import rules and rules of names, read from the syntax trees (tests/layers.py). Run: pytest tests/test_layers.py"""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest

from tests import layers
from tests.layers import Finding, Module, module_of
from tests.layers_comparisons import COMPARISONS


def texts(found: list[Finding]) -> list[str]:
    return [f"{finding.path}:{finding.line} {finding.text}" for finding in found]


def made_up(**sources: str) -> Mapping[str, Module]:
    """Modules of these sources, named with `__` for dots."""
    paths = {name.replace("__", "/"): source for name, source in sources.items()}
    modules = [module_of(f"zbfx/{path}.py", source) for path, source in paths.items()]
    return {module.name: module for module in modules}


@pytest.mark.parametrize("rule", layers.RULES)
def test_rule(rule: str) -> None:
    assert layers.broken(rule) == []


def test_no_more_than_five_names_may_be_defined_often() -> None:
    assert len(layers.DEFINED_OFTEN) <= 5


def test_every_comparison_is_in_one_group() -> None:
    entries = [(path, text) for files in COMPARISONS.values() for path, texts in files.items() for text in texts]
    assert len(entries) == len(set(entries))


def test_library_has_all_files() -> None:
    modules = layers.library()
    assert {"zbfx", "plan", "passes.split", "trace.tracer", "__main__"} <= modules.keys()
    assert modules["passes.split"].path == "passes/split.py"
    assert len(modules) == len({module.path for module in modules.values()})


def test_reader_sees_all_forms_of_import() -> None:
    source = "import a.b as c\nfrom . import d\nfrom .e import f\ndef g():\n    from h.i import j"
    package, module = module_of("zbfx/show/__init__.py", source), module_of("zbfx/show/x.py", source)
    assert package.name == "show"
    for found in (package, module):
        names = {name for name, _ in layers.imported_names(found)}
        assert names == {"a.b", "zbfx.show.d", "zbfx.show.e.f", "h.i.j"}


def test_imports_of_names_are_imports_of_their_modules() -> None:
    source = "from zbfx import plan\nimport zbfx.show.text\nfrom zbfx.plan import Kind\nfrom zbfx import __version__"
    modules = made_up(plan="", show__text="", show__x=source)
    found = list(layers.imported_modules(modules["show.x"], modules))
    assert found == [("plan", 1), ("show.text", 2), ("zbfx", 4)]


def test_a_file_without_a_room_is_named() -> None:
    found = layers.without_room(made_up(odd="", odd__corner="", trace__new=""))
    assert texts(list(found))[:2] == [
        f"zbfx/{path}.py:1 has no room: give it a place in FLOORS" for path in ("odd", "odd/corner")
    ]


def test_imports_for_types_and_inside_functions_count() -> None:
    source = "if TYPE_CHECKING:\n    from zbfx.costs import clock\ndef f():\n    import zbfx.cli"
    found = layers.against_the_order(made_up(trace__x=source, costs__clock="import zbfx.trace.x", cli=""))
    assert texts(list(found)) == [
        "zbfx/trace/x.py:2 imports costs.clock, which is above it",
        "zbfx/trace/x.py:4 imports cli, which is above it",
    ]


def test_circles_are_found_within_a_room_too() -> None:
    modules = made_up(comm__a="import zbfx.comm.b", comm__b="import zbfx.comm.c", comm__c="import zbfx.comm.a", plan="")
    assert texts(list(layers.circles(modules))) == ["zbfx/comm/a.py:1 is in a circle of imports with comm.b, comm.c"]


def test_planner_and_pictures_know_neither_torch_nor_models() -> None:
    modules = made_up(
        schedule__x="import torch.fx\nimport zbfx.rng", rng="", passes__x="import zbfx.show.y", show__y=""
    )
    assert texts(list(layers.too_much_known(modules))) == [
        f"zbfx/schedule/x.py:2 imports rng: schedule knows {', '.join(layers.KNOW_ONLY['schedule'])}",
        "zbfx/schedule/x.py:1 imports torch.fx: schedule knows no torch",
        "zbfx/passes/x.py:1 imports show.y: passes knows errors, rng, _torch, plan, graphs, passes",
    ]


def test_private_names_of_torch_are_found_however_they_are_reached() -> None:
    source = (
        "from torch._x import y\nimport torch\ntorch._C.z()\ntorch.nn.Module.__init__\nfrom torch.fx import _lazy\n"
        "module._buffers\nhasattr(model, '_orig_mod')\nvars(module)['_hooks']\nself._own = 1\nother._own\nos._exit(1)\n"
    )
    found = list(layers.private_names(made_up(trace__x=source, _torch=source)))
    assert sorted({(f.line, f.text.partition(": private")[0]) for f in found}) == [
        (1, "imports torch._x.y"),
        (3, "torch._C"),
        (5, "imports torch.fx._lazy"),
        (6, "module._buffers"),
        (7, "hasattr(model, '_orig_mod')"),
        (8, "vars(module)['_hooks']"),
    ]


def test_definitions_of_every_kind_are_seen() -> None:
    source = "def f(): g = 1\nclass C: x = 1\nA = B = 1\nD, E = 1, 2\nF: int = 3\nif A:\n    G = 1\nelse:\n    H = 1\n"
    found = [name for name, _, _ in layers.definitions(ast.parse(source).body)]
    assert found == ["f", "C", "A", "B", "D", "E", "F", "G", "H"]
    twice = layers.defined_twice(made_up(plan="Line = 1\n__all__ = []", rng="__all__ = []\n\nclass Line: pass"))
    assert texts(list(twice)) == ["zbfx/plan.py:1 defines Line, as do rng"]


def test_comparisons_with_names_are_seen() -> None:
    source = (
        "a == 'x'\nb in ('x', c)\n'x' not in d\nnode.name == e\nf == MODE\ng != plan.MODES\nh.startswith(i)\n"
        "match j:\n    case 'x': pass\n"
        "k == 1\nl is MODE\nm.name is n\no in p\nq == r.kind\n"
    )
    found = list(layers.comparisons(made_up(plan="MODE = 'x'\nMODES = ('x', 'y')", trace__x=source)))
    assert [finding.line for finding in found] == [1, 2, 3, 4, 5, 6, 7, 9]
    assert found[-1].text == "'x'"
    unexplained = texts(list(layers.unexplained_comparisons(made_up(trace__x="a == 'x'"))))
    assert "zbfx/trace/x.py:1 compares names, for no reason in the table: a == 'x'" in unexplained
    assert any("is gone from the library" in text for text in unexplained)
