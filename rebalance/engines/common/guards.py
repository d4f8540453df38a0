"""What a plug-in assumes about its engine, checked before anything of the engine is changed.

A signature shows that a call still fits, and a line that a function still does what the plug-in
depends on. Where figures depend on all of a function, its syntax tree is compared, without comments
and layout. A check that fails refuses to load the plug-in with one sentence; the engine serves as
without it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Lines = tuple[str, ...]


@dataclass(frozen=True)
class Assumptions:
    """One engine as it was read. Functions and classes are named by their dotted paths."""

    package: str
    release: str  # of which the sources were read and the contract tests run; "0.33.": all 0.33.x
    signatures: Mapping[str, str] = field(default_factory=dict)  # names of parameters, in order
    lines: Mapping[str, Lines] = field(default_factory=dict)  # parts of a function's source
    fields: Mapping[str, str] = field(default_factory=dict)  # of a dataclass, among others
    digests: Mapping[str, str] = field(default_factory=dict)  # ``source_digest`` of a function
    files: Mapping[Path, Lines] = field(default_factory=dict)  # parts of files, read and not loaded


def refusals(expected: Assumptions) -> Iterator[str]:
    """Yield one sentence for each assumption that does not hold."""
    package, as_read = expected.package, f"expected as in {expected.package} {expected.release}"
    version = importlib.metadata.version(package)
    is_series = expected.release.endswith(".")
    if not (version.startswith(expected.release) if is_series else version == expected.release):
        yield (
            f"{package} is {version}, expected {expected.release}: the plug-in was not tested with "
            "another release"
        )
    for path, parameters in expected.signatures.items():
        function = found(path)
        if function is None:
            yield f"{path} does not exist, {as_read}"
            continue
        names = " ".join(name for name in inspect.signature(function).parameters if name != "cls")
        if names != parameters:
            yield f"{path} takes ({names}), expected ({parameters}) as in {package}"
    for path, lines in expected.lines.items():
        yield from _missing(path, lines, _source(path), as_read)
    for path, names in expected.fields.items():
        present = getattr(found(path), "__dataclass_fields__", {})
        yield from (
            f"{path} has no field {name}, {as_read}"
            for name in names.split()
            if name not in present
        )
    for path, digest in expected.digests.items():
        function = found(path)
        if function is None or source_digest(function) != digest:
            yield (
                f"{path} has another source, expected {digest} as in {package} "
                f"{expected.release}: a plan would book another rule than the engine follows"
            )
    for name, lines in expected.files.items():
        file = _folder(package) / name
        source = file.read_text(encoding="utf-8") if file.is_file() else ""
        yield from _missing(name.name, lines, source, as_read)


def source_digest(function: Callable[..., Any]) -> str:
    """BLAKE2 of what a function does: its syntax tree, without comments and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=8).hexdigest()


def found(path: str) -> Any:
    """The object with a dotted path; None where there is none."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def _source(path: str) -> str:
    function = found(path)
    return "" if function is None else inspect.getsource(inspect.unwrap(function))


def _missing(where: str, lines: Lines, source: str, as_read: str) -> Iterator[str]:
    yield from (f"{where} lacks {line!r}, {as_read}" for line in lines if line not in source)


def _folder(package: str) -> Path:
    file = found(package).__file__
    assert file is not None, "an engine is no namespace"
    return Path(file).parent
