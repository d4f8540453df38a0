"""What a rank could not report yet lies on disk, and outlives the rank."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb.core.load import LoadSample
from eplb.errors import StoreError
from telemetry.load.sample_codec import sample_to_bytes
from telemetry.load.segments import HEADER, frame_bytes
from telemetry.load.spool import Spool
from tests.support.processes import ForkedProcess
from tests.support.stores import make_sample as make_any_sample
from tests.support.stores import sequences, sqlite_store


def make_sample(sequence: int, run: str = "run-1") -> LoadSample:
    """As large as any other: the arrays hold one figure."""
    return make_any_sample(0, sequence, run=run, tokens=[[0, 1]])


FOLDER_BYTES = 1 << 16
SAMPLE_BYTES = frame_bytes(sample_to_bytes(make_sample(0)))


def leased(batch: dict[int, LoadSample]) -> list[int]:
    return [sample.sequence for sample in batch.values()]


def left_in(folder: Path) -> list[int]:
    """What the next process finds."""
    with closing(Spool(folder)) as spool:
        return leased(spool.lend(10_000))


def fill(folder: Path, num_samples: int) -> None:
    with closing(Spool(folder)) as spool:
        spool.add([make_sample(n) for n in range(num_samples)])


def balance(spool: Spool) -> tuple[int, int]:
    """Samples that came, and those that are accounted for."""
    counts = spool.stats()
    gone = counts.stored + counts.dropped + counts.refused
    return counts.offered + counts.recovered, gone + counts.waiting


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


# -- what is kept, and for how long


def test_stored_samples_are_removed_and_leave_no_file(folder: Path) -> None:
    with closing(Spool(folder)) as spool:
        spool.add([make_sample(n) for n in range(3)])
        spool.settle(spool.lend(10), num_new=2)

        assert spool.stats().bytes_on_disk == len(HEADER)
        counts = spool.stats()
        assert (counts.stored, counts.repeated, counts.replayed) == (3, 1, 0)

    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_full_spool_drops_the_oldest_and_counts_each(folder: Path) -> None:
    num_samples = 2 * FOLDER_BYTES // SAMPLE_BYTES
    with closing(Spool(folder, max_bytes=FOLDER_BYTES, capacity=1)) as spool:
        spool.add([make_sample(n) for n in range(num_samples)])

        kept, counts = leased(spool.lend(num_samples)), spool.stats()
        assert counts.bytes_on_disk <= FOLDER_BYTES
        assert kept == list(range(counts.dropped, num_samples))
        assert len(kept) > 0.9 * FOLDER_BYTES / SAMPLE_BYTES  # one segment of 16 went at a time
        assert balance(spool) == (num_samples, num_samples)


def test_sample_dropped_during_its_write_is_not_lost(folder: Path) -> None:
    num_samples = 2 * FOLDER_BYTES // SAMPLE_BYTES
    with closing(Spool(folder, max_bytes=FOLDER_BYTES, capacity=4)) as spool:
        spool.add([make_sample(0)])
        batch = spool.lend(1)
        spool.add([make_sample(n) for n in range(1, num_samples)])
        spool.settle(batch, num_new=1)

        counts = spool.stats()
        assert (counts.stored, counts.stored + counts.dropped + counts.waiting) == (1, num_samples)


def test_without_a_folder_the_newest_are_kept_in_memory() -> None:
    with closing(Spool(capacity=2)) as spool:
        spool.add([make_sample(n) for n in range(5)])

        assert leased(spool.lend(10)) == [3, 4]
        assert (spool.stats().dropped, spool.stats().waiting_in_memory) == (3, 2)


# -- what a death leaves


def test_files_of_a_spool_are_for_their_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    fill(folder, 3)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}

    assert len(modes) == 2  # a segment and the lock
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_torn_record_is_cut_off_and_counted_wherever_it_is_torn(folder: Path) -> None:
    fill(folder, 2)
    (segment,) = folder.glob("*.spool")
    whole = segment.read_bytes()
    second = len(HEADER) + SAMPLE_BYTES

    for length in {*range(0, len(whole), 7), len(HEADER), second}:
        segment.write_bytes(whole[:length])
        with closing(Spool(folder)) as spool:
            assert leased(spool.lend(10)) == ([0] if length >= second else [])
            assert spool.stats().torn == (length > len(HEADER) and length != second)


def test_segment_of_another_version_is_left_as_it_is(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    newer = folder / f"{7:012d}.spool"
    newer.write_bytes(b"EPLBSPL\x02 and what it holds")

    with closing(Spool(folder)) as spool:
        spool.add([make_sample(0)])
        assert spool.stats().damaged == 1

    assert newer.read_bytes() == b"EPLBSPL\x02 and what it holds"
    assert "000000000007.spool" in caplog.text
    assert left_in(folder) == [0]


def test_file_that_never_got_a_record_is_cleaned_away(folder: Path) -> None:
    folder.mkdir()
    (folder / f"{1:012d}.spool").write_bytes(b"")
    (folder / f"{2:012d}.spool").write_bytes(HEADER)

    Spool(folder).close()

    assert [path.name for path in folder.iterdir()] == ["lock"]


def hold(pipe: Connection, folder: Path) -> None:
    with closing(Spool(folder)):
        pipe.send(os.getpid())
        pipe.recv()


def test_spool_is_one_process_s_until_that_ends(
    folder: Path, fork: Callable[..., ForkedProcess]
) -> None:
    holder = fork(hold, folder)

    with pytest.raises(StoreError, match=f"process {holder.receive()}"):
        Spool(folder)
    holder.kill()
    Spool(folder).close()


# -- what a disk can do to it


def test_folder_that_cannot_be_made_leaves_the_spool_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    caplog.set_level(logging.WARNING)

    with closing(Spool(tmp_path / "file" / "spool")) as spool:
        spool.add([make_sample(0)])

        assert leased(spool.lend(10)) == [0]
        assert (spool.stats().errors, spool.stats().waiting_in_memory) == (1, 1)
    assert caplog.records


def fill_disk(pipe: Connection, folder: Path) -> None:
    spool = Spool(folder, capacity=3)
    spool.add([make_sample(0)])
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # files stop growing, as on a full disk
    for n in range(1, 8):
        spool.add([make_sample(n)])
    full = spool.stats()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    spool.add([make_sample(8)])
    pipe.send((full.errors, full.dropped, full.waiting_in_memory, spool.stats().errors))
    spool.close()


def test_full_disk_costs_the_oldest_in_memory_and_is_tried_again(
    folder: Path, fork: Callable[..., ForkedProcess]
) -> None:
    filler = fork(fill_disk, folder)
    errors, dropped, in_memory, errors_after = filler.receive()
    assert filler.ends() == 0

    on_disk = 1 + 7 - errors
    assert 0 < errors < 8
    assert (dropped, in_memory) == (errors - 3, 3)
    assert errors_after == errors
    assert left_in(folder) == [*range(on_disk), 8]  # no part of a failed write is among them


def test_folder_deleted_under_it_is_made_again(folder: Path) -> None:
    with closing(Spool(folder)) as spool:
        spool.add([make_sample(0)])
        shutil.rmtree(folder)
        spool.add([make_sample(1)])

        assert leased(spool.lend(10)) == [0, 1]
        spool.give_back()
    assert left_in(folder) == [1]


# -- any interleaving

STEPS = st.sampled_from(
    ["add", "add", "send", "send", "stop store", "start store", "die unsettled"]
)


class Life:
    """A store that comes and goes, and the spools of one rank's processes, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_deaths, self._num_added = folder, 0, 0
        self.store = sqlite_store(folder / "store.sqlite", "demo", busy_timeout_s=0.0)
        self._other = sqlite3.connect(folder / "store.sqlite", isolation_level=None, timeout=0.0)
        self._spool = Spool(folder / "spool-0", capacity=2)

    def take(self, step: str) -> None:
        if step == "add":
            self._spool.add([make_sample(self._num_added)])
            self._num_added += 1
        elif step == "send":
            self.send()
        elif step == "die unsettled":
            self._die()
        elif self._other.in_transaction:
            self._other.execute("ROLLBACK")
        elif step == "stop store":
            self._other.execute("BEGIN IMMEDIATE")

    def send(self) -> None:
        batch = self._spool.lend(3)
        try:
            self._spool.settle(batch, num_new=self.store.append(list(batch.values())))
        except StoreError:
            self._spool.give_back()

    def _die(self) -> None:
        """Die after the store had a batch, before the spool knew: its files are as they are."""
        batch = self._spool.lend(3)
        if not self._other.in_transaction:
            self.store.append(list(batch.values()))
        self._num_deaths += 1
        copy = self._folder / f"spool-{self._num_deaths}"
        shutil.copytree(self._folder / f"spool-{self._num_deaths - 1}", copy)
        self._spool.close()
        self._spool = Spool(copy, capacity=2)

    def end(self) -> tuple[list[int], list[int]]:
        """Send all that is left; return what was stored, and what should have been."""
        if self._other.in_transaction:
            self._other.execute("ROLLBACK")
        while self._spool.has_waiting:
            self.send()
        assert len(set(balance(self._spool))) == 1, self._spool.stats()
        stored = sequences(self.store)
        for part in (self._spool, self._other, self.store):
            part.close()
        return sorted(stored), list(range(self._num_added))


@settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(STEPS, min_size=4, max_size=25))
def test_outages_and_deaths_in_any_order_lose_and_repeat_no_sample(
    tmp_path: Path, steps: list[str]
) -> None:
    life = Life(Path(tempfile.mkdtemp(dir=tmp_path)))
    for step in steps:
        life.take(step)

    stored, added = life.end()
    assert stored == added
