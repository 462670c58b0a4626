"""What a model and its loss are, as far as a trace depends on it: by part, a text that differs where the part does.

Takes   a model and its loss.
Gives   texts by part: modules with their classes and modes, values that their code reads, layouts of tensors, hooks,
        and the sources of classes and functions, with what these name in their files.
Raises  nothing.
Source  ours. What it cannot see: what code reads from elsewhere than the modules and the names in its files, such as
        the environment, a file or a registry; objects without values of their own; C++.
"""

from __future__ import annotations

import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zbfx._torch import hook_tables, is_fake, original_of
from zbfx._transformers import UNREAD
from zbfx.spelled import spelled
from zbfx.trace.first_forward import OF_MODULES
from zbfx.trace.guard import attributes_read, named_modules
from zbfx.trace.tracer import canonical_names, named_tensors
from zbfx.user_pass import source_of

KNOWN_BY_VERSION = {*sys.stdlib_module_names, "torch", "zbfx"}  # plans name the versions of Python, torch and zbfx
PLAIN_OBJECTS = (SimpleNamespace, Namespace, partial)
SPELLED_AS_IS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.layout)
MOST_READ = 1 << 20  # entries: of larger tensors outside of parameters and buffers, layouts alone are read
MOST = 100_000  # values inside one attribute that are read
SHORT = 60  # characters of a text that is told as it is, and not hashed


def identity(model: nn.Module, loss_fn: Callable[..., Any] | None) -> dict[str, str]:
    """By part, what the model and its loss are."""
    known, found = Known(), dict[str, str]()
    first: dict[int, str] = {}
    for name, module in named_modules(model, loss_fn).items():
        title, owner = f"module {name}" if name else "the model", type(module)
        read = attributes_read(owner)  # type: ignore[arg-type]
        if first.setdefault(id(module), title) != title:
            found[title] = f"that of {first[id(module)]}"
            continue
        found[title] = f"{named(owner)} in {'train' if module.training else 'eval'} mode"
        own = {key: value for key, value in vars(module).items() if key not in OF_MODULES and key in read}
        own |= {key: value for key, value in vars(module).items() if isinstance(value, FunctionType | MethodType)}
        found |= {f"{title}: {key}": known.text(own[key]) for key in sorted(own.keys() - UNREAD)}
        hooks = [hook for table in hook_tables(module) for hook in table.values()]
        found |= {f"{title}: hooks": known.text(hooks)} if hooks else {}
        known.add_code(owner)
    canonical = canonical_names(model, loss_fn)
    for name, tensor in named_tensors(model, loss_fn).items():
        found[f"tensor {name}"] = layout_text(tensor) if canonical[name] == name else f"that of {canonical[name]}"
    if not isinstance(loss_fn, nn.Module):
        found["the loss"] = known.text(loss_fn)
    return found | {f"source of {name}": text for name, text in sorted(known.sources.items())}


def layout_text(tensor: Tensor) -> str:
    """A parameter or buffer without its values, which live in the model."""
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    trained = ", trained" if tensor.requires_grad else ""
    summed = f", gradient {tensor.grad_dtype}" if tensor.requires_grad else ""
    return f"{kind} {tensor.dtype} {tuple(tensor.shape)} {tuple(tensor.stride())}{trained}{summed}"


def named(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def hashed_text(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def is_known(module: str | None) -> bool:
    """Whether the code of a module follows from the versions that plans name; that of builtins has no module."""
    return module is None or module.partition(".")[0] in KNOWN_BY_VERSION


@cache
def installed_file(module: str) -> Path | None:
    """The file of a module of an installed package, which has a version."""
    file = getattr(sys.modules.get(module), "__file__", None)
    folders = [sysconfig.get_paths()[key] for key in ("purelib", "platlib")]
    return Path(file) if file and any(Path(file).is_relative_to(folder) for folder in folders) else None


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", "of no version"))


def names_of_code(code: CodeType) -> Iterator[str]:
    """The names that code reads, and the code inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_of_code(inner)


def functions_in(value: Any) -> list[FunctionType]:
    """A function, or those of a class: methods of every kind, properties, decorated ones."""
    if isinstance(value, type):
        return [function for entry in vars(value).values() for function in functions_in_entry(entry)]
    return functions_in_entry(value)


def functions_in_entry(value: Any) -> list[FunctionType]:
    inner = [getattr(value, name, None) for name in ("fget", "__func__", "__wrapped__", "func")]
    found = [original_of(entry) for entry in (value, *inner)]
    return [function for function in found if isinstance(function, FunctionType)]


@dataclass
class Known:
    """What has been read so far: `sources`, a hash of each class, function and value that code names."""

    sources: dict[str, str] = field(default_factory=dict)
    left: int = MOST

    def text(self, value: Any) -> str:
        """A value as a text: its own if that is short, else a hash of it."""
        self.left = MOST
        found = self.described(value, ())
        return found if len(found) <= SHORT else hashed_text(found)

    def described(self, value: Any, outer: tuple[int, ...]) -> str:
        self.left -= 1
        if self.left < 0 or id(value) in outer:
            return "..."
        inside = partial(self.described, outer=(*outer, id(value)))
        if isinstance(value, SPELLED_AS_IS):
            return repr(value)
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, Tensor):
            return tensor_text(value)
        if isinstance(value, nn.Module):
            self.add_code(type(value))
            return f"{named(type(value))} {value!r}"
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, FunctionType | BuiltinFunctionType | type):
            self.add_code(value)
            return f"{named(value)}{self.held_by(value, outer)}"
        if isinstance(value, MethodType):
            return f"{inside(value.__func__)} of {inside(value.__self__)}"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{inside(key)}: {inside(entry)}' for key, entry in value.items())}}}"
        if isinstance(value, Set):
            return f"{{{', '.join(sorted(map(inside, value)))}}}"
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return f"{type(value).__name__}({', '.join(map(inside, value))})"
        owner = type(value)
        self.add_code(owner)
        if isinstance(value, partial):
            return f"partial({inside(value.func)}, {inside(value.args)}, {inside(value.keywords)})"
        if isinstance(value, PLAIN_OBJECTS) or not is_known(owner.__module__):
            own = vars(value) if hasattr(value, "__dict__") else {}
            slots = [name for part in owner.__mro__ for name in getattr(part, "__slots__", ()) if hasattr(value, name)]
            entries = own or {name: getattr(value, name) for name in slots}
            entries = {key: entries[key] for key in sorted(entries.keys() - UNREAD)}
            return f"{named(owner)}{inside(entries)}" if entries else named(owner)
        return spelled(value) if "__repr__" in owner.__dict__ else named(owner)

    def held_by(self, value: Any, outer: tuple[int, ...]) -> str:
        """What a function holds beside its code: its closure and its defaults."""
        if not isinstance(value, FunctionType) or is_known(value.__module__):
            return ""
        closed = [cell.cell_contents for cell in value.__closure__ or () if has_content(cell)]
        held = [*closed, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return f" with {self.described(held, (*outer, id(value)))}" if held else ""

    def add_code(self, value: Any) -> None:
        """Read the source of a class or function, and of what it names in its file. Of an installed package, read the
        file, and the version."""
        owners = [owner for owner in value.__mro__ if owner is not object] if isinstance(value, type) else [value]
        for owner in owners:
            module = owner.__module__
            if is_known(module) or isinstance(owner, BuiltinFunctionType):
                continue
            if (file := installed_file(module)) is not None:
                package = module.partition(".")[0]
                self.sources.setdefault(f"package {package}", package_version(package))
                if module not in self.sources:
                    self.sources[module] = sha256(file.read_bytes()).hexdigest()[:16]
            elif (name := named(owner)) not in self.sources:
                self.sources[name] = hashed_text(source_of(owner))
                for function in functions_in(owner):
                    self.add_named(function)

    def add_named(self, function: FunctionType) -> None:
        """Read what a function names: classes, functions and values of its file, and of modules that it names."""
        names = dict.fromkeys(names_of_code(function.__code__))
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType):
                if not is_known(value.__name__) and installed_file(value.__name__) is None:
                    for inner in names:
                        self.add_value(f"{value.__name__}.{inner}", vars(value).get(inner))
            else:
                self.add_value(f"{function.__module__}.{name}", value)

    def add_value(self, name: str, value: Any) -> None:
        value = original_of(value)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self.add_code(value)
        elif value is not None and name not in self.sources:
            self.sources[name] = ""  # it may name itself
            left, self.left = self.left, MOST
            self.sources[name] = hashed_text(self.described(value, ()))
            self.left = left


def has_content(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not filled yet
        return False


def tensor_text(tensor: Tensor) -> str:
    """A tensor that is no parameter or buffer, with its values: graphs hold them."""
    layout = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tuple(tensor.stride())}"
    if type(tensor) is not Tensor or is_fake(tensor) or tensor.is_meta or tensor.numel() > MOST_READ:
        return layout
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return layout
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{layout} {sha256(octets).hexdigest()[:16]}"
