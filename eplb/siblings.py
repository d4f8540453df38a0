"""Whether the packages beside ``eplb`` are ours.

They have plain names. A host application with its own ``api/`` or ``runtime.py`` earlier on the
import path would put its module in place of ours, and everything after that would fail with
messages that name neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from eplb.errors import ConfigError

SIBLINGS = ("runtime", "telemetry", "rebalance", "simulations", "api")


def check_siblings(names: Sequence[str] = SIBLINGS) -> None:
    """Refuse to go on when an import would find something else than our own package.

    Raises:
        ConfigError: a package is missing, or another file stands in its place.
    """
    home = Path(__file__).resolve().parents[1]
    for name in names:
        expected = home / name / "__init__.py"
        spec = find_spec(name)
        if spec is None:
            raise ConfigError(f"package {name!r} is missing, expected {expected}")
        # A folder without an __init__.py has no origin, only places to search.
        found = spec.origin or next(iter(spec.submodule_search_locations or ()), "nowhere")
        if Path(found).resolve() != expected:
            raise ConfigError(
                f"importing {name!r} finds {found}, expected {expected}: "
                "rename or move what stands in its place"
            )
