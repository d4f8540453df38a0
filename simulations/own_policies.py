"""A user's own policies: from a file by name, what their source says, and where one of them failed.

``my.py:doubled`` names a function of a file, beside names of the table. Rows of a sweep are of a
policy's source, so that one that was edited is replayed again. What a policy raises is one sentence
with the line of its file, not a traceback through the planner.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import traceback
from functools import partial
from pathlib import Path

import eplb
from eplb.errors import ConfigError
from eplb.policies.table import POLICIES, Policy, policy_named, register_policy

RAW = "raw:"  # a policy without the planner's gate, budget and repair
OF_A_FILE = re.compile(r"(?P<path>.+\.py):(?P<function>[A-Za-z_]\w*)")
OURS = tuple(Path(file).resolve().parent for file in (eplb.__file__, __file__))


def register_named(name: str) -> str:
    """Add the policy of a file, ``[raw:]PATH.py:FUNCTION``, to the table; returns its name there.

    Another name is returned as it is.

    Raises:
        ConfigError: no such file or function, it raises while it is read, or its name is taken.
    """
    prefix = RAW if name.startswith(RAW) else ""
    named = OF_A_FILE.fullmatch(name.removeprefix(RAW))
    if named is None:
        return name
    path, function = Path(named["path"]).resolve(), named["function"]
    if function not in POLICIES or source_of(function) != path:
        register_policy(function, _read_function(path, function))
    return prefix + function


def absolute(name: str) -> str:
    """The same policy of a file, for processes in any folder."""
    path, _, function = name.removeprefix(RAW).rpartition(":")
    return f"{RAW if name.startswith(RAW) else ''}{Path(path).resolve()}:{function}"


def _read_function(path: Path, function: str) -> Policy:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None, "a file that ends in .py"
    assert found.loader is not None, "and is no folder of a package"
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except FileNotFoundError as exc:
        raise ConfigError(f"policy {path}:{function}: there is no such file") from exc
    except Exception as exc:
        raise ConfigError(f"policy {path}:{function}: {words_of(exc, path)}") from exc
    policy = getattr(module, function, None)
    if not callable(policy):
        raise ConfigError(f"policy {path}:{function}: {path.name} has no such function")
    read: Policy = policy
    return read


def source_of(name: str) -> Path | None:
    """The file of a policy; None: it is one of this project's, or has none.

    Raises:
        ConfigError: there is no policy of that name.
    """
    policy = policy_named(name.removeprefix(RAW)).policy
    while isinstance(policy, partial):
        policy = policy.func
    code = getattr(policy, "__code__", None) or getattr(type(policy).__call__, "__code__", None)
    if code is None:
        return None
    path = Path(code.co_filename).resolve()
    return None if any(path.is_relative_to(one) for one in OURS) else path


def source_digest(name: str) -> str:
    """Digest of an own policy's source: its file, or all of its package; "": it is ours."""
    if name.removeprefix(RAW) not in POLICIES or (path := source_of(name)) is None:
        return ""
    package = path
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    files = sorted(package.rglob("*.py")) if package.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def words_of(exc: BaseException, path: Path) -> str:
    """What an own policy raised, and at which line of its file."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(exc.__traceback__)
        if Path(frame.filename).resolve() == path
    ]
    if isinstance(exc, SyntaxError):
        lines = [exc.lineno]
    at = f" at {path.name}:{lines[-1]}" if lines else ""
    return f"{type(exc).__name__}{at}: {' '.join(str(exc).split()) or 'without a word'}"


def fault_of(name: str, exc: Exception) -> str | None:
    """Words for what an own policy raised; None: it was raised by this project itself."""
    if name.removeprefix(RAW) not in POLICIES or (path := source_of(name)) is None:
        return None
    files = {Path(one.filename).resolve() for one in traceback.extract_tb(exc.__traceback__)}
    return words_of(exc, path) if path in files else None
