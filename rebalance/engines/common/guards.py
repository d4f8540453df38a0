"""What a plug-in assumes about its engine, checked before anything of the engine is changed.

All of it is read from the engine's source files, and nothing of the engine is imported: the release
that is installed and a folder of another one are judged alike, without a GPU. A name shows that
what is read is still there, a signature that a call still fits, and a line that a function still
does what the plug-in depends on. Where figures depend on all of a function, its syntax tree is
compared, without comments and layout. A check that fails refuses to load the plug-in with one
sentence; the engine serves as without it.

The structure decides, not the release: an older one than was tested is refused, a newer one with
the same structure is loaded, and observed first.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import logging
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eplb.errors import ConfigError

log = logging.getLogger(__name__)

Lines = tuple[str, ...]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Fields of syntax trees that differ between releases of Python for the same source.
OF_PYTHON = ("ctx", "kind", "type_comment", "type_ignores", "type_params")


@dataclass(frozen=True)
class Assumptions:
    """One engine as it was read. Modules, classes and functions are named by dotted paths."""

    package: str
    releases: tuple[str, str]  # oldest and newest series on which the contract tests pass
    # Names of parameters, in order; "[name]" may be missing, and any may follow a last "...".
    signatures: Mapping[str, str] = field(default_factory=dict)
    # Names of a module, or of a class and its objects; "first|second": one of them.
    attributes: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, Lines] = field(default_factory=dict)  # parts of a function's source
    digests: Mapping[str, str] = field(default_factory=dict)  # ``source_digest`` of a function

    @property
    def as_read(self) -> str:
        """Where the structure was read, for a message."""
        return f"expected as in {self.package} {self.span}"

    @property
    def span(self) -> str:
        """The releases that were tested, for a message."""
        return " to ".join(dict.fromkeys(self.releases))


@dataclass(frozen=True)
class Part:
    """A module, a class or a function of a package, as its file has it."""

    module: Module
    node: ast.AST

    @property
    def text(self) -> str:
        """Its source."""
        if not isinstance(self.node, Definition):
            return self.module.text
        lines = self.module.text.splitlines()
        return "\n".join(lines[self.node.lineno - 1 : self.node.end_lineno])


class Module:
    """One file of a package, and what it binds.

    Args:
        name: its dotted path.
        file: its source.
    """

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self.text = file.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.bindings = dict(_bindings(self.tree.body))

    def origin(self, imported: ast.ImportFrom, name: str) -> str:
        """The dotted path of what a line ``from X import Y`` binds to a name."""
        base = self.name.split(".")
        if imported.level:
            parents = imported.level - (self.file.name == "__init__.py")
            base = base[: len(base) - parents]
        else:
            base = []
        (own,) = (each.name for each in imported.names if (each.asname or each.name) == name)
        return ".".join(filter(None, [*base, imported.module, own]))


class PackageSource:
    """The source files of a package; each is read once.

    Args:
        folder: of the package.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[Path, Module | None] = {}  # None: there is no such file

    @property
    def files(self) -> list[Path]:
        """The files that were read."""
        return [file for file, module in self._modules.items() if module is not None]

    def forget(self, file: Path) -> None:
        """Read a file again when it is asked for next."""
        self._modules.pop(file, None)

    def find(self, path: str) -> Part | None:
        """Return what a dotted path names, wherever it is defined; None where there is none.

        Of several paths, ``first|second``, the first that is there.
        """
        if "|" in path:
            parts = (self.find(each) for each in path.split("|"))
            return next((part for part in parts if part is not None), None)
        names = path.split(".")
        if names[0] != self.folder.name:
            return None
        for count in range(len(names), 0, -1):
            module = self._module(names[:count])
            if module is not None:
                return self._within(module, names[count:])
        return None

    def names_of(self, part: Part) -> set[str]:
        """Names that a module binds, or that a class, its parents and its methods set."""
        if not isinstance(part.node, ast.ClassDef):
            return set(part.module.bindings)
        names = {name for name, _ in _bindings(part.node.body)} | set(_set_on_self(part.node))
        for parent in part.node.bases:
            found = self._within(part.module, ast.unparse(parent).split("[")[0].split("."))
            if found is not None:
                names |= self.names_of(found)
        return names

    def _module(self, names: list[str]) -> Module | None:
        stem = self.folder.joinpath(*names[1:])
        for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if file not in self._modules:
                is_there = file.is_file() and file.is_relative_to(self.folder)
                self._modules[file] = Module(".".join(names), file) if is_there else None
            if (module := self._modules[file]) is not None:
                return module
        return None

    def _within(self, module: Module, names: list[str]) -> Part | None:
        if not names:
            return Part(module, module.tree)
        node = module.bindings.get(names[0])
        if isinstance(node, ast.ImportFrom):
            return self.find(".".join([module.origin(node, names[0]), *names[1:]]))
        for name in names[1:]:
            node = dict(_bindings(node.body)).get(name) if isinstance(node, ast.ClassDef) else None
        return None if node is None else Part(module, node)


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names that statements bind, in order, also those of a condition or an attempt."""
    for node in body:
        if isinstance(node, Definition):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((each.asname or each.name.partition(".")[0], node) for each in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                each = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                yield from ((one.id, node) for one in each if isinstance(one, ast.Name))
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _bindings(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _bindings(handler.body)


def _set_on_self(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        ):
            yield each.attr


def source_of(package: str) -> PackageSource:
    """The source of the package that is installed here.

    Raises:
        ConfigError: it is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{package} is not installed here, expected the engine's environment")
    return PackageSource(Path(next(iter(spec.submodule_search_locations))))


def refusals(
    expected: Assumptions, source: PackageSource | None = None, version: str = ""
) -> Iterator[str]:
    """Yield one sentence for each assumption that does not hold.

    Args:
        expected: what the plug-in needs.
        source: of the engine; None: of the one that is installed.
        version: of the engine; "": of the one that is installed.
    """
    package, oldest = expected.package, expected.releases[0]
    version = version or importlib.metadata.version(package)
    if _numbers(version) < _numbers(oldest):
        yield f"{package} is {version}, expected {oldest} or newer: {expected.span} were tested"
    is_installed = source is None
    source = source or source_of(package)
    for path, parameters in expected.signatures.items():
        yield from _of_signature(expected, source, path, parameters)
        if is_installed and (other := _replaced_by(source.find(path), path)):
            yield f"{path} is that of {other}, expected {package}'s own"
    for path, words in expected.attributes.items():
        part = source.find(path)
        if part is None:
            yield f"{path} does not exist, {expected.as_read}"
            continue
        names = source.names_of(part)
        yield from (
            f"{path} has no {word.replace('|', ' or ')}, {expected.as_read}"
            for word in words.split()
            if names.isdisjoint(word.split("|"))
        )
    for path, lines in expected.lines.items():
        part = source.find(path)
        text = "" if part is None else part.text
        yield from (
            f"{path} lacks {line!r}, {expected.as_read}" for line in lines if line not in text
        )
    for path, digest in expected.digests.items():
        part = source.find(path)
        if part is None or source_digest(part.node) != digest:
            yield (
                f"{path} has another source, expected {digest} as in {package} {expected.span}: "
                "a plan would book another rule than the engine follows"
            )


def untried(expected: Assumptions, version: str = "") -> str:
    """Why an engine with the right structure is observed first; "" for a release that was tested.

    Args:
        expected: what the plug-in needs.
        version: of the engine; "": of the one that is installed.
    """
    version = version or importlib.metadata.version(expected.package)
    newest = _numbers(expected.releases[1])
    if _numbers(version)[: len(newest)] <= newest:
        return ""
    reason = f"{expected.package} {version} is newer than what was tested, {expected.span}"
    log.warning("%s: nothing moves until every rank has checked all its slots", reason)
    return reason


def require(expected: Assumptions) -> None:
    """Check what a tool needs of the engine that is installed.

    Raises:
        ConfigError: an assumption does not hold; the message names it.
    """
    for refusal in refusals(expected):
        raise ConfigError(refusal)


def source_digest(node: ast.AST) -> str:
    """BLAKE2 of what a function does: its syntax tree, the same under each release of Python."""
    return hashlib.blake2b(repr(_plain(node)).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, ast.AST):
        return value
    fields = [
        (name, _plain(each))
        for name, each in ast.iter_fields(value)
        if name not in OF_PYTHON and each is not None and each != []
    ]
    return type(value).__name__, fields


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release; those of a post or a local version have the release's."""
    text = re.match(r"[\d.]*", version)
    return tuple(int(word) for word in (text[0] if text else "").split(".") if word)


def _of_signature(
    expected: Assumptions, source: PackageSource, path: str, parameters: str
) -> Iterator[str]:
    part = source.find(path)
    if part is None or not isinstance(part.node, Definition):
        yield f"{path} does not exist, {expected.as_read}"
        return
    names = _parameters(part.node)
    if not _fits(names, parameters.split()):
        yield f"{path} takes ({' '.join(names)}), expected ({parameters}) as in {expected.package}"


def _parameters(node: Definition) -> list[str]:
    """Names of the parameters of a function or, of a class, those that it is made with."""
    if isinstance(node, ast.ClassDef):
        made = dict(_bindings(node.body)).get("__init__")
        if isinstance(made, FUNCTIONS):
            return _parameters(made)[1:]
        return [name for name, each in _bindings(node.body) if isinstance(each, ast.AnnAssign)]
    given = node.args
    each = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [one.arg for one in each if one is not None and one.arg != "cls"]


def _fits(names: list[str], words: list[str]) -> bool:
    is_open = words[-1:] == ["..."]
    left = names.copy()
    for word in words[: len(words) - is_open]:
        name = word.strip("[]")
        if left[:1] == [name]:
            del left[0]
        elif name == word:
            return False
    return is_open or not left


def _replaced_by(part: Part | None, path: str) -> str:
    """The file of another package that has replaced a function in this process; "" for none."""
    if part is None or not isinstance(part.node, FUNCTIONS) or part.module.name not in sys.modules:
        return ""
    try:
        function = inspect.unwrap(pkgutil.resolve_name(path))
    except (ImportError, AttributeError):
        return ""  # not imported by the engine yet
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    file = part.module.file if code is None else Path(code.co_filename)
    return "" if file.resolve() == part.module.file.resolve() else str(file)
