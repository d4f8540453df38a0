"""Placements and the open migration of the SQLite store, for readers."""

from __future__ import annotations

from threading import Lock

from eplb.migration.build import Migration
from eplb.migration.serialisation import migration_from_bytes
from telemetry.store import CommittedPlacement
from telemetry.stores.sqlite.file import SqliteFile
from telemetry.stores.sqlite.queries import OPEN_PLAN, PLACEMENT, placement_of

_COMMITTED = "SELECT max(generation) FROM placement WHERE deployment = ?"
_MIGRATION = "SELECT record FROM migration WHERE deployment = ? AND plan_id = ?"


class PlacementReader:
    """Reads placements and the open migration.

    Neither changes once written, and to unpack one takes milliseconds: the last of each is kept,
    for callers that ask at every step.
    """

    def __init__(self, file: SqliteFile, deployment: str) -> None:
        self._file = file
        self._deployment = deployment
        self._unpacking = Lock()
        self._last_committed: CommittedPlacement | None = None
        self._last_published: Migration | None = None

    def committed(self) -> CommittedPlacement | None:
        """Return the placement that serves."""
        ((generation,),) = self._file.rows(_COMMITTED, self._deployment)
        if generation is None:
            return None
        with self._unpacking:
            last = self._last_committed
            if last is None or last.placement.generation != generation:
                last = self._last_committed = self.placement(generation)
            return last

    def placement(self, generation: int) -> CommittedPlacement | None:
        """Return the placement of a generation."""
        query = f"{PLACEMENT} AND generation = ?"
        found = self._file.rows(query, self._deployment, generation)
        return placement_of(found[0]) if found else None

    def placements(self, limit: int, before: int) -> list[CommittedPlacement]:
        """Return committed placements below a generation, newest first."""
        query = f"{PLACEMENT} AND generation < ? ORDER BY generation DESC LIMIT ?"
        rows = self._file.rows(query, self._deployment, before, limit)
        return [placement_of(row) for row in rows]

    def published(self) -> Migration | None:
        """Return the open migration."""
        found = self._file.rows(OPEN_PLAN, self._deployment)
        if not found:
            return None
        ((plan_id,),) = found
        with self._unpacking:
            last = self._last_published
            if last is None or last.plan_id != plan_id:
                ((record,),) = self._file.rows(_MIGRATION, self._deployment, plan_id)
                last = self._last_published = migration_from_bytes(record)
            return last
