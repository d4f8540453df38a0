"""What a rank could not report yet lies on disk, and outlives the rank."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb.core.load import LoadSample
from eplb.errors import ConfigError, StoreError
from telemetry.records.sample_codec import sample_to_bytes
from telemetry.reporter.segment import HEADER, frame_bytes
from telemetry.reporter.spool import Spool
from telemetry.reporter.spool_folder import MIN_BYTES
from telemetry.stores.sqlite.store import SqliteStore
from tests.support.repository import ROOT


def make_sample(sequence: int, run: str = "run-1") -> LoadSample:
    """As large as any other: the arrays hold one figure."""
    slot, one = np.array([[0]]), np.array([[1]])
    return LoadSample("demo", run, 0, sequence, 0.0, sequence, sequence, "decode", 1, slot, one)


SAMPLE_BYTES = frame_bytes(sample_to_bytes(make_sample(0)))


def sequences(batch: dict[int, LoadSample]) -> list[int]:
    return [sample.sequence for sample in batch.values()]


def left_in(folder: Path) -> list[int]:
    """What the next process finds."""
    with closing(Spool(folder)) as spool:
        return sequences(spool.lease(10_000))


def fill(folder: Path, num_samples: int) -> None:
    with closing(Spool(folder)) as spool:
        spool.add([make_sample(n) for n in range(num_samples)])


def balance(spool: Spool) -> tuple[int, int]:
    """Samples that came, and those that are accounted for."""
    counts = spool.counts()
    gone = counts.stored + counts.dropped + counts.refused
    return counts.added + counts.recovered, gone + counts.waiting


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


# -- what is kept, and for how long


def test_next_process_gets_unstored_samples_oldest_first(folder: Path) -> None:
    fill(folder, 3)

    assert left_in(folder) == [0, 1, 2]


def test_stored_samples_are_removed_and_leave_no_file(folder: Path) -> None:
    with closing(Spool(folder)) as spool:
        spool.add([make_sample(n) for n in range(3)])
        spool.settle(spool.lease(10), num_new=2)

        assert spool.counts().bytes_on_disk == len(HEADER)
        assert (spool.counts().stored, spool.counts().repeated, spool.counts().replayed) == (
            3,
            1,
            0,
        )

    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_samples_of_an_earlier_process_are_sent_with_new_ones(folder: Path) -> None:
    fill(folder, 2)

    with closing(Spool(folder)) as spool:
        spool.add([make_sample(7, run="run-2")])
        batch = spool.lease(10)
        spool.settle(batch, num_new=3)

        assert [(sample.run, sample.sequence) for sample in batch.values()] == [
            ("run-1", 0),
            ("run-1", 1),
            ("run-2", 7),
        ]
        assert (spool.counts().recovered, spool.counts().replayed) == (2, 2)
    assert left_in(folder) == []


def test_new_samples_do_not_wait_behind_a_backlog(folder: Path) -> None:
    fill(folder, 20)

    with closing(Spool(folder)) as spool:
        spool.add([make_sample(20), make_sample(21)])

        assert sequences(spool.lease(2)) == [0, 1, 20, 21]


def test_returned_samples_keep_their_order(folder: Path) -> None:
    with closing(Spool(folder)) as spool:
        spool.add([make_sample(n) for n in range(4)])
        spool.lease(2)
        spool.give_back()
        spool.add([make_sample(4)])

        assert sequences(spool.lease(2)) == [0, 1, 2, 3]
        assert spool.counts().spooled == 2


def test_more_new_samples_than_memory_holds_wait_on_disk(folder: Path) -> None:
    with closing(Spool(folder, capacity=2)) as spool:
        spool.add([make_sample(n) for n in range(5)])

        assert sequences(spool.lease(10)) == [0, 1, 2, 3, 4]
        assert (spool.counts().spooled, spool.counts().dropped) == (3, 0)


def test_full_spool_drops_the_oldest_and_counts_each(folder: Path) -> None:
    num_samples = 2 * MIN_BYTES // SAMPLE_BYTES
    with closing(Spool(folder, max_bytes=MIN_BYTES, capacity=1)) as spool:
        spool.add([make_sample(n) for n in range(num_samples)])

        kept, counts = sequences(spool.lease(num_samples)), spool.counts()
        assert counts.bytes_on_disk <= MIN_BYTES
        assert kept == list(range(counts.dropped, num_samples))
        assert len(kept) > 0.9 * MIN_BYTES / SAMPLE_BYTES  # one segment of 16 went at a time
        assert balance(spool) == (num_samples, num_samples)


def test_sample_dropped_during_its_write_is_not_lost(folder: Path) -> None:
    num_samples = 2 * MIN_BYTES // SAMPLE_BYTES
    with closing(Spool(folder, max_bytes=MIN_BYTES, capacity=4)) as spool:
        spool.add([make_sample(0)])
        leased = spool.lease(1)
        spool.add([make_sample(n) for n in range(1, num_samples)])
        spool.settle(leased, num_new=1)

        counts = spool.counts()
        assert (counts.stored, counts.stored + counts.dropped + counts.waiting) == (1, num_samples)


def test_without_a_folder_the_newest_are_kept_in_memory() -> None:
    with closing(Spool(capacity=2)) as spool:
        spool.add([make_sample(n) for n in range(5)])

        assert sequences(spool.lease(10)) == [3, 4]
        assert (spool.counts().dropped, spool.counts().waiting_in_memory) == (3, 2)


# -- what a death leaves


def test_torn_record_is_cut_off_and_counted_wherever_it_is_torn(folder: Path) -> None:
    fill(folder, 2)
    (segment,) = folder.glob("*.spool")
    whole = segment.read_bytes()
    second = len(HEADER) + SAMPLE_BYTES

    for length in range(len(whole)):
        segment.write_bytes(whole[:length])
        with closing(Spool(folder)) as spool:
            assert sequences(spool.lease(10)) == ([0] if length >= second else [])
            assert spool.counts().torn == (length > len(HEADER) and length != second)


def test_damaged_record_costs_itself_and_no_other(folder: Path) -> None:
    fill(folder, 3)
    (segment,) = folder.glob("*.spool")
    data = bytearray(segment.read_bytes())
    data[len(HEADER) + SAMPLE_BYTES + SAMPLE_BYTES // 2] ^= 0xFF
    segment.write_bytes(data)

    with closing(Spool(folder)) as spool:
        assert sequences(spool.lease(10)) == [0, 2]
        assert (spool.counts().damaged, spool.counts().torn) == (1, 0)


def test_segment_of_another_version_is_left_as_it_is(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    newer = folder / f"{7:012d}.spool"
    newer.write_bytes(b"EPLBSPL\x02 and what it holds")

    with closing(Spool(folder)) as spool:
        spool.add([make_sample(0)])
        assert spool.counts().damaged == 1

    assert newer.read_bytes() == b"EPLBSPL\x02 and what it holds"
    assert "000000000007.spool starts with b'EPLBSPL\\x02', expected" in caplog.text
    assert left_in(folder) == [0]


def test_file_that_never_got_a_record_is_cleaned_away(folder: Path) -> None:
    folder.mkdir()
    (folder / f"{1:012d}.spool").write_bytes(b"")
    (folder / f"{2:012d}.spool").write_bytes(HEADER)

    Spool(folder).close()

    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_spool_is_one_process_s_until_that_ends(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from telemetry.reporter.spool import Spool\n"
        f"spool = Spool(Path({str(folder)!r})); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match=f"in use by process {holder.pid}, expected a folder"):
            Spool(folder)
        holder.kill()
        holder.wait()

    Spool(folder).close()


# -- what a disk can do to it


def test_folder_that_cannot_be_made_leaves_the_spool_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    caplog.set_level(logging.WARNING)

    with closing(Spool(tmp_path / "file" / "spool")) as spool:
        spool.add([make_sample(0)])

        assert sequences(spool.lease(10)) == [0]
        assert (spool.counts().errors, spool.counts().waiting_in_memory) == (1, 1)
    assert "samples are kept in memory meanwhile" in caplog.text


FULL_DISK = """
import resource, sys
from pathlib import Path
from eplb.core.load import LoadSample
from telemetry.reporter.spool import Spool

def add(*sequences):
    for n in sequences:
        sample = LoadSample("demo", "run-1", 0, n, 0.0, n, n, "decode", 1, [[0]], [[1]])
        spool.add([sample])

spool = Spool(Path(sys.argv[1]), capacity=3)
add(0)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # files stop growing, as on a full disk
add(*range(1, 8))
full = spool.counts()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
add(8)
print(full.errors, full.dropped, full.waiting_in_memory, spool.counts().errors)
spool.close()
"""


def test_full_disk_costs_the_oldest_in_memory_and_is_tried_again(folder: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(folder)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    errors, dropped, in_memory, errors_after = map(int, ended.stdout.split())

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

        assert sequences(spool.lease(10)) == [0, 1]
        spool.give_back()
    assert left_in(folder) == [1]


def test_bound_without_room_for_a_sample_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="may take 10 bytes, expected 65536 or more"):
        Spool(folder, max_bytes=10)


# -- any interleaving

STEPS = st.sampled_from(
    ["add", "add", "send", "send", "stop store", "start store", "die unsettled"]
)


class Life:
    """A store that comes and goes, and the spools of one rank's processes, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_deaths, self._num_added = folder, 0, 0
        self.store = SqliteStore(folder / "store.sqlite", "demo", busy_timeout_s=0.0)
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
        batch = self._spool.lease(3)
        try:
            self._spool.settle(batch, num_new=self.store.append(list(batch.values())))
        except StoreError:
            self._spool.give_back()

    def _die(self) -> None:
        """Die after the store had a batch, before the spool knew: its files are as they are."""
        batch = self._spool.lease(3)
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
        assert len(set(balance(self._spool))) == 1, self._spool.counts()
        stored = [sample.sequence for _, sample in self.store.samples("run-1")]
        for part in (self._spool, self._other, self.store):
            part.close()
        return sorted(stored), list(range(self._num_added))


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
