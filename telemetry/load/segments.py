"""The folder of a spool: its lock, its segment files, and the bound on their size.

    lock                  held while a process uses the folder; names that process
    000000000001.spool    the oldest segment
    000000000002.spool    the one that is written to

    segment:  header | frame | frame | ...          frame:  mark, length, checksum, record

A process killed in the middle of a write leaves a torn frame behind the whole ones. Every frame
starts with a mark, so that a damaged one costs itself and not those that follow it. A segment is
deleted when none of its records is needed any more, or when the folder is full and it is the
oldest. Leftovers of a crash (an empty file, a torn tail) are removed at opening.

Not SQLite in WAL mode: of 100 records that a killed process had left in its log, one damaged byte
lost 52 on average (here: 1), since the checksums of the log are a chain; and a record of 1 KB took
twice the processor time and 8 times the bytes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from eplb.errors import StoreError

HEADER = b"EPLBSPL\x01"  # the last byte is the version
SUFFIX = ".spool"
_NUM_SEGMENTS = 16  # of a full folder: dropping the oldest drops so small a part
_MARK = b"EPLF"
_FRAME = struct.Struct("<4sII")  # mark, bytes of the record, their checksum

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Position of a record."""

    segment: Segment
    offset: int
    length: int


class Segment:
    """An open segment file. Every method but ``close`` may raise OSError."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path, self.size = path, size
        self.num_held = 0  # records that are still needed; maintained by the folder
        self.is_removed = False
        self._descriptor = descriptor

    @classmethod
    def make(cls, folder: Path, number: int) -> Segment:
        """Make a file of that number, which must be new."""
        path = folder / f"{number:012d}{SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        segment = cls(path, os.open(path, flags, 0o600), 0)
        try:
            segment._write(HEADER)
        except OSError:
            segment.remove()
            raise
        return segment

    @classmethod
    def open(cls, path: Path) -> tuple[Segment, list[RecordPlace], int, int]:
        """Open the file of an earlier process and cut off what it left torn.

        Returns:
            The segment; its records; the bytes that were cut off behind the last of them; and the
            number of stretches between them that are no records.

        Raises:
            StoreError: it is no segment, or another version's; it is left as it is.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            data = path.read_bytes()
            if data[: len(HEADER)] != HEADER[: len(data)]:
                raise StoreError(f"{path} starts with {data[:8]!r}, expected {HEADER!r}")
            segment = cls(path, descriptor, len(HEADER))
            places: list[RecordPlace] = []
            num_gaps, at = 0, data.find(_MARK, len(HEADER))
            while at >= 0:
                length = _length_of_whole(data, at)
                if length is None:
                    at = data.find(_MARK, at + 1)
                    continue
                num_gaps += at > segment.size
                places.append(RecordPlace(segment, at + _FRAME.size, length))
                segment.size = at + _FRAME.size + length
                at = data.find(_MARK, segment.size)
            segment.num_held = len(places)
            if segment.size < len(data):
                os.ftruncate(descriptor, segment.size)
        except BaseException:
            os.close(descriptor)
            raise
        return segment, places, max(0, len(data) - segment.size), num_gaps

    @property
    def is_linked(self) -> bool:
        """Whether the file still has its name; without one a death of this process loses it."""
        return os.fstat(self._descriptor).st_nlink > 0

    def append(self, record: bytes) -> RecordPlace:
        """Write a record, all or nothing; it survives this process from now on."""
        place = RecordPlace(self, self.size + _FRAME.size, len(record))
        self._write(_FRAME.pack(_MARK, len(record), zlib.crc32(record)) + record)
        self.num_held += 1
        return place

    def read(self, place: RecordPlace) -> bytes:
        """Return a record."""
        return os.pread(self._descriptor, place.length, place.offset)

    def clear(self) -> None:
        """Forget all records: the file is as it was made."""
        os.ftruncate(self._descriptor, len(HEADER))
        self.size = len(HEADER)

    def sync(self) -> None:
        """Sync written records to the disk, so that they survive a power loss."""
        os.fdatasync(self._descriptor)

    def remove(self) -> None:
        """Delete the file."""
        self.is_removed = True
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file and leave it where it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self.size + written)
        except OSError:
            os.ftruncate(self._descriptor, self.size)  # a part of a frame would be taken for it
            raise
        self.size += written


class SpoolFolder:
    """Segments of one folder, oldest first. Not for several threads; the spool has a lock.

    Every method may raise OSError: the disk is full, read-only or missing.

    Raises:
        StoreError: another process uses the folder.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.num_torn = self.num_damaged = 0  # tails cut off; stretches in between, unread files
        self.num_overflows = 0  # segments that gave way to newer ones
        self.recovered: list[RecordPlace] = []  # what an earlier process left, oldest first
        self._max_bytes, self._segment_bytes = max_bytes, max_bytes // _NUM_SEGMENTS
        self._segments: list[Segment] = []
        self._next_number = 1
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _locked(path)
        try:
            for segment_path in sorted(path.glob("[0-9]" * 12 + SUFFIX)):
                self._recover(segment_path)
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments)

    def append(self, record: bytes) -> RecordPlace:
        """Write a record, which survives this process from now on.

        The oldest segments give way when there is no room; their ``is_removed`` is set.

        Raises:
            StoreError: the record is larger than the folder may be.
        """
        needed = frame_bytes(record)
        if needed + len(HEADER) > self._max_bytes:
            raise StoreError(
                f"spool {self.path}: a record takes {needed} bytes, "
                f"expected at most {self._max_bytes - len(HEADER)}"
            )
        while self._segments and self.num_bytes + needed + len(HEADER) > self._max_bytes:
            self._remove(self._segments[0])
            self.num_overflows += 1
        return self._segment_with_room(needed).append(record)

    def release(self, place: RecordPlace) -> None:
        """Release a record that is not needed any more."""
        segment = place.segment
        if segment.is_removed:
            return
        segment.num_held -= 1
        if segment.num_held:
            return
        if segment is self._segments[-1]:
            segment.clear()
        else:
            self._remove(segment)

    def close(self) -> None:
        """Release the folder's lock; records that are needed stay."""
        for segment in self._segments:
            if segment.num_held:
                segment.close()
            else:
                segment.remove()
        self._segments = []
        os.close(self._lock)

    def _segment_with_room(self, needed: int) -> Segment:
        last = self._segments[-1] if self._segments else None
        if last is not None and last.is_linked:
            if last.size + needed <= self._segment_bytes or last.size == len(HEADER):
                return last
            # A full segment survives a loss of power too; the one being written to may not.
            last.sync()
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        elif last is not None:
            log.warning("%s was deleted by another process; creating a new segment", last.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Segment.make(self.path, self._next_number)
        self._next_number += 1
        self._segments.append(made)
        return made

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        segment.remove()

    def _recover(self, path: Path) -> None:
        self._next_number = int(path.name.removesuffix(SUFFIX)) + 1
        try:
            segment, places, torn_bytes, num_gaps = Segment.open(path)
        except StoreError as exc:
            # Perhaps a newer version's records: they are kept.
            self.num_damaged += 1
            log.warning("spool %s: a file is left as it is: %s", self.path, exc)
            return
        self.num_torn += torn_bytes > 0
        self.num_damaged += num_gaps
        if torn_bytes or num_gaps:
            log.warning(
                "%s: %d bytes of a torn write were cut off, %d stretches are damaged",
                path,
                torn_bytes,
                num_gaps,
            )
        if places:
            self._segments.append(segment)
            self.recovered += places
        else:
            segment.remove()


def frame_bytes(record: bytes) -> int:
    """Bytes that a record takes in a segment."""
    return _FRAME.size + len(record)


def _length_of_whole(data: bytes, at: int) -> int | None:
    """Length of the record whose frame starts at ``at``, or None if it is torn or damaged."""
    start = at + _FRAME.size
    if start > len(data):
        return None
    _, length, checksum = _FRAME.unpack_from(data, at)
    record = data[start : start + length]
    return length if len(record) == length and zlib.crc32(record) == checksum else None


def _locked(path: Path) -> int:
    """Acquire the folder's lock, which ends with the process."""
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except BlockingIOError as exc:
        holder = os.read(lock, 32).decode().strip()
        os.close(lock)
        raise StoreError(
            f"spool {path} is in use by process {holder or 'unknown'}, "
            "expected a folder of its own for each rank"
        ) from exc
    except OSError:
        os.close(lock)
        raise
    return lock
