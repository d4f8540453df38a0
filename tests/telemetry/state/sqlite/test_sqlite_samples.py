"""Records in the SQLite store that cannot be read are passed over and counted; the rest is read."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from telemetry.load.rollup import MINUTE, Rollup
from tests.support.stores import make_sample, sequences, sqlite_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
def six_samples(path: Path) -> Path:
    with closing(sqlite_store(path, "demo")) as store:
        store.append([make_sample(0, n) for n in range(6)])
    return path


def damage(path: Path, *sequences: int) -> None:
    """Make the last byte of samples another."""
    with closing(sqlite3.connect(path)) as raw, raw:
        for sequence in sequences:
            row = (sequence,)
            ((record,),) = raw.execute("SELECT record FROM sample WHERE sequence = ?", row)
            changed = record[:-1] + bytes([record[-1] ^ 1])
            raw.execute("UPDATE sample SET record = ? WHERE sequence = ?", (changed, sequence))


def test_damaged_samples_are_passed_over_and_counted_once(six_samples: Path) -> None:
    damage(six_samples, 0, 1, 4, 5)
    with closing(sqlite_store(six_samples, "demo")) as store:
        for _ in range(3):
            assert sequences(store) == [2, 3]
            assert [sample.sequence for _, sample in store.samples_before(9.0)] == [2, 3]
        # Neither a page that is damaged all through nor a damaged end stops a reader.
        ((cursor, sample),) = store.samples("run-1", limit=1)
        assert sample.sequence == 2
        rest = store.samples("run-1", after=cursor)
        assert store.samples("run-1", after=rest[-1][0]) == []

        store.append([make_sample(0, 6)])

        assert [sample.sequence for _, sample in store.samples("run-1", after=rest[-1][0])] == [6]
        assert store.refused() == {"damaged": 4}
        assert store.sample_counts("run-1") == {0: 7}
        assert store.prune(9.0) == 7


def test_record_of_a_later_version_is_passed_over_and_counted_apart(six_samples: Path) -> None:
    damage(six_samples, 1)
    with closing(sqlite3.connect(six_samples)) as raw, raw:
        ((record,),) = raw.execute("SELECT record FROM sample WHERE sequence = 3")
        later = record[:4] + bytes([9]) + record[5:]
        raw.execute("UPDATE sample SET record = ? WHERE sequence = 3", (later,))

    with closing(sqlite_store(six_samples, "demo")) as store:
        assert sequences(store) == [0, 2, 4, 5]
        assert store.refused() == {"damaged": 1, "version": 1}


def test_damaged_roll_up_is_passed_over_and_counted(path: Path) -> None:
    with closing(sqlite_store(path, "demo")) as store:
        counts: Any = [[1]]
        span, members = (0, 9, 1), (frozenset({1}), frozenset({0}))
        rollups = [
            Rollup("run-1", "decode", MINUTE, 60.0 * n, *span, *members, counts, counts)
            for n in range(3)
        ]
        store.add_rollups(rollups)
        with closing(sqlite3.connect(path)) as raw, raw:
            raw.execute("UPDATE entry SET value = x'00' WHERE tab = 'rollups:60' AND place < 120")

        assert [rollup.start for rollup in store.rollups(MINUTE, limit=1)] == [120.0]
        assert store.refused() == {"damaged": 2}
