"""From tokens counted on each rank to windows a planner can use, and the store between them."""

from __future__ import annotations

from pathlib import Path

from eplb.errors import ConfigError
from telemetry.codec import READABLE_VERSIONS, SAMPLE_VERSION
from telemetry.memory import MemoryStore
from telemetry.sqlite import SqliteStore
from telemetry.store import LoadStore

__all__ = ["open_store"]


def open_store(
    url: str | Path, deployment: str, *, sample_version: int = SAMPLE_VERSION
) -> LoadStore:
    """Open the store that ``url`` names.

    Args:
        url: ``memory:`` for one that ends with the process, ``sqlite:PATH`` or a plain path for
            a file.
        deployment: whose samples and placements it is to speak for.
        sample_version: in which samples are written. Until every reader of the store is up to
            date, its writers keep to the version before.

    Raises:
        ConfigError: another scheme, or a version that cannot be written.
        StoreError: the store cannot be used.
    """
    if sample_version not in READABLE_VERSIONS:
        known = ", ".join(map(str, READABLE_VERSIONS))
        raise ConfigError(
            f"samples of version {sample_version} asked for, expected one of: {known}"
        )
    if url == "memory:":
        return MemoryStore(deployment)
    scheme, colon, rest = str(url).partition(":")
    if isinstance(url, Path) or not colon or "/" in scheme:
        return SqliteStore(url, deployment, sample_version=sample_version)
    if scheme == "sqlite" and rest:
        return SqliteStore(rest, deployment, sample_version=sample_version)
    raise ConfigError(f"unknown store {url!r}, expected one of: memory:, sqlite:PATH, PATH")
