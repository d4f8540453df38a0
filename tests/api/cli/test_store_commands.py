"""``eplb store``: a copy of a store in use, and forgetting what is old."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from api.cli.main import app
from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from telemetry.load.rollup import HOUR, MINUTE, Rollup
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.stores import sqlite_store

HOURS_AGO = time.time() - 5 * HOUR


def make_sample(sequence: int, taken: float) -> LoadSample:
    steps, held, tokens = (sequence, sequence), np.array([[0, 1]]), np.array([[1, 2]])
    return LoadSample("demo", "run-1", 0, sequence, taken, *steps, "decode", 1, held, tokens)


def make_rollup(seconds: int, start: float) -> Rollup:
    none, counts = frozenset[int](), np.zeros((1, 2), dtype=np.int64)
    return Rollup("run-1", "decode", seconds, start, 0, 9, 1, none, none, counts, counts)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with samples and roll-ups of five hours ago, and new ones."""
    path = tmp_path / "store.sqlite"
    with closing(sqlite_store(path, "demo")) as store:
        store.begin_run(RunInfo("run-1", 5.0, {}, {}, 10))
        placement = Placement(np.array([[0, 1]]), num_experts=2, generation=1)
        store.commit(placement, expected=None, reason="first")
        store.append([make_sample(n, HOURS_AGO + n) for n in range(3)])
        store.append([make_sample(n, time.time()) for n in range(3, 5)])
        for seconds in (MINUTE, HOUR):
            store.add_rollups([make_rollup(seconds, HOURS_AGO), make_rollup(seconds, time.time())])
    return path


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, words)])


def content(store: StateStore) -> object:
    samples = [sample.sequence for _, sample in store.samples("run-1")]
    lengths = (len(store.rollups(seconds)) for seconds in (MINUTE, HOUR))
    return samples, *lengths, [line.placement.hash for line in store.placements()], store.events()


# -- backup


def test_copy_is_the_store_of_one_moment_in_one_file(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "store.sqlite"
    copy.parent.mkdir()
    with closing(sqlite_store(path, "demo")) as store:  # in use
        done = run("backup", copy, "--store", path)
        assert done.exit_code == 0, done.output
        assert f"copied to {copy}: {copy.stat().st_size:,} bytes" in done.output.replace("\n", " ")
        assert [found.name for found in copy.parent.iterdir()] == ["store.sqlite"]

        with closing(sqlite_store(copy, "demo")) as again:
            assert content(again) == content(store)


def test_backup_during_writes_is_consistent(path: Path, tmp_path: Path) -> None:
    is_over = threading.Event()
    num_written = 5

    def write() -> None:
        nonlocal num_written
        with closing(sqlite_store(path, "demo")) as store:
            while not is_over.is_set():
                store.append([make_sample(num_written, time.time())])
                num_written += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        copies = [tmp_path / f"copy-{n}" for n in range(3)]
        assert [run("backup", copy, "--store", path).exit_code for copy in copies] == [0] * 3
    finally:
        is_over.set()
        writer.join()

    for copy in copies:
        with closing(sqlite_store(copy, "demo")) as store:
            sequences = [sample.sequence for _, sample in store.samples("run-1", limit=10**6)]
        assert sequences == list(range(len(sequences)))
        assert 5 <= len(sequences) <= num_written


def test_copy_replaces_no_file_and_leaves_none_behind(path: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with closing(sqlite3.connect(tmp_path / "foreign")) as raw:
        raw.execute("CREATE TABLE recipe (name TEXT)")

    for words, message in (
        ((taken, "--store", path), "is there already, expected a new file"),
        ((tmp_path / "new", "--store", tmp_path / "nowhere"), "there is no store at"),
        ((tmp_path / "new", "--store", tmp_path / "foreign"), "SQLite file of another program"),
        ((tmp_path / "new", "--store", taken), "expected a whole SQLite file"),
        ((tmp_path / "no" / "new", "--store", path), "found no folder"),
    ):
        done = run("backup", *words)
        assert done.exit_code == 2
        assert message in done.stderr

    assert taken.read_text() == "mine"
    kept = {"taken", "foreign", "store.sqlite", "store.sqlite-reserve"}
    assert {found.name for found in tmp_path.iterdir()} == kept


# -- purge


@pytest.mark.parametrize(
    "before",
    ["4h", "240m", time.strftime("%Y-%m-%dT%H:%M", time.gmtime(HOURS_AGO + HOUR + 60))],
    ids=["hours", "minutes", "time"],  # the same in every worker, whatever the minute
)
def test_purge_removes_samples_and_roll_ups_before_a_time(path: Path, before: str) -> None:
    done = run("purge", "--store", path, "--before", before)

    assert done.exit_code == 0, done.output
    assert "demo: removed 3 samples, 1 roll-up of a minute and 1 of an hour" in done.output
    with closing(sqlite_store(path, "demo")) as store:
        assert [sample.sequence for _, sample in store.samples("run-1")] == [3, 4]
        assert [len(store.rollups(seconds)) for seconds in (MINUTE, HOUR)] == [1, 1]
        assert len(store.placements()) == 1
        assert store.sample_counts("run-1") == {0: 5}


def test_purge_can_make_the_file_smaller(path: Path) -> None:
    with closing(sqlite_store(path, "demo")) as store:
        store.append([make_sample(n, HOURS_AGO) for n in range(5, 2000)])
    before = path.stat().st_size

    assert run("purge", "--store", path, "--before", "1h", "--shrink").exit_code == 0

    assert path.stat().st_size < before / 3
    with closing(sqlite_store(path, "demo")) as store:
        assert [sample.sequence for _, sample in store.samples("run-1")] == [3, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--before", "yesterday"], "--before is 'yesterday', expected a time as 2026-03-01T12:00"),
        (["--before", "2999-01-01"], "which is in the future, expected 1970-01-01 to now"),
        (["--before", "1969-12-31"], "which is before 1970, expected 1970-01-01 to now"),
        (["--before", "0001-01-01"], "which is before 1970"),
        (["--before", "999999999999d"], "which is before 1970"),
        (["--before", "9" * 5000 + "d"], "expected a time as 2026-03-01T12:00"),
        (["--before", "1h", "--deployment", "dmeo"], "deployment 'dmeo' has no run in"),
    ],
)
def test_purge_with_a_wrong_time_removes_nothing(
    path: Path, words: list[str], message: str
) -> None:
    done = run("purge", "--store", path, *words)

    assert done.exit_code == 2
    assert message in done.stderr
    with closing(sqlite_store(path, "demo")) as store:
        assert len(store.samples("run-1")) == 5


def test_backup_and_purge_use_the_configured_store_and_deployment(tmp_path: Path) -> None:
    path, copy = tmp_path / "west.sqlite", tmp_path / "copy.sqlite"
    with closing(sqlite_store(path, "west")) as store:
        store.begin_run(RunInfo("run-1", 5.0, {}, {}, 10))
        store.append([replace(make_sample(0, HOURS_AGO), deployment="west")])
    file = tmp_path / "eplb.toml"
    file.write_text(f'[deployment]\nname = "west"\nstore = "{path}"\n')
    environ = {"EPLB_CONFIG": str(file)}

    copied = CliRunner().invoke(app, ["store", "backup", str(copy)], env=environ)
    purged = CliRunner().invoke(app, ["store", "purge", "--before", "1h"], env=environ)

    assert (copied.exit_code, purged.exit_code) == (0, 0), copied.output + purged.output
    assert purged.output.startswith("west: removed 1 sample,")
    for kept, left in ((copy, 1), (path, 0)):
        with closing(sqlite_store(kept, "west")) as store:
            assert len(store.samples("run-1")) == left
