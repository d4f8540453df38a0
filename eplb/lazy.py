"""Lazy exports of a package: names are imported on first use.

``import eplb`` must take milliseconds in a serving process that does not plan: numba alone takes a
second to load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


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
