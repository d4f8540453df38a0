"""The spool of a rank: samples that the store does not have yet, on disk to survive the process.

Every sample is written here before the store is tried, and forgotten once the store has it:

    new ------------> in memory and on disk ---- stored ----> forgotten
                         |           ^
      the store failed,  v           | lent, with new  ones in the same batch
      or too many new   on disk only, oldest first

What survives: a death of the process, including ``kill -9``, loses nothing that ``add`` returned
for. A power loss costs at most the content of the newest segment (full ones are synced), because
nothing here waits for the disk. A sample that was stored but not removed is sent again; the store
detects the repeat by run, rank and sequence.

If the disk fails (full, read-only, missing) samples are kept in memory, the newest ``capacity`` of
them. Each failure is counted, and the disk is retried with the next sample. A spool without a
folder is in memory from the start.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock

from eplb.core.load import LoadSample
from eplb.errors import EplbError, StoreError
from telemetry.load.sample_codec import sample_from_bytes, sample_to_bytes
from telemetry.load.segments import RecordPlace, SpoolFolder

DEFAULT_BYTES = 64 << 20  # 24,000 samples of 58 layers x 9 slots: three hours at two a second
DEFAULT_CAPACITY = 256

log = logging.getLogger(__name__)


@dataclass
class ReporterStats:
    """Samples of a reporter, or of its spool alone, by what became of them.

    ``offered + recovered == stored + dropped + refused + waiting``, always of a spool; of a
    reporter but for what is on its way while the counts are read.
    """

    offered: int = 0
    recovered: int = 0  # left on disk by an earlier process of this rank
    stored: int = 0  # acknowledged by the store; ``repeated`` and ``replayed`` are among them
    repeated: int = 0  # that the store had already
    replayed: int = 0  # stored after they had waited on disk
    spooled: int = 0  # could not be stored at once, and waited on disk
    dropped: int = 0  # removed for newer ones, for lack of room, or offered after close
    refused: int = 0  # samples that cannot be packed or stored, and records that cannot be read
    waiting: int = 0
    waiting_in_memory: int = 0  # of these: without a disk, so that they would die with the process
    torn: int = 0  # writes that a death cut off
    damaged: int = 0  # stretches of segments, and whole files, that hold no record
    bytes_on_disk: int = 0
    errors: int = 0  # failed writes, to the disk and to the store
    errors_by_kind: Mapping[str, int] = field(default_factory=dict)  # the store's by type; "disk"
    last_error: str = ""  # of the store, else the latest of a refusal and of the disk


@dataclass
class _Held:
    """A sample in memory, and its position on disk, if it has one."""

    sample: LoadSample
    place: RecordPlace | None
    is_new: bool = True  # not tried yet


class Spool:
    """Samples on their way to the store, by a position that only grows. For several threads.

    A folder that cannot be opened is given up; a full one is tried again with the next sample.

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
        self._on_disk: dict[int, RecordPlace] = {}  # only there
        self._lent: dict[int, _Held] = {}
        self._working = ReporterStats()  # as the spool changes; under the lock
        self._is_failing = False  # the disk
        self._folder: SpoolFolder | None = None
        if folder is not None:
            try:
                self._folder = SpoolFolder(folder, max_bytes)
            except OSError as exc:
                self._note_disk_error(f"spool {folder} cannot be opened", exc)
        if self._folder is not None:
            self._on_disk = {self._take_position(): place for place in self._folder.recovered}
        self._working.recovered = len(self._on_disk)
        self._stats = self._count()

    def add(self, samples: Sequence[LoadSample]) -> None:
        """Add samples. Never raises because of the disk."""
        for sample in samples:
            try:
                record = sample_to_bytes(sample)
            except (EplbError, struct.error, OverflowError) as exc:
                with self._use():
                    self._working.offered += 1
                    self._note_refusal(f"sample {sample.sequence} cannot be packed: {exc}")
                continue
            with self._use():
                self._working.offered += 1
                self._held[self._take_position()] = _Held(sample, self._write(record))
                self._trim()

    @property
    def has_waiting(self) -> bool:
        """Whether something is not stored yet."""
        # As of the last change: between two looks at live tables a batch may pass from one to
        # another, and be seen in neither.
        return self._stats.waiting > 0

    @property
    def has_backlog(self) -> bool:
        """Whether samples wait on disk that could not be stored at once."""
        return bool(self._on_disk)

    def lend(self, limit: int) -> dict[int, LoadSample]:
        """Lend up to ``limit`` of the oldest on disk, and as many new ones, by position.

        New ones do not wait behind a long backlog. One loan at a time, which ends with
        ``settle`` and ``give_back``.
        """
        with self._use():
            assert not self._lent, "one loan at a time"
            for position in list(islice(self._on_disk, limit)):
                self._lend_from_disk(position)
            for position in list(islice(self._held, limit)):
                self._lent[position] = self._held.pop(position)
            return {position: held.sample for position, held in self._lent.items()}

    def settle(self, positions: Iterable[int], *, num_new: int) -> None:
        """Forget samples that are stored, ``num_new`` of them for the first time."""
        with self._use():
            settled = [self._lent.pop(position) for position in positions]
            for held in settled:
                self._release(held.place)
            self._working.stored += len(settled)
            self._working.repeated += len(settled) - num_new
            self._working.replayed += sum(not held.is_new for held in settled)

    def refuse(self, position: int, why: EplbError) -> None:
        """Forget a sample that can never be stored."""
        with self._use():
            self._release(self._lent.pop(position).place)
            self._note_refusal(str(why))

    def give_back(self) -> None:
        """Return lent samples for another attempt."""
        if not self._lent:
            return
        with self._use():
            in_memory: dict[int, _Held] = {}
            on_disk: dict[int, RecordPlace] = {}
            for position, held in self._lent.items():
                if held.place is None or held.place.segment.is_removed:
                    in_memory[position] = _Held(held.sample, None, is_new=False)
                else:
                    on_disk[position] = held.place
                    self._working.spooled += held.is_new
            self._lent = {}
            self._held = in_memory | self._held
            self._on_disk = dict(sorted((on_disk | self._on_disk).items()))
            self._trim()

    def stats(self) -> ReporterStats:
        """Return the counts, all of one moment; never waits for the disk."""
        return self._stats

    def close(self) -> None:
        """Close the folder; samples on disk stay for the next process."""
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
                self._stats = self._count()

    def _count(self) -> ReporterStats:
        counts, folder = self._working, self._folder
        in_memory = [*self._held.values(), *self._lent.values()]
        counts.waiting = len(in_memory) + len(self._on_disk)
        counts.waiting_in_memory = sum(held.place is None for held in in_memory)
        if folder is not None:
            counts.torn, counts.damaged = folder.num_torn, folder.num_damaged
            counts.bytes_on_disk = folder.num_bytes
        return ReporterStats(**vars(counts))

    def _take_position(self) -> int:
        self._next += 1
        return self._next

    def _write(self, record: bytes) -> RecordPlace | None:
        """Write a record; None where that fails, or without a folder."""
        folder = self._folder
        if folder is None:
            return None
        num_overflows, place = folder.num_overflows, None
        try:
            place = folder.append(record)
        except (OSError, StoreError) as exc:
            self._note_disk_error(f"spool {folder.path} cannot be written", exc)
        else:
            if self._is_failing:
                log.warning("spool %s can be written again", folder.path)
            self._is_failing = False
        if folder.num_overflows != num_overflows:
            self._drop_removed()
        return place

    def _drop_removed(self) -> None:
        """Count what went with the oldest segments; what is still in memory is not lost yet."""
        removed = [p for p, place in self._on_disk.items() if place.segment.is_removed]
        for position in removed:
            del self._on_disk[position]
        self._working.dropped += len(removed)
        for held in (*self._held.values(), *self._lent.values()):
            if held.place is not None and held.place.segment.is_removed:
                held.place = None

    def _trim(self) -> None:
        """Keep the newest in memory; older ones only on disk, or not at all without one."""
        while len(self._held) > self._capacity:
            position = next(iter(self._held))
            held = self._held.pop(position)
            if held.place is None:
                self._working.dropped += 1
            else:
                self._on_disk[position] = held.place
                self._working.spooled += held.is_new

    def _lend_from_disk(self, position: int) -> None:
        place = self._on_disk.pop(position)
        try:
            sample = sample_from_bytes(place.segment.read(place))
        except (OSError, EplbError) as exc:
            why = f"{place.segment.path}: record rejected: {exc}"
            log.warning("%s", why)
            self._release(place)
            self._note_refusal(why)
            return
        self._lent[position] = _Held(sample, place, is_new=False)

    def _release(self, place: RecordPlace | None) -> None:
        if place is None or self._folder is None:
            return
        try:
            self._folder.release(place)
        except OSError as exc:  # it may be sent once more then, after a restart
            self._note_disk_error(f"spool {self._folder.path} cannot be cleaned", exc)

    def _note_refusal(self, why: str) -> None:
        self._working.refused += 1
        self._working.last_error = why

    def _note_disk_error(self, what: str, exc: Exception) -> None:
        counts = self._working
        counts.errors += 1
        counts.errors_by_kind = {"disk": counts.errors}
        counts.last_error = f"{what}: {exc}"
        if not self._is_failing:  # once for each time that the disk is in trouble
            log.warning("%s: samples are kept in memory meanwhile", counts.last_error)
        self._is_failing = True
