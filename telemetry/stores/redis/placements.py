"""Placements and the open migration of the Redis store, for readers."""

from __future__ import annotations

from threading import Lock

from eplb.errors import StoreError
from eplb.migration.build import Migration
from eplb.migration.serialisation import migration_from_bytes
from telemetry.store import CommittedPlacement
from telemetry.stores.redis import json_codec
from telemetry.stores.redis.connection.link import RedisLink
from telemetry.stores.redis.keys import Keys

_MAX_READS = 8  # of a migration that changes whenever it is read


class PlacementReader:
    """Reads placements and the open migration.

    Neither changes once written, and to unpack one takes milliseconds: the last of each is kept by
    its number and hash, for callers that ask at every step.
    """

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link, self._keys = link, keys
        self._unpacking = Lock()
        self._last_committed: tuple[bytes, CommittedPlacement] | None = None
        self._last_published: tuple[bytes, Migration] | None = None

    def committed(self) -> CommittedPlacement | None:
        """Return the placement that serves."""
        name: bytes | None = self._link.read("HGET", self._keys.state, "committed")
        if name is None:
            return None
        with self._unpacking:
            if self._last_committed is None or self._last_committed[0] != name:
                entry_id = name.split()[0] + b"-1"
                (entry,) = self._link.read("XRANGE", self._keys.placements, entry_id, entry_id)
                if entry[1][b"hash"] != name.split()[1]:
                    raise StoreError(
                        f"Redis store {self._link.address}: generation {name.split()[0].decode()} "
                        f"has hash {entry[1][b'hash'].decode()}, expected "
                        f"{name.split()[1].decode()}: a torn write of another placement is in its "
                        "place"
                    )
                self._last_committed = (name, json_codec.placement_of(entry))
            return self._last_committed[1]

    def placement(self, generation: int) -> CommittedPlacement | None:
        """Return the placement of a generation."""
        entry_id = f"{generation}-1"
        found = self._link.read("XRANGE", self._keys.placements, entry_id, entry_id)
        return json_codec.placement_of(found[0]) if found else None

    def placements(self, limit: int, before: int | None) -> list[CommittedPlacement]:
        """Return committed placements below a generation, newest first; None: all."""
        newest = "+" if before is None else f"{before}-0"  # entries are GENERATION-1
        asked = (self._keys.placements, newest, "-", "COUNT", limit)
        return [json_codec.placement_of(entry) for entry in self._link.read("XREVRANGE", *asked)]

    def published(self) -> Migration | None:
        """Return the open migration.

        Raises:
            StoreError: also where its record has another hash than the store's state.
        """
        with self._unpacking:
            name = found = b""
            # Two questions: the migration may be closed, and another opened, between them.
            for _ in range(_MAX_READS):
                name = self._link.read("HGET", self._keys.state, "open_plan")
                if not name:
                    return None
                last = self._last_published
                if last is not None and last[0] == name:
                    return last[1]
                record = self._link.read("GET", self._keys.migration)
                if record is not None:
                    migration = migration_from_bytes(record)
                    found = _name(migration)
                    self._last_published = (found, migration)
        raise StoreError(
            f"Redis store {self._link.address}: the record of the open migration has number and "
            f"hash {found.decode() or 'none'}, expected {name.decode()}: a release that computes "
            "another hash has written it"
        )


def _name(migration: Migration) -> bytes:
    return f"{migration.plan_id} {migration.hash}".encode()
