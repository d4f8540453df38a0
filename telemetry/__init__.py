"""From tokens counted on each rank to windows a planner can use, and the store between them."""

from __future__ import annotations

from pathlib import Path

from eplb.errors import ConfigError
from telemetry import redis_address
from telemetry.memory import MemoryStore
from telemetry.redis_store import RedisStore
from telemetry.sqlite import SqliteStore
from telemetry.store import LoadStore

__all__ = ["open_store"]


def open_store(url: str | Path, deployment: str) -> LoadStore:
    """Open the store that ``url`` names.

    Args:
        url: ``memory:`` for one that ends with the process, ``sqlite:PATH`` or a plain path for
            a file, or a Redis URL as in ``telemetry/redis_address.py``.
        deployment: whose samples and placements it is to speak for.

    Raises:
        ConfigError: another scheme, or a URL or name that the store cannot use.
        StoreError: the store cannot be used.
    """
    if url == "memory:":
        return MemoryStore(deployment)
    scheme, colon, rest = str(url).partition(":")
    if isinstance(url, Path) or not colon or "/" in scheme:
        return SqliteStore(url, deployment)
    if scheme == "sqlite" and rest:
        return SqliteStore(rest, deployment)
    if scheme in redis_address.SCHEMES and rest.startswith("//"):
        return RedisStore(url, deployment)
    raise ConfigError(
        f"unknown store {redis_address.without_password(url)!r}, expected one of: memory:, "
        "sqlite:PATH, PATH, redis://HOST:PORT, rediss://HOST:PORT, redis+cluster://HOST:PORT,..., "
        "unix:///PATH"
    )
