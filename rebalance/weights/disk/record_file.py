"""File of expert records, from which the host cache loads at the disk's full speed.

A checkpoint stores an expert in several tensors; repacking assembles them through the page cache on
one core. A record file stores the repacked records, page-aligned and in kernel layout, with a mark
for each complete record (see ``record_file_layout.py``).

A record is marked after its bytes are on the disk, so a crash at any byte leaves it unmarked or
whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
from pathlib import Path

import torch

from eplb.errors import CheckpointError
from rebalance.types import Digest, Record
from rebalance.weights.disk.direct_io import DirectFile
from rebalance.weights.disk.parallel_reader import ParallelReader
from rebalance.weights.disk.record_file_layout import MARK_BYTES, UNMARKED, RecordFileLayout
from rebalance.weights.disk.record_origin import RecordOrigin
from runtime.memory.shared import PAGE_BYTES

FLUSH_RECORDS = 64  # unmarked written records; a crash costs repacking them again

log = logging.getLogger(__name__)


class RecordFile:
    """One open record file. Any number of processes read it; the first to come also writes.

    Raises:
        CheckpointError: the file is damaged or truncated, or has another origin.
    """

    def __init__(self, path: Path, origin: RecordOrigin) -> None:
        self.path, self._layout = path, RecordFileLayout(origin)
        self._lock = threading.Lock()
        self._unmarked: dict[Record, Digest] = {}  # written, not known to be on the disk
        self._complete: dict[Record, Digest] = {}
        try:
            self._file = DirectFile(path, os.O_RDWR)
        except OSError as exc:
            raise CheckpointError(f"record file {path} cannot be opened: {exc}") from exc
        self._reader = ParallelReader(self._file, str(path))
        try:
            self.may_write = _try_lock(self._file.buffered)
            self._check()
        except (CheckpointError, OSError) as exc:
            self._file.close()
            raise CheckpointError(f"record file {path} cannot be used: {exc}") from exc

    @staticmethod
    def open_or_make(path: Path, origin: RecordOrigin) -> RecordFile:
        """Open the file; make a new one where there is none, or one that cannot be used.

        Raises:
            CheckpointError: it cannot be made, or another process uses it for another origin.
        """
        if path.exists():
            try:
                return RecordFile(path, origin)
            except CheckpointError as exc:
                log.warning("%s; creating a new record file", exc)
        try:
            if path.exists():
                _remove(path)
            _make(path, origin)
        except OSError as exc:
            raise CheckpointError(f"record file {path} cannot be created: {exc}") from exc
        return RecordFile(path, origin)

    def _check(self) -> None:
        descriptor, layout = self._file.buffered, self._layout
        layout.check_header(os.pread(descriptor, PAGE_BYTES, 0))
        size = os.fstat(descriptor).st_size
        if size != layout.num_bytes:
            raise CheckpointError(f"truncated: {size} bytes, expected {layout.num_bytes}")
        self._read_marks()

    def _read_marks(self) -> None:
        origin = self._layout.origin
        table = os.pread(self._file.buffered, origin.num_records * MARK_BYTES, PAGE_BYTES)
        for number in range(origin.num_records):
            mark = table[number * MARK_BYTES : (number + 1) * MARK_BYTES]
            if mark != UNMARKED:
                self._take_mark(divmod(number, origin.num_experts), mark)

    def _take_mark(self, record: Record, mark: bytes) -> None:
        digest = self._layout.digest_in(mark, record)
        if digest is not None:
            self._complete[record] = digest
        else:
            layer, expert = record
            log.warning(
                "%s: layer %d expert %d has a corrupted completion mark", self.path, layer, expert
            )

    @property
    def num_complete(self) -> int:
        """Records that can be read."""
        return len(self._complete)

    def digest_of(self, record: Record) -> Digest | None:
        """Return the digest of a complete record, None of one that is still to be written."""
        known = self._complete.get(record)
        if known is None and not self.may_write:  # another process may have written it
            mark = os.pread(self._file.buffered, MARK_BYTES, self._layout.mark_offset(record))
            if mark != UNMARKED:
                self._take_mark(record, mark)
        return self._complete.get(record)

    def read(self, record: Record, into: torch.Tensor) -> Digest:
        """Read a record [record_bytes] into page-aligned memory; return the digest found.

        Raises:
            OSError: the disk cannot be read.
        """
        return self._reader.read(into.numpy(), self._layout.record_offset(record))

    def write(self, record: Record, data: torch.Tensor, digest: Digest) -> None:
        """Write an expert record; it counts as complete once it is on the disk.

        Raises:
            OSError: the disk is full or fails.
        """
        assert self.may_write, "one process writes a record file"
        self._file.write(data.numpy(), self._layout.record_offset(record))
        with self._lock:
            self._unmarked[record] = digest
            is_due = len(self._unmarked) >= FLUSH_RECORDS
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Sync all written records to the disk and mark them.

        Raises:
            OSError: the disk is full or fails; what was not marked stays unmarked.
        """
        with self._lock:
            written, self._unmarked = self._unmarked, {}
        if not written:
            return
        self._file.sync()
        for record, digest in written.items():
            mark = self._layout.mark(record, digest)
            os.pwrite(self._file.buffered, mark, self._layout.mark_offset(record))
            self._complete[record] = digest

    def close(self) -> None:
        """Mark what is written and close.

        Raises:
            OSError: the disk is full or fails.
        """
        try:
            self.flush()
        finally:
            self._reader.close()
            self._file.close()


def record_file_beside(checkpoint: Path, cache: Path | None = None) -> Path:
    """Path of a checkpoint's record file: its neighbour, or one of many in a cache folder."""
    if cache is None:
        return checkpoint.with_name(f"{checkpoint.name}.records")
    whose = hashlib.blake2b(str(checkpoint.resolve()).encode(), digest_size=4).hexdigest()
    return cache / f"{checkpoint.name}-{whose}.records"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make(path: Path, origin: RecordOrigin) -> None:
    """Create the file atomically with its header. Of two processes, one creates it."""
    layout = RecordFileLayout(origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(layout.header)
            file.truncate(layout.num_bytes)
            file.flush()
            os.fsync(file.fileno())
        path.hardlink_to(unfinished)
    except FileExistsError:
        log.info("%s: created by another process", path)
    finally:
        unfinished.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Remove a file that cannot be used, unless a process is using it."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        if not _try_lock(descriptor):
            raise CheckpointError(f"record file {path} is in use for another origin")
        path.unlink()
    finally:
        os.close(descriptor)
