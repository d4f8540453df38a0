"""From tokens counted on each rank to windows a planner can use, and the store between them."""

from __future__ import annotations

from pathlib import Path

from eplb.errors import ConfigError
from telemetry.memory import MemoryStore
from telemetry.sqlite import SqliteStore
from telemetry.store import LoadStore

__all__ = ["open_store"]


def open_store(url: str | Path, deployment: str) -> LoadStore:
    """Open the store that ``url`` names.

    Args:
        url: ``memory:`` for one that ends with the process, ``sqlite:PATH`` or a plain path for
            a file.
        deployment: whose samples and placements it is to speak for.

    Raises:
        ConfigError: another scheme.
        StoreError: the store cannot be used.
    """
    if url == "memory:":
        return MemoryStore(deployment)
    scheme, colon, rest = str(url).partition(":")
    if isinstance(url, Path) or not colon or "/" in scheme:
        return SqliteStore(url, deployment)
    if scheme == "sqlite" and rest:
        return SqliteStore(rest, deployment)
    raise ConfigError(f"unknown store {url!r}, expected one of: memory:, sqlite:PATH, PATH")
