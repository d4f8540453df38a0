"""Samples and roll-ups in the SQLite store."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from eplb.core.load import LoadSample
from telemetry.records.rollup_codec import rollup_from_bytes
from telemetry.records.sample_codec import sample_from_bytes
from telemetry.records.unreadable import Unreadable
from telemetry.retention.rollup import Rollup
from telemetry.stores.sqlite import queries
from telemetry.stores.sqlite.file import SqliteFile

_PRUNED_AT_ONCE = 500  # samples; a few milliseconds


class SampleTables:
    """One deployment's samples and roll-ups, of which some records may be damaged."""

    def __init__(self, file: SqliteFile, deployment: str, sample_version: int) -> None:
        self._file = file
        self._deployment = deployment
        self._sample_version = sample_version
        self._unreadable = Unreadable()

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples and return how many were new."""
        packed = [queries.sample_row(sample, self._sample_version) for sample in samples]
        with self._file.write() as connection:
            added = connection.executemany(queries.INSERT_SAMPLE, packed)
            return max(0, added.rowcount)  # -1 when there were no samples

    def past(self, run: str, after: int, limit: int) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of a run."""

        def fetch(past: int, most: int) -> list[Any]:
            return self._file.rows(queries.SAMPLES, self._deployment, run, past, most)

        return self._unreadable.page(fetch, sample_from_bytes, after=after, limit=limit, of=run)

    def between(
        self, since: float, before_time: float, after: int, limit: int
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of every run, taken in a stretch of time."""
        stretch = (self._deployment, since, before_time)

        def fetch(past: int, most: int) -> list[Any]:
            return self._file.rows(queries.SAMPLES_BETWEEN, *stretch, past, most)

        of = None if isfinite(since) else "before"
        return self._unreadable.page(fetch, sample_from_bytes, after=after, limit=limit, of=of)

    def counts(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were stored, those included that were pruned."""
        return dict(self._file.rows(queries.SAMPLE_COUNTS, *2 * (self._deployment, run)))

    def prune(self, before_time: float) -> int:
        """Delete samples taken before a time and return how many.

        In small transactions: ranks that write meanwhile wait for one of them at most.
        """
        old, num_pruned = (self._deployment, before_time, _PRUNED_AT_ONCE), 0
        while True:
            with self._file.write() as connection:
                connection.execute(queries.COUNT_PRUNED, old)
                num_new = connection.execute(queries.PRUNE, old).rowcount
            num_pruned += num_new
            if num_new < _PRUNED_AT_ONCE:
                return num_pruned

    def refused(self) -> dict[str, int]:
        """Return how many records could not be read, by reason."""
        return self._unreadable.counts()

    def add_rollups(self, rollups: Sequence[Rollup]) -> int:
        """Add roll-ups, all in one transaction, and return how many were new."""
        packed = [(self._deployment, *queries.rollup_row(one)) for one in rollups]
        with self._file.write() as connection:
            return max(0, connection.executemany(queries.INSERT_ROLLUP, packed).rowcount)

    def rollups(self, seconds: int, after: float, limit: int) -> list[Rollup]:
        """Return roll-ups that start past a time, oldest first."""
        asked, num_read = (self._deployment, seconds, after, limit), 0
        while found := self._file.rows(queries.ROLLUPS, *asked, num_read):
            num_read += len(found)
            if readable := self._unreadable.readable(found, rollup_from_bytes, "roll-up"):
                return [rollup for _, rollup in readable]
        return []

    def prune_rollups(self, seconds: int, before_time: float) -> int:
        """Delete roll-ups that ended by a time and return how many."""
        last_start = before_time - seconds
        with self._file.write() as connection:
            old = (self._deployment, seconds, last_start)
            return connection.execute(queries.PRUNE_ROLLUPS, old).rowcount
