"""What a rank reported and the store does not have yet: on disk, so that it outlives the rank.

Every sample is written here before the store is tried, and forgotten once the store has it:

    new ------------> in memory and on disk ---- stored ----> forgotten
                         |           ^
      the store failed,  v           | leased, with new ones in the same batch
      or too many new   on disk only, oldest first

What survives: the death of the process, ``kill -9`` included, costs nothing that ``add`` returned
for. A loss of power costs at most what the segment written last holds (full ones are synced), for
nothing here waits for the disk. A sample that was stored but not forgotten is sent again; the store
knows it by run, rank and sequence.

Where the disk fails (full, read-only, gone) samples are kept in memory, the newest ``capacity`` of
them; each failure is counted, and the disk is tried again with the next sample. A spool without a
folder is in memory from the start.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock

from eplb.errors import EplbError, StoreError
from eplb.load import LoadSample
from telemetry.codec import sample_from_bytes, sample_to_bytes
from telemetry.spool_counts import SpoolCounts, Tally
from telemetry.spool_folder import SpoolFolder
from telemetry.spool_segment import Place

DEFAULT_BYTES = 64 << 20  # 24,000 samples of 58 layers x 9 slots: three hours at two a second
DEFAULT_CAPACITY = 256

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """A sample in memory, and where it lies on disk, if it does."""

    sample: LoadSample
    place: Place | None
    is_new: bool = True  # not tried yet


class Spool:
    """Samples on their way to the store, by a position that only grows. For several threads.

    Args:
        folder: made if it is missing; None for memory only.
        max_bytes: of all segments; beyond it the oldest are dropped and counted.
        capacity: samples held in memory.

    Raises:
        StoreError: another process uses the folder.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        max_bytes: int = DEFAULT_BYTES,
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        assert capacity > 0, "a spool without room would drop every sample"
        self._capacity = capacity
        self._lock = Lock()
        self._next = 0
        self._held: dict[int, _Held] = {}  # in memory, not tried yet or without a disk
        self._on_disk: dict[int, Place] = {}  # only there
        self._leased: dict[int, _Held] = {}
        self._tally = Tally()
        self._is_failing = False
        self._folder: SpoolFolder | None = None
        if folder is not None:
            self._open(folder, max_bytes)
        self._counts = self._count()

    def add(self, samples: Sequence[LoadSample]) -> None:
        """Take samples in. Never raises for the disk's sake."""
        for sample in samples:
            try:
                record = sample_to_bytes(sample)
            except (EplbError, struct.error, OverflowError) as exc:
                self._refuse_new(sample, exc)
                continue
            with self._use():
                self._tally.added += 1
                self._held[self._take_position()] = _Held(sample, self._write(record))
                self._trim()

    @property
    def has_waiting(self) -> bool:
        """Whether something is not stored yet."""
        return bool(self._held or self._on_disk or self._leased)

    @property
    def has_backlog(self) -> bool:
        """Whether samples wait on disk that could not be stored at once."""
        return bool(self._on_disk)

    def lease(self, limit: int) -> dict[int, LoadSample]:
        """Lend up to ``limit`` of the oldest on disk, and as many new ones, by position.

        New ones do not wait behind a long backlog. One lease at a time, which ends with
        ``settle`` and ``give_back``.
        """
        with self._use():
            assert not self._leased, "one lease at a time"
            for position in list(islice(self._on_disk, limit)):
                self._lease_from_disk(position)
            for position in list(islice(self._held, limit)):
                self._leased[position] = self._held.pop(position)
            return {position: held.sample for position, held in self._leased.items()}

    def settle(self, positions: Iterable[int], *, num_new: int) -> None:
        """Forget samples that are stored, ``num_new`` of them for the first time."""
        with self._use():
            settled = [self._leased.pop(position) for position in positions]
            for held in settled:
                self._release(held.place)
            self._tally.stored += len(settled)
            self._tally.repeated += len(settled) - num_new
            self._tally.replayed += sum(not held.is_new for held in settled)

    def refuse(self, position: int, why: EplbError) -> None:
        """Forget a sample that can never be stored."""
        with self._use():
            self._release(self._leased.pop(position).place)
            self._tally.refused += 1
            self._tally.last_error = str(why)

    def give_back(self) -> None:
        """Keep what is still leased, for another try."""
        if not self._leased:
            return
        with self._use():
            in_memory: dict[int, _Held] = {}
            on_disk: dict[int, Place] = {}
            for position, held in self._leased.items():
                if held.place is None or held.place.segment.is_removed:
                    in_memory[position] = _Held(held.sample, None, is_new=False)
                else:
                    on_disk[position] = held.place
                    self._tally.spooled += held.is_new
            self._leased = {}
            self._held = in_memory | self._held
            self._on_disk = dict(sorted((on_disk | self._on_disk).items()))
            self._trim()

    def counts(self) -> SpoolCounts:
        """Return the counts, all of one moment; never waits for the disk."""
        return self._counts

    def close(self) -> None:
        """Let go of the folder; what waits on disk stays for the next process."""
        with self._lock:
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    @contextmanager
    def _use(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            finally:
                self._counts = self._count()

    def _count(self) -> SpoolCounts:
        folder = self._folder
        in_memory = [*self._held.values(), *self._leased.values()]
        return SpoolCounts(
            **vars(self._tally),
            waiting=len(in_memory) + len(self._on_disk),
            waiting_in_memory=sum(held.place is None for held in in_memory),
            torn=folder.num_torn if folder else 0,
            damaged=folder.num_damaged if folder else 0,
            bytes_on_disk=folder.num_bytes if folder else 0,
        )

    def _open(self, path: Path, max_bytes: int) -> None:
        try:
            self._folder = SpoolFolder(path, max_bytes)
        except OSError as exc:
            self._disk_failed(f"spool {path} cannot be opened", exc)
            return
        for place in self._folder.recovered:
            self._on_disk[self._take_position()] = place
        self._tally.recovered = len(self._on_disk)

    def _take_position(self) -> int:
        self._next += 1
        return self._next

    def _write(self, record: bytes) -> Place | None:
        """Write a record to the disk; None where that fails."""
        folder = self._folder
        if folder is None:
            return None
        num_overflows = folder.num_overflows
        try:
            place = folder.append(record)
        except (OSError, StoreError) as exc:
            self._disk_failed(f"spool {folder.path} cannot be written", exc)
            return None
        finally:
            if folder.num_overflows != num_overflows:
                self._drop_removed()
        if self._is_failing:
            log.warning("spool %s can be written again", folder.path)
        self._is_failing = False
        return place

    def _drop_removed(self) -> None:
        """Count what went with the oldest segments; what is still in memory is not lost yet."""
        gone = [p for p, place in self._on_disk.items() if place.segment.is_removed]
        for position in gone:
            del self._on_disk[position]
        self._tally.dropped += len(gone)
        for held in (*self._held.values(), *self._leased.values()):
            if held.place is not None and held.place.segment.is_removed:
                held.place = None

    def _trim(self) -> None:
        """Keep the newest in memory; older ones only on disk, or not at all without one."""
        while len(self._held) > self._capacity:
            position = next(iter(self._held))
            held = self._held.pop(position)
            if held.place is None:
                self._tally.dropped += 1
            else:
                self._on_disk[position] = held.place
                self._tally.spooled += held.is_new

    def _lease_from_disk(self, position: int) -> None:
        place = self._on_disk.pop(position)
        try:
            sample = sample_from_bytes(place.segment.read(place))
        except (OSError, EplbError) as exc:
            self._tally.refused += 1
            self._tally.last_error = f"{place.segment.path}: a record is refused: {exc}"
            log.warning("%s", self._tally.last_error)
            self._release(place)
            return
        self._leased[position] = _Held(sample, place, is_new=False)

    def _release(self, place: Place | None) -> None:
        if place is None or self._folder is None:
            return
        try:
            self._folder.release(place)
        except OSError as exc:  # it may be sent once more then, after a restart
            self._disk_failed(f"spool {self._folder.path} cannot be cleaned", exc)

    def _refuse_new(self, sample: LoadSample, exc: Exception) -> None:
        with self._use():
            self._tally.added += 1
            self._tally.refused += 1
            self._tally.last_error = f"sample {sample.sequence} cannot be packed: {exc}"

    def _disk_failed(self, what: str, exc: Exception) -> None:
        self._tally.errors += 1
        self._tally.last_error = f"{what}: {exc}"
        if not self._is_failing:  # once for each time that the disk is in trouble
            log.warning("%s: samples are kept in memory meanwhile", self._tally.last_error)
        self._is_failing = True
