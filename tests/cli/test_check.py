"""`python -m zbfx check`: a right pipeline, a wrong target, a model that cannot be compiled."""

from pathlib import Path

import pytest
import torch

from zbfx.cli import main
from zbfx.named_model import named_arguments

MODEL = """
import torch
from torch import nn

def pipeline():
    torch.manual_seed(0)
    # No matrix products: those that add into a gradient round in other ways from one CPU to another.
    model = nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.LayerNorm(4))
    return {
        "model": model,
        "example_inputs": (torch.randn(2, 4),),
        "example_targets": torch.tensor([0, 2]),
        "loss_fn": nn.functional.cross_entropy,
    }

def control_flow():
    class Branch(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x
    return {**pipeline(), "model": nn.Sequential(nn.Linear(4, 3), Branch())}

def three():
    return 3

def bare():
    return {"stages": 2}

def empty():
    return {}

def misspelt():
    return {**pipeline(), "microbatch": 2}

number = 3

def fails():
    raise ValueError("of mine")

def leaves():
    raise SystemExit(3)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "user_model.py"
    path.write_text(MODEL)
    return str(path)


@pytest.mark.slow
def test_a_right_pipeline_is_reported(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{target}:pipeline", "--stages", "2"]) == 0
    # Two losses, their mean and four gradients, in two steps, by the programs and by the model.
    assert capsys.readouterr().out == "28 results compared, 14 equal in bits, 0 wrong\n"


def test_programs_are_proven_without_running(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbfx.check", None)
    assert main(["check", f"{target}:pipeline", "--programs", "--stages", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("proven of the programs of 3 ranks, ")
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")][1:] == [
        *("messages", "waits", "values", "gradients", "buffers", "beside others"),
        *(f"memory, rank {rank}" for rank in range(3)),
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "has no attribute 'missing'"),
        ("number", "found int"),
        ("three", "it returned int 3"),
        ("bare", "it returned a dict without 'model': stages"),
        ("empty", "it returned an empty dict"),
        ("misspelt", "returned 'microbatch', which zbfx.compile does not take; did you mean 'microbatches'?"),
        ("control_flow", "user_model.py:"),
        ("fails", 'fails raised ValueError: of mine, at {0}:37 `raise ValueError("of mine")`, before anything'),
        ("leaves", "leaves raised SystemExit: 3, at "),
    ],
)
def test_what_cannot_be_checked_says_why(
    name: str, words: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{target}:{name}"]) == 2
    assert words.format(target) in capsys.readouterr().err


def test_a_function_that_seeds_nothing_makes_one_model_in_all_processes(target: str) -> None:
    Path(target).write_text(MODEL.replace("torch.manual_seed(0)", "pass"))
    first, second = (named_arguments("check", f"{target}:pipeline")["example_inputs"][0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nimport no_such_module", "No module named 'no_such_module', at {0}:2 `import no_such_module`"),
        ("from os import no_such", "cannot import name 'no_such' from 'os'"),
        ("def pipeline(:", "SyntaxError: invalid syntax (user_model.py, line 1)"),
        ("import sys\nsys.exit('no')", "SystemExit: no, at {0}:2 `sys.exit('no')`"),
        ("import torch\n\ntorch.ones(2) @ torch.ones(3)", "at {0}:3 `torch.ones(2) @ torch.ones(3)`"),
    ],
)
def test_files_that_do_not_import_name_their_own_line(
    text: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "user_model.py"
    path.write_text(text)
    assert main(["check", f"{path}:pipeline"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"zbfx: error: {path} does not import: ")
    assert found.format(path) in message


@pytest.mark.parametrize("place", [".", "..", "a..b", "user model"])
def test_what_is_no_module(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{place}:pipeline"]) == 2
    assert capsys.readouterr().err.endswith(f": {place!r} is neither a .py file nor the name of a module\n")


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere/model.py:pipeline"]) == 2
    assert "nowhere/model.py:pipeline" in capsys.readouterr().err
