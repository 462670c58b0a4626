"""What a model and its loss are, as far as a trace depends on it: by part, a text that differs where the part does.

Takes   a model and its loss.
Gives   texts by part: modules with their classes and modes, values that their code reads, layouts of tensors, hooks,
        and the sources of classes and functions, with what these name in their files.
Raises  nothing.
Source  ours. What it cannot see: what code reads from elsewhere than the modules and the names in its files, such as
        the environment, a file or a registry; C++. Objects without a text of their own are named as strange: no plan of
        them is kept.
"""

from __future__ import annotations

import sys
import sysconfig
from abc import ABC
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zbfx._torch.fakes import is_fake
from zbfx._torch.modules import original_of, own_buffers, own_parameters
from zbfx._transformers import UNREAD
from zbfx.spelled import ADDRESS, spelled
from zbfx.trace.first_forward import OF_MODULES
from zbfx.trace.guard import mode, named_modules
from zbfx.trace.left_behind import users_hooks
from zbfx.trace.tensor_names import canonical_names, named_tensors
from zbfx.user_pass import source_of

KNOWN_BY_VERSION = {*sys.stdlib_module_names, "torch", "zbfx"}  # plans name the versions of Python, torch and zbfx
NO_VALUES = (property, MemberDescriptorType)  # entries of classes
PLAIN_OBJECTS = (SimpleNamespace, Namespace, partial)
SPELLED_AS_IS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.layout)
MOST_READ = 1 << 20  # entries: of larger tensors outside of parameters and buffers, layouts alone are read
MOST = 100_000  # values inside one attribute that are read
SHORT = 60  # characters of a text that is told as it is, and not hashed


class Identity(NamedTuple):
    """What a model and its loss are, by part; and by name what of them no text tells, so that none may match."""

    parts: dict[str, str]
    strange: tuple[str, ...]


def identity(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Identity:
    """By part, what the model and its loss are."""
    modules, tensors, found = named_modules(model, loss_fn), named_tensors(model, loss_fn), dict[str, str]()
    titles = {name: f"module {name}" if name else "the model" for name in modules}
    first: dict[int, str] = {}
    for name, module in modules.items():
        first.setdefault(id(module), titles[name])
    known = Known({**{id(tensor): f"tensor {name}" for name, tensor in tensors.items()}, **first})
    for name, module in modules.items():
        title = titles[name]
        if first[id(module)] != title:
            found[title] = f"that of {first[id(module)]}"
            continue
        found[title] = f"{known.named_code(type(module))} in {mode(module.training)} mode"
        own = own_attributes(module)
        found |= {f"{title}: {key}": known.text(value) for key, value in own.items()}
        hooks = list(users_hooks(module))
        found |= {f"{title}: hooks": known.text(hooks)} if hooks else {}
    canonical = canonical_names(model, loss_fn)
    for name, tensor in tensors.items():
        found[f"tensor {name}"] = layout_text(tensor) if canonical[name] == name else f"that of {canonical[name]}"
    if not isinstance(loss_fn, nn.Module):
        found["the loss"] = known.text(loss_fn)
    sources = {f"source of {name}": ", ".join(texts) for name, texts in sorted(known.sources.items())}
    values = {f"value of {name}": text for name, text in sorted(known.values.items()) if text}
    return Identity(found | sources | values, tuple(known.strange))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside what every module does: functions anywhere may read it."""
    return {key: vars(module)[key] for key in sorted(vars(module).keys() - OF_MODULES - UNREAD)}


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


def code_text(code: CodeType) -> str:
    """Instructions, names and constants, without lines."""
    constants = [code_text(c) if isinstance(c, CodeType) else constant_text(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} ({', '.join(constants)})"


def constant_text(value: Any) -> str:
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


@dataclass
class Known:
    """What has been read so far: `sources`, hashes of the classes and functions that code names, by name; `values`, a
    hash of each value that it names, and of what functions hold; `strange`, the kinds of objects that no text tells."""

    parts: Mapping[int, str] = field(default_factory=dict)  # by id, modules and tensors that are told of elsewhere
    sources: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    strange: dict[str, None] = field(default_factory=dict)
    codes: dict[int, tuple[Any, str]] = field(default_factory=dict)  # by id, classes and functions, with their hashes
    left: int = MOST

    def text(self, value: Any) -> str:
        """A value as a text: its own if that is short, else a hash of it."""
        before, self.left = self.left, MOST
        found = self.described(value, ())
        self.left = before
        return found if len(found) <= SHORT else hashed_text(found)

    def described(self, value: Any, outer: tuple[int, ...]) -> str:
        value = original_of(value)
        self.left -= 1
        if self.left < 0 or id(value) in outer:
            return "..."
        if id(value) in self.parts:
            return self.parts[id(value)]
        inside = partial(self.described, outer=(*outer, id(value)))
        if isinstance(value, SPELLED_AS_IS):
            return repr(value)
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, Tensor):
            return tensor_text(value)
        if isinstance(value, np.ndarray | np.generic):
            held = inside(value.tolist()) if value.dtype.hasobject else sha256(value.tobytes()).hexdigest()[:16]
            return f"{type(value).__name__} {value.dtype} {value.shape} {held}"
        if isinstance(value, nn.Module):
            name = f"{self.named_code(type(value))} in {mode(value.training)} mode"
            children = {**own_parameters(value), **own_buffers(value), **dict(value.named_children())}
            return f"{name} {inside([own_attributes(value), children, list(users_hooks(value))])}"
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, FunctionType | BuiltinFunctionType | type):
            return f"{self.named_code(value)}{self.held_by(value, outer)}"
        if isinstance(value, MethodType):
            return f"{inside(value.__func__)} of {inside(value.__self__)}"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{inside(key)}: {inside(entry)}' for key, entry in value.items())}}}"
        if isinstance(value, Set):
            return f"{{{', '.join(sorted(map(inside, value)))}}}"
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return f"{type(value).__name__}({', '.join(map(inside, value))})"
        owner = self.named_code(type(value))
        if isinstance(value, partial):
            return f"partial({inside(value.func)}, {inside(value.args)}, {inside(value.keywords)})"
        if isinstance(getattr(value, "__wrapped__", None), FunctionType):
            return f"{owner} of {inside(value.__wrapped__)}"
        is_own = isinstance(value, PLAIN_OBJECTS) or not is_known(type(value).__module__)
        entries = entries_of(value)
        if entries is None or ("__repr__" in type(value).__dict__ and not is_own):
            return self.printed(value)
        return f"{owner}{inside(entries)}" if entries else owner

    def printed(self, value: Any) -> str:
        """An object as it prints itself. One that prints its address is strange, but for a plain `object`, which holds
        nothing."""
        if type(value) is not object and ADDRESS.search(repr(value)):
            self.strange[named(type(value))] = None
        return spelled(value)

    def held_by(self, value: Any, outer: tuple[int, ...]) -> str:
        """What a function holds beside its code: its closure and its defaults."""
        if not isinstance(value, FunctionType) or is_known(value.__module__):
            return ""
        closed = [in_cell(cell) for cell in value.__closure__ or ()]
        held = [*closed, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return f" with {self.described(held, (*outer, id(value)))}" if held else ""

    def named_code(self, value: Any) -> str:
        """The name of a class or function, once its source is read, and what it names in its file; with a hash where it
        is not the first of its name. Of an installed package, the file is read, and the version."""
        name, module = named(value), value.__module__
        for base in value.__mro__[1:] if isinstance(value, type) else ():
            self.named_code(base)
        if is_known(module) or isinstance(value, BuiltinFunctionType):
            return name
        if (file := installed_file(module)) is not None:
            package = module.partition(".")[0]
            title = f"package {package}"
            if title not in self.sources:  # versions are read from files
                self.sources[title] = [package_version(package)]
            if module not in self.sources:
                self.sources[module] = [sha256(file.read_bytes()).hexdigest()[:16]]
            return name
        if id(value) not in self.codes:
            self.codes[id(value)] = value, ""  # it may name itself
            digest = hashed_text("\n".join(self.code_texts(value)))
            self.codes[id(value)] = value, digest
            kinds = self.sources.setdefault(name, [])
            kinds += [] if digest in kinds else [digest]
            for function in functions_in(value):
                self.add_named(function)
        digest = self.codes[id(value)][1]
        return f"{name} {digest}" if digest and digest != self.sources[name][0] else name

    def code_texts(self, value: Any) -> Iterator[str]:
        """The source of a class or function, and its code; of a class also its bases, what its methods hold, and its
        values."""
        yield source_of(value)
        for function in functions_in(value):
            yield code_text(function.__code__)
        if isinstance(value, type):
            yield " ".join(map(self.named_code, value.__bases__))
            yield from (self.text_held(function) for function in functions_in(value))
            for key in sorted(vars(value).keys() - vars(ABC).keys()):
                entry = vars(value)[key]
                if not key.startswith("__") and not isinstance(entry, NO_VALUES) and not functions_in_entry(entry):
                    yield f"{key}: {self.text(entry)}"

    def text_held(self, value: Any) -> str:
        """What `held_by` tells of a function, hashed."""
        before, self.left = self.left, MOST
        found = self.held_by(value, ())
        self.left = before
        return found and hashed_text(found)

    def add_named(self, function: FunctionType) -> None:
        """Read what a function names: classes, functions and values of its file, and of modules that it names."""
        names = dict.fromkeys(names_of_code(function.__code__))
        self.add_from(function.__module__, function.__globals__, names, set())

    def add_from(self, place: str, space: Mapping[str, Any], names: Collection[str], seen: set[str]) -> None:
        seen.add(place)
        for name in names:
            value = space.get(name)
            if not isinstance(value, ModuleType):
                self.add_value(f"{place}.{name}", value)
            elif value.__name__ not in seen and not is_known(value.__name__) and not installed_file(value.__name__):
                self.add_from(value.__name__, vars(value), names, seen)

    def add_value(self, name: str, value: Any) -> None:
        value = original_of(value)
        is_code = isinstance(value, type | FunctionType | BuiltinFunctionType)
        if is_code:
            self.named_code(value)
        if value is not None and name not in self.values:
            self.values[name] = ""  # it may name itself
            self.values[name] = self.text_held(value) if is_code else hashed_text(self.text(value))


def entries_of(value: Any) -> dict[str, Any] | None:
    """What an object holds in its dict and its slots; None if it has neither."""
    parts = [vars(part).get("__slots__") for part in type(value).__mro__]
    slots = [(part,) if isinstance(part, str) else tuple(part) for part in parts if part is not None]
    if not hasattr(value, "__dict__") and not slots:
        return None
    found = {name: getattr(value, name) for part in slots for name in part if hasattr(value, name)}
    found |= vars(value) if hasattr(value, "__dict__") else {}
    return {key: found[key] for key in sorted(found.keys() - UNREAD)}


def in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "not filled yet"


def tensor_text(tensor: Tensor) -> str:
    """A tensor that is no parameter or buffer, with its values: graphs hold them."""
    trained = " trained" if tensor.requires_grad else ""
    layout = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tuple(tensor.stride())}{trained}"
    if type(tensor) not in (Tensor, nn.Parameter) or is_fake(tensor) or tensor.is_meta or tensor.numel() > MOST_READ:
        return layout
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return layout
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{layout} {sha256(octets).hexdigest()[:16]}"
