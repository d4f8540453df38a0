"""The stores that there are, by the scheme of their URL."""

from __future__ import annotations

from pathlib import Path

from eplb.errors import ConfigError
from telemetry.records.sample_codec import READABLE_VERSIONS, SAMPLE_VERSION
from telemetry.store import LoadStore
from telemetry.stores.redis.connection import address as redis_address


def file_of(url: str | Path) -> Path | None:
    """Return the file that a store's URL names; None where it names no file."""
    scheme, colon, rest = str(url).partition(":")
    if isinstance(url, Path) or not colon or "/" in scheme:
        return Path(url)
    return Path(rest) if scheme == "sqlite" and rest else None


def open_store(
    url: str | Path, deployment: str, *, sample_version: int = SAMPLE_VERSION
) -> LoadStore:
    """Open the store that ``url`` names.

    Args:
        url: ``memory:`` for one that ends with the process, ``sqlite:PATH`` or a plain path for a
            file, or a Redis URL as in ``telemetry/stores/redis/connection/address.py``.
        deployment: name of the deployment whose samples and placements it holds.
        sample_version: in which samples are written. Until every reader of the store is up to date,
            its writers keep to the version before.

    Raises:
        ConfigError: another scheme, a URL or name that the store cannot use, or a version that
            cannot be written.
        StoreError: the store cannot be used.
    """
    if sample_version not in READABLE_VERSIONS:
        known = ", ".join(map(str, READABLE_VERSIONS))
        raise ConfigError(
            f"samples of version {sample_version} asked for, expected one of: {known}"
        )
    # Late: each brings what it needs, a database driver among it.
    if url == "memory:":
        from telemetry.stores.memory import MemoryStore

        return MemoryStore(deployment)
    path = file_of(url)
    if path is not None:
        from telemetry.stores.sqlite.store import SqliteStore

        return SqliteStore(path, deployment, sample_version=sample_version)
    url = str(url)
    if _is_redis(url):
        from telemetry.stores.redis.store import RedisStore

        return RedisStore(url, deployment, sample_version=sample_version)
    raise _unknown(url)


def deployments_of(url: str | Path) -> list[str]:
    """Return the names of the deployments that ran or have a placement in a store, sorted.

    Raises:
        ConfigError: as ``open_store``.
        StoreError: there is no such file, or the store cannot be read.
    """
    path = file_of(url)
    if path is not None:
        from telemetry.stores.sqlite.backup import deployments_in

        return deployments_in(path)
    if _is_redis(str(url)):
        from telemetry.stores.redis.store import deployments_at

        return deployments_at(str(url))
    raise _unknown(str(url))


def _is_redis(url: str) -> bool:
    scheme, _, rest = url.partition(":")
    return scheme in redis_address.SCHEMES and rest.startswith("//")


def _unknown(url: str) -> ConfigError:
    return ConfigError(
        f"unknown store {redis_address.without_password(url)!r}, expected one of: memory:, "
        "sqlite:PATH, PATH, redis://HOST:PORT, rediss://HOST:PORT, redis+cluster://HOST:PORT,..., "
        "unix:///PATH"
    )
