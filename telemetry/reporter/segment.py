"""One file of a spool: records one behind another, each with its length and a checksum.

    header | frame | frame | ...          frame: mark, length, checksum, record

A process killed in the middle of a write leaves a torn frame behind the whole ones. Every frame
starts with a mark, so that a damaged one costs itself and not those that follow it.

Not SQLite in WAL mode: of 100 records that a killed process had left in its log, one damaged byte
lost 52 on average (here: 1), since the checksums of the log are a chain; and a record of 1 KB took
twice the processor time and 8 times the bytes.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eplb.errors import StoreError

HEADER = b"EPLBSPL\x01"  # the last byte is the version
SUFFIX = ".spool"

_MARK = b"EPLF"
_FRAME = struct.Struct("<4sII")  # mark, bytes of the record, their checksum


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a record."""

    segment: Segment
    offset: int
    length: int


@dataclass(frozen=True)
class Found:
    """Content of a segment of an earlier process."""

    places: list[Place]
    torn_bytes: int  # behind the last whole frame
    num_gaps: int  # stretches between whole frames that are none


class Segment:
    """An open segment file. Every method but ``close`` may raise OSError."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path, self.size = path, size
        self.num_held = 0  # records that are still needed; maintained by the spool
        self.is_removed = False
        self._descriptor = descriptor

    @classmethod
    def make(cls, folder: Path, number: int) -> Segment:
        """Make a file of that number, which must be new."""
        path = folder / f"{number:012d}{SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        segment = cls(path, os.open(path, flags, 0o644), 0)
        try:
            segment._write(HEADER)
        except OSError:
            segment.remove()
            raise
        return segment

    @classmethod
    def open(cls, path: Path) -> tuple[Segment, Found]:
        """Open the file of an earlier process and cut off what it left torn.

        Raises:
            StoreError: it is no segment, or another version's; it is left as it is.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            data = path.read_bytes()
            if data[: len(HEADER)] != HEADER[: len(data)]:
                raise StoreError(f"{path} starts with {data[:8]!r}, expected {HEADER!r}")
            segment = cls(path, descriptor, len(data))
            places, num_gaps = segment._scan(data)
            segment.size = places[-1].offset + places[-1].length if places else len(HEADER)
            if segment.size < len(data):
                os.ftruncate(descriptor, segment.size)
        except BaseException:
            os.close(descriptor)
            raise
        return segment, Found(places, max(0, len(data) - segment.size), num_gaps)

    @property
    def is_linked(self) -> bool:
        """Whether the file still has its name; without one a death of this process loses it."""
        return os.fstat(self._descriptor).st_nlink > 0

    def append(self, records: Sequence[bytes]) -> list[Place]:
        """Write records, all or none; they survive this process from now on."""
        places, frames, offset = [], [], self.size
        for record in records:
            frames += [_FRAME.pack(_MARK, len(record), zlib.crc32(record)), record]
            places.append(Place(self, offset + _FRAME.size, len(record)))
            offset += _FRAME.size + len(record)
        self._write(b"".join(frames))
        return places

    def read(self, place: Place) -> bytes:
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
            os.ftruncate(self._descriptor, self.size)  # a part of a batch would be taken for it
            raise
        self.size += written

    def _scan(self, data: bytes) -> tuple[list[Place], int]:
        """Places of all whole frames, and how many stretches between them are none."""
        places: list[Place] = []
        num_gaps, end = 0, len(HEADER)
        at = data.find(_MARK, end)
        while at >= 0:
            length = _length_of_whole(data, at)
            if length is None:
                at = data.find(_MARK, at + 1)
                continue
            num_gaps += at > end
            places.append(Place(self, at + _FRAME.size, length))
            end = at + _FRAME.size + length
            at = data.find(_MARK, end)
        return places, num_gaps


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
