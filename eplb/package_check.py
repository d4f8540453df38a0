"""Checks that ``runtime``, ``telemetry``, ``rebalance``, ... are imported from this installation.

These packages have common names. A host application with its own ``api/`` or ``runtime.py`` earlier
on the import path would shadow them, and later errors would name neither module.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from eplb.errors import ConfigError

PACKAGES = ("runtime", "telemetry", "rebalance", "simulations", "api")


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
