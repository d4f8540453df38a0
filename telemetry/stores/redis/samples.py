"""Samples and roll-ups in the Redis store: one record each, in a stream for each run.

A repeat is detected by the sequences seen of its rank, which outlive the samples: a spool may send
again what retention has removed, and it counts once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from math import isfinite
from typing import Any

from eplb.core.load import LoadSample
from eplb.errors import StoreError
from telemetry.records.rollup_codec import rollup_from_bytes, rollup_to_bytes
from telemetry.records.sample_codec import sample_from_bytes, sample_to_bytes
from telemetry.records.unreadable import Unreadable
from telemetry.retention.rollup import Rollup
from telemetry.stores.redis import json_codec
from telemetry.stores.redis.connection.link import RedisLink
from telemetry.stores.redis.keys import Keys
from telemetry.stores.redis.scripts import ADD_ROLLUPS, APPEND, PRUNE_ROLLUPS, PRUNE_SAMPLES, REPAIR

log = logging.getLogger(__name__)

# A script blocks all other clients: this many samples take a few milliseconds.
_AT_ONCE = 500


class Samples:
    """One deployment's samples and roll-ups, of which some records may be damaged."""

    def __init__(self, link: RedisLink, keys: Keys, sample_version: int) -> None:
        self._link, self._keys, self._sample_version = link, keys, sample_version
        self._unreadable = Unreadable()

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples and return how many were new."""
        for sample in samples:
            _check_countable(sample)
        return sum(map(self._append, _batches(samples)))

    def past(self, run: str, after: int, limit: int) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of a run."""

        def fetch(past: int, most: int) -> list[tuple[int, bytes]]:
            return list(islice(self._records(run, past + 1), most))

        return self._unreadable.page(fetch, sample_from_bytes, after=after, limit=limit, of=run)

    def between(
        self, since: float, before_time: float, after: int, limit: int
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of every run, taken in a stretch of time."""

        def fetch(past: int, most: int) -> list[tuple[int, bytes]]:
            old = sorted(
                (cursor, run)
                for run in self._runs()
                for cursor in map(int, self._taken(run, since, before_time))
                if cursor > past
            )[:most]
            found = []
            for run in {run for _, run in old}:
                cursors = [cursor for cursor, of_run in old if of_run == run]
                wanted = set(cursors)
                for first, last in _close_together(cursors):
                    records = self._records(run, first, last)
                    found += [record for record in records if record[0] in wanted]
            return sorted(found)

        of = None if isfinite(since) else "before"
        return self._unreadable.page(fetch, sample_from_bytes, after=after, limit=limit, of=of)

    def counts(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were stored, those included that were pruned."""
        seen = self._link.read("HGETALL", self._keys.of("seen", run))
        ranks = sorted(int(name) for name in seen if name.isdigit())
        return {rank: int(seen[b"%d" % rank].split()[0]) for rank in ranks}

    def prune(self, before_time: float) -> int:
        """Forget samples taken before a time and return how many."""
        self.repair()
        return sum(self._prune(run, before_time) for run in self._runs())

    def repair(self) -> None:
        """Forget what a torn write left, where a server ran it after its start."""
        for run in self._runs():
            keys = [self._keys.of(name, run) for name in ("samples", "times", "seen")]
            forgotten = int(self._link.run(f"repair of run {run!r}", REPAIR, keys))
            if forgotten:
                log.warning("run %s: forgot %d samples of a torn write", run, forgotten)

    def refused(self) -> dict[str, int]:
        """Return how many records could not be read, by reason."""
        return self._unreadable.counts()

    def add_rollups(self, rollups: Sequence[Rollup]) -> int:
        """Add roll-ups and return how many were new."""
        lengths = sorted({one.seconds for one in rollups})
        keys = [key for seconds in lengths for key in self._rollup_keys(seconds)]
        words: list[Any] = []
        for one in rollups:
            # Of one start, roll-ups are read by run and phase.
            name = f"{one.run}\0{one.phase}\0{one.start!r}"
            words += (lengths.index(one.seconds) + 1, name, repr(float(one.start)))
            words.append(rollup_to_bytes(one))
        if not words:
            return 0
        what = f"adding of {len(rollups)} roll-ups"
        return int(self._link.run(what, ADD_ROLLUPS, keys, words))

    def rollups(self, seconds: int, after: float, limit: int) -> list[Rollup]:
        """Return roll-ups that start past a time, oldest first."""
        records_key, starts_key = self._rollup_keys(seconds)
        num_read = 0
        while names := self._link.read(
            "ZRANGEBYSCORE", starts_key, f"({float(after)!r}", "+inf", "LIMIT", num_read, limit
        ):
            num_read += len(names)
            records = self._link.read("HMGET", records_key, *names)
            named = [(name, text) for name, text in zip(names, records, strict=True) if text]
            if found := self._unreadable.readable(named, rollup_from_bytes, f"roll-up {seconds}"):
                return [rollup for _, rollup in found]
        return []

    def prune_rollups(self, seconds: int, before_time: float) -> int:
        """Forget roll-ups that ended by a time and return how many."""
        keys, num_pruned = self._rollup_keys(seconds), 0
        last_start = repr(float(before_time - seconds))
        while True:
            asked = (last_start, _AT_ONCE)
            num_old = int(self._link.run("PRUNE roll-ups", PRUNE_ROLLUPS, keys, asked))
            num_pruned += num_old
            if num_old < _AT_ONCE:
                return num_pruned

    def _append(self, samples: Sequence[LoadSample]) -> int:
        runs = list(dict.fromkeys(sample.run for sample in samples))
        keys = [self._keys.state, self._keys.sampled]
        keys += [self._keys.of(name, run) for run in runs for name in ("samples", "times", "seen")]
        words: list[Any] = [self._link.address.limits.max_samples, len(runs), *runs]
        for sample in samples:
            at = runs.index(sample.run) + 1
            words += (at, sample.rank, sample.sequence, repr(float(sample.time)))
            words.append(sample_to_bytes(sample, self._sample_version))
        return int(self._link.run(f"append of {len(samples)} samples", APPEND, keys, words))

    def _records(
        self, run: str, first: int, last: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """(cursor, record) of a run, from one cursor to another."""
        key, until = self._keys.of("samples", run), "+" if last is None else f"{last}-0"
        while True:
            asked = (key, f"{first}-0", until, "COUNT", _AT_ONCE)
            found = self._link.read("XRANGE", *asked)
            for entry_id, fields in found:
                cursor = json_codec.first_of(entry_id)
                yield cursor, fields[b"s"]
            if len(found) < _AT_ONCE:
                return
            first = cursor + 1

    def _taken(self, run: str, since: float, before_time: float) -> list[bytes]:
        """Cursors of a run's samples from a stretch of time."""
        asked = (self._keys.of("times", run), repr(float(since)), f"({float(before_time)!r}")
        found: list[bytes] = self._link.read("ZRANGEBYSCORE", *asked)
        return found

    def _prune(self, run: str, before_time: float) -> int:
        keys = (self._keys.sampled, self._keys.of("samples", run), self._keys.of("times", run))
        num_pruned = 0
        while True:
            asked = (run, repr(float(before_time)), _AT_ONCE)
            num_old = int(self._link.run(f"PRUNE run {run!r}", PRUNE_SAMPLES, keys, asked))
            num_pruned += num_old
            if num_old < _AT_ONCE:
                return num_pruned

    def _runs(self) -> list[str]:
        return [name.decode() for name in self._link.read("SMEMBERS", self._keys.sampled)]

    def _rollup_keys(self, seconds: int) -> tuple[str, str]:
        return self._keys.of("rollups", seconds), self._keys.of("starts", seconds)


def _batches(samples: Sequence[LoadSample]) -> Iterator[Sequence[LoadSample]]:
    return (samples[at : at + _AT_ONCE] for at in range(0, len(samples), _AT_ONCE))


def _close_together(cursors: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of rising cursors, wherever more than a read's worth lies between two."""
    first = cursors[0]
    for one, following in pairwise(cursors):
        if following - one > _AT_ONCE:
            yield first, one
            first = following
    yield first, cursors[-1]


def _check_countable(sample: LoadSample) -> None:
    # Lua counts in doubles; and a script that fails half way is not undone, so nothing may reach
    # it that it cannot take.
    if abs(sample.sequence) >= 2**53:
        raise StoreError(
            f"sample of rank {sample.rank} has sequence {sample.sequence}, expected one below 2**53"
        )
