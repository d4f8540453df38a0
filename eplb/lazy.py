"""Names that a package exports, imported when they are first used.

``import eplb`` must cost milliseconds in a serving process that plans nothing: numba alone takes a
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
        names_of_modules: dotted name of a module -> the names that it gives, apart by spaces.
    """
    module_of = {name: mod for mod, names in names_of_modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(module_of[name]), name)
        vars(import_module(package))[name] = found  # the next use finds it at once
        return found

    def names() -> list[str]:
        return sorted({*vars(import_module(package)), *module_of})

    return get, names
