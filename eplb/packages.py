"""The packages of this installation: imported on first use, shadowed by others, or optional.

``import eplb`` must take milliseconds in a serving process that does not plan: numba alone takes a
second to load. ``runtime``, ``telemetry``, ``rebalance``, ... are common names: a host application
with its own ``api/`` or ``runtime.py`` earlier on the import path would shadow them, and later
errors would name neither module.

``pip install eplb`` brings what plans and simulates need. The rest comes with an extra, such as
``pip install 'eplb[api]'``, and is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eplb.errors import ConfigError

PACKAGES = ("runtime", "telemetry", "rebalance", "simulations", "api")


def lazy_exports(
    package: str, names_of_modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's ``__getattr__`` and ``__dir__`` (PEP 562).

    Args:
        package: its dotted name.
        names_of_modules: dotted name of a module -> the names that it exports, space-separated.
    """
    module_of = {name: mod for mod, names in names_of_modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(module_of[name]), name)
        vars(import_module(package))[name] = found  # the next use needs no import
        return found

    def names() -> list[str]:
        return sorted({*vars(import_module(package)), *module_of})

    return get, names


def check_packages(names: Sequence[str] = PACKAGES) -> None:
    """Check that an import of each package finds the one beside ``eplb``.

    Raises:
        ConfigError: a package is missing, or shadowed by another file.
    """
    root = Path(__file__).resolve().parents[1]
    for name in names:
        expected = root / name / "__init__.py"
        spec = find_spec(name)
        if spec is None:
            raise ConfigError(f"package {name!r} is missing, expected {expected}")
        # A folder without an __init__.py has no origin, only search locations.
        found = spec.origin or next(iter(spec.submodule_search_locations or ()), "nowhere")
        if Path(found).resolve() != expected:
            raise ConfigError(
                f"importing {name!r} finds {found}, expected {expected}: "
                "rename or move the file that shadows it"
            )


# ``pip install eplb`` brings these; an engine's environment gets the package alone, without them.
LIBRARIES = ("numba", "scipy", "zstandard")
# By the name of the module; pyproject.toml names the distributions.
EXTRA_OF = {
    "torch": "runtime",
    "redis": "redis",
    "fastapi": "api",
    "httpx": "api",
    "prometheus_client": "api",
    "sse_starlette": "api",
    "starlette": "api",  # FastAPI brings it
    "uvicorn": "api",
    "plotly": "sim",
    "pyarrow": "sim",
    "ortools": "solver",
    "ray": "ray",
}


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Refuse what needs a library that is not installed.

    Args:
        what: needs the libraries that the block imports, for the message.

    Raises:
        ConfigError: one of them is missing; the message names it, or the extra that brings it.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        library = (exc.name or "").partition(".")[0]
        if library in EXTRA_OF:
            extra = f"[{EXTRA_OF[library]}]'"
            wanted = f"'eplb{extra}, in a clone '.{extra}"
        elif library in LIBRARIES:
            wanted = library
        else:
            raise
        raise ConfigError(
            f"{what} needs {library}, which is not installed, expected: pip install {wanted}"
        ) from exc
