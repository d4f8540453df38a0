"""The folder of a spool: its lock, its segments, and the bound on their size.

    lock                  held while a process uses the folder; names that process
    000000000001.spool    the oldest segment
    000000000002.spool    the one that is written to

A segment is deleted when none of its records is needed any more, or when the folder is full and it
is the oldest. Leftovers of a crash (an empty file, a torn tail) are removed at opening.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from eplb.errors import ConfigError, StoreError
from telemetry.reporter.segment import HEADER, SUFFIX, Place, Segment, frame_bytes

MIN_BYTES = 1 << 16
_NUM_SEGMENTS = 16  # of a full folder: dropping the oldest drops so small a part

log = logging.getLogger(__name__)


class SpoolFolder:
    """Segments of one folder, oldest first. Not for several threads; the spool has a lock.

    Every method may raise OSError: the disk is full, read-only or missing.

    Raises:
        StoreError: another process uses the folder.
        ConfigError: the bound is too small.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        if max_bytes < MIN_BYTES:
            raise ConfigError(
                f"spool {path} may take {max_bytes} bytes, expected {MIN_BYTES} or more"
            )
        self.path = path
        self.num_torn = self.num_damaged = 0  # tails cut off; stretches in between, unread files
        self.num_overflows = 0  # segments that gave way to newer ones
        self.recovered: list[Place] = []  # what an earlier process left, oldest first
        self._max_bytes, self._segment_bytes = max_bytes, max_bytes // _NUM_SEGMENTS
        self._segments: list[Segment] = []
        self._next_number = 1
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(path)
        try:
            for found in sorted(path.glob("[0-9]" * 12 + SUFFIX)):
                self._recover(found)
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments)

    def append(self, record: bytes) -> Place:
        """Write a record, which survives this process from now on.

        The oldest segments give way when there is no room; their ``is_removed`` is set.
        """
        needed = frame_bytes(record)
        if needed + len(HEADER) > self._max_bytes:
            raise StoreError(
                f"spool {self.path}: a record takes {needed} bytes, "
                f"expected at most {self._max_bytes - len(HEADER)}"
            )
        segment = self._segment_with_room(needed)
        (place,) = segment.append([record])
        segment.num_held += 1
        return place

    def release(self, place: Place) -> None:
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
        while self._segments and self.num_bytes + needed + len(HEADER) > self._max_bytes:
            self._remove(self._segments[0])
            self.num_overflows += 1
        last = self._segments[-1] if self._segments else None
        if last is not None and last.is_linked:
            if last.size + needed <= self._segment_bytes or last.size == len(HEADER):
                return last
            self._seal(last)
        elif last is not None:
            log.warning("%s was deleted by another process; creating a new segment", last.path)
        self.path.mkdir(parents=True, exist_ok=True)
        made = Segment.make(self.path, self._next_number)
        self._next_number += 1
        self._segments.append(made)
        return made

    def _seal(self, segment: Segment) -> None:
        """A full segment survives a loss of power too; the one being written to may not."""
        segment.sync()
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        segment.remove()

    def _recover(self, path: Path) -> None:
        self._next_number = int(path.name.removesuffix(SUFFIX)) + 1
        try:
            segment, found = Segment.open(path)
        except StoreError as exc:
            # Perhaps a newer version's records: they are kept.
            self.num_damaged += 1
            log.warning("spool %s: a file is left as it is: %s", self.path, exc)
            return
        self._note(path, found.torn_bytes, found.num_gaps)
        if not found.places:
            segment.remove()
            return
        segment.num_held = len(found.places)
        self._segments.append(segment)
        self.recovered += found.places

    def _note(self, path: Path, torn_bytes: int, num_gaps: int) -> None:
        self.num_torn += torn_bytes > 0
        self.num_damaged += num_gaps
        if torn_bytes or num_gaps:
            log.warning(
                "%s: %d bytes of a torn write were cut off, %d stretches are damaged",
                path,
                torn_bytes,
                num_gaps,
            )


def _locked(path: Path) -> int:
    """Acquire the folder's lock, which ends with the process."""
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
