"""A model that the command line names: FILE.py:FUNCTION -> the arguments of `zbfx.compile`.

Raises  `ZbfxError` for what names no such function, and for what the function raises, or returns instead.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zbfx.errors import ZbfxError, first_line, listed

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
EXAMPLE = "a function that returns the arguments of zbfx.compile as a dict, at least its model and example inputs"


def named_arguments(command: str, target: str) -> Mapping[str, Any]:
    """What the function returns, for a command of this name. Seeds torch's global generators."""
    import torch  # which the planning commands do without

    import zbfx

    torch.manual_seed(0)  # processes that torchrun starts make one model, and one example
    function = named_function(command, target)
    return checked_arguments(target, called(target, function), inspect.signature(zbfx.compile))


def called(target: str, function: Callable[[], Mapping[str, Any]]) -> Any:
    """What the function returns. Raises `ZbfxError` if it cannot be called without arguments, or raises an error."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ZbfxError(f"{target} is {EXAMPLE}; it takes arguments: {error}") from error
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ZbfxError(f"{target} raised {said(error)}, before anything was compiled") from error


def checked_arguments(target: str, given: Any, signature: inspect.Signature) -> Mapping[str, Any]:
    """What the function returned, if it is a dict of arguments that zbfx.compile takes."""
    if not isinstance(given, Mapping):
        raise ZbfxError(f"{target} is {EXAMPLE}; it returned {type(given).__name__} {given!r}"[:300])
    if "model" not in given:
        found = f"a dict without 'model': {listed(given)}" if given else "an empty dict"
        raise ZbfxError(f"{target} is {EXAMPLE}; it returned {found}")
    unknown = [key for key in given if key not in signature.parameters]
    if unknown:
        close = get_close_matches(str(unknown[0]), signature.parameters, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else f". Known: {', '.join(signature.parameters)}"
        raise ZbfxError(f"{target} returned {unknown[0]!r}, which zbfx.compile does not take{meant}")
    return given


def named_function(command: str, target: str) -> Callable[[], Mapping[str, Any]]:
    """The function that `FILE.py:FUNCTION` or `module:function` names."""
    place, _, name = target.rpartition(":")
    if not place:
        raise ZbfxError(f"{command} takes FILE.py:FUNCTION, {EXAMPLE}; found {target!r}, without a ':'")
    usage = f"{command} takes FILE.py:FUNCTION, {EXAMPLE}; found {target!r}"
    module = load_module(place, usage)
    try:
        function = getattr(module, name)
    except AttributeError as error:
        raise ZbfxError(f"{usage}: {error}") from error
    if not callable(function):
        raise ZbfxError(f"{target} is {EXAMPLE}; found {type(function).__name__}")
    return function


def load_module(place: str, usage: str) -> Any:
    """The module in a file, or of a name. Raises `ZbfxError` if there is none, or if it does not import."""
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ZbfxError(f"{usage}: there is no file {place}")
    if not is_file and not all(part.isidentifier() for part in place.split(".")):
        raise ZbfxError(f"{usage}: {place!r} is neither a .py file nor the name of a module")
    try:
        return load_file(Path(place)) if is_file else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError) and not lines_of(error):
            raise ZbfxError(f"{usage}: {error}") from error
        raise ZbfxError(f"{place} does not import: {said(error)}") from error


def said(error: BaseException) -> str:
    """An error of the user's code, and the last line of it that ran; of calls into libraries, the line that calls."""
    lines = lines_of(error)
    own = [line for line in lines if not line.filename.startswith(LIBRARIES)] or lines
    at = f", at {own[-1].filename}:{own[-1].lineno} `{own[-1].line}`" if own else ""
    text = f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
    return text + at


def lines_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an error was raised, from the first line of code that is not of this file or of Python's import."""
    stack = traceback.extract_tb(error.__traceback__)
    ours = (__file__, importlib.__file__)
    return [f for f in stack if f.filename not in ours and not f.filename.startswith("<frozen importlib")]


def load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
