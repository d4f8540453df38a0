"""Checks of a Redis server before use, and the durability of its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from eplb.errors import StoreError
from telemetry.stores.redis.connection.errors import Trouble
from telemetry.stores.redis.connection.link import LinkError, RedisLink
from telemetry.stores.redis.keys import SCHEMA_VERSION, Keys

OLDEST = (6, 2)

# What acknowledged changes survive:
#   always    kill -9 and power loss: written and synced before the answer
#   everysec  both but for the last two seconds at most: a write waits for a slow sync to end
#   no        kill -9, most of the time; power loss costs what the system had not written yet
#   none      there is no append-only file: what came after the last snapshot is lost
#   unknown   the server does not let its settings be read
Durability = Literal["always", "everysec", "no", "none", "unknown"]


def check_server(link: RedisLink, keys: Keys) -> Durability:
    """Refuse a server that cannot be trusted with placements; return what it promises.

    Raises:
        StoreError: too old, a replica, one that may drop keys, or a store of another layout.
    """
    info = link.ask(keys.state, "INFO")
    version = str(_told(link, info, "redis_version"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise _refused(link, f"is version {version}, expected 6.2 or later")
    if _told(link, info, "role") != "master":
        raise _refused(
            link,
            f"is a replica of {info['master_host']}:{info['master_port']}, expected the primary",
        )
    policy = _told(link, info, "maxmemory_policy")
    if policy != "noeviction":
        raise _refused(
            link,
            f"has maxmemory-policy {policy}, expected noeviction: it would drop placements when "
            "memory runs short",
        )
    _check_schema(link, keys)
    return _durability(link, keys, info)


def _check_schema(link: RedisLink, keys: Keys) -> None:
    # Asked before it is written: a server that is full must still open, so that it can be pruned.
    found = link.read("HGET", keys.state, "schema")
    if found is None:
        link.write("HSETNX", keys.state, "schema", SCHEMA_VERSION)
        found = link.read("HGET", keys.state, "schema")
    if found is None or found.decode() != SCHEMA_VERSION:
        shown = None if found is None else found.decode()
        raise _refused(
            link,
            f"keeps {keys.state} with schema version {shown}, expected {SCHEMA_VERSION}: "
            "it was written by another version of this program",
        )


def _durability(link: RedisLink, keys: Keys, info: Mapping[str, Any]) -> Durability:
    if not int(_told(link, info, "aof_enabled")):
        return "none"
    try:
        found = link.ask(keys.state, "CONFIG GET", "appendfsync")
    except LinkError as exc:
        if exc.trouble in (Trouble.FORBIDDEN, Trouble.OTHER):  # hosted servers have no CONFIG
            return "unknown"
        raise
    by_setting: dict[str, Durability] = {"always": "always", "everysec": "everysec", "no": "no"}
    (setting,) = (value for _, value in found.items())
    return by_setting[setting.decode() if isinstance(setting, bytes) else setting]


def _told(link: RedisLink, info: Mapping[str, Any], name: str) -> Any:
    if name not in info:
        raise _refused(link, f"reports no {name}, expected a Redis server")
    return info[name]


def _refused(link: RedisLink, words: str) -> StoreError:
    return StoreError(f"Redis store {link.address} {words}")
