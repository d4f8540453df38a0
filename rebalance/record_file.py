"""Cooked records on disk: what the slab can take in at the disk's full speed.

A checkpoint keeps an expert in pieces; cooking puts them together, through the page cache and one
core. A record file keeps what was cooked, page-aligned and in kernel layout, beside a manifest.

     page 0      header: magic, length and digest of a JSON text that names the origin
     pages       marks: 32 bytes for each record, zeros until it is complete
     pages       records, each at its place; what was never written is a hole

A record is marked after its bytes are on the disk, so a crash at any byte leaves it unmarked or
whole. A mark is bound to the header, to its place and to the digest, so a torn one is no mark.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from eplb.errors import CheckpointError
from rebalance.direct_io import CHUNK_BYTES, DirectFile
from rebalance.record_origin import RecordOrigin
from rebalance.slab_wire import Digest
from rebalance.transport import Record
from runtime.memory import PAGE_BYTES, RunningDigest

MAGIC = b"EPLBREC1"
VERSION = 1
_PREFIX = struct.Struct("<8sI16s")  # magic, bytes of JSON, their digest
_MARK = struct.Struct("<qq16s")  # the two sums of a record, and what binds them
UNMARKED = bytes(_MARK.size)
FLUSH_RECORDS = 64  # written records whose marks may wait; a crash costs cooking them again

log = logging.getLogger(__name__)


class RecordFile:
    """One open record file. Any number of processes read it; the first to come also writes.

    Raises:
        CheckpointError: the file is damaged or truncated, or has another origin.
    """

    def __init__(self, path: Path, origin: RecordOrigin) -> None:
        self.path, self._origin = path, origin
        self._text = _header_text(origin)
        self._marks_end = PAGE_BYTES + _whole_pages(origin.num_records * _MARK.size)
        self._lock = threading.Lock()
        self._unmarked: dict[Record, Digest] = {}  # written, not known to be on the disk
        self._complete: dict[Record, Digest] = {}
        try:
            self._file = DirectFile(path, os.O_RDWR)
        except OSError as exc:
            raise CheckpointError(f"record file {path} cannot be opened: {exc}") from exc
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
                log.warning("%s; it is made anew", exc)
        try:
            if path.exists():
                _remove(path)
            _make(path, origin)
        except OSError as exc:
            raise CheckpointError(f"record file {path} cannot be made: {exc}") from exc
        return RecordFile(path, origin)

    def _check(self) -> None:
        descriptor = self._file.buffered
        found = _read_header(os.pread(descriptor, PAGE_BYTES, 0))
        if found != json.loads(self._text):
            version = found.get("version")
            different = f"version {version}, expected {VERSION}"
            if version == VERSION:
                different = self._origin.difference(found)
            raise CheckpointError(f"it holds records of something else: {different}")
        size, expected = os.fstat(descriptor).st_size, _file_bytes(self._origin)
        if size != expected:
            raise CheckpointError(f"it is truncated: {size} bytes, expected {expected}")
        self._read_marks()

    def _read_marks(self) -> None:
        origin = self._origin
        table = os.pread(self._file.buffered, origin.num_records * _MARK.size, PAGE_BYTES)
        for number in range(origin.num_records):
            mark = table[number * _MARK.size : (number + 1) * _MARK.size]
            if mark != UNMARKED:
                self._take_mark(divmod(number, origin.num_experts), mark)

    def _take_mark(self, record: Record, mark: bytes) -> None:
        plain, weighted, _ = _MARK.unpack(mark)
        if mark == self._mark(record, (plain, weighted)):
            self._complete[record] = (plain, weighted)
        else:
            layer, expert = record
            log.warning("%s: layer %d expert %d has a damaged mark", self.path, layer, expert)

    def _mark(self, record: Record, digest: Digest) -> bytes:
        binding = hashlib.blake2b(self._text, digest_size=16)
        binding.update(repr((record, digest)).encode())
        return _MARK.pack(*digest, binding.digest())

    @property
    def num_complete(self) -> int:
        """Records that can be read."""
        return len(self._complete)

    def digest_of(self, record: Record) -> Digest | None:
        """Return the digest of a complete record, None of one that is still to be written."""
        known = self._complete.get(record)
        if known is None and not self.may_write:  # perhaps another process has written it by now
            mark = os.pread(self._file.buffered, _MARK.size, self._mark_offset(record))
            if mark != UNMARKED:
                self._take_mark(record, mark)
        return self._complete.get(record)

    def read(self, record: Record, into: torch.Tensor) -> Digest:
        """Read a record [record_bytes] into page-aligned memory; return the digest found.

        Raises:
            OSError: the disk cannot be read.
        """
        data, running = into.numpy(), RunningDigest()
        start = self._record_offset(record)
        for done in range(0, len(data), CHUNK_BYTES):
            chunk = data[done : done + CHUNK_BYTES]
            self._file.read_into(chunk, start + done)
            running.add(chunk)
        return running.value

    def write(self, record: Record, data: torch.Tensor, digest: Digest) -> None:
        """Write a cooked record; it counts as complete once it is on the disk.

        Raises:
            OSError: the disk is full or fails.
        """
        assert self.may_write, "one process writes a record file"
        self._file.write(data.numpy(), self._record_offset(record))
        with self._lock:
            self._unmarked[record] = digest
            is_due = len(self._unmarked) >= FLUSH_RECORDS
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Have everything written so far on the disk, and mark it.

        Raises:
            OSError: the disk is full or fails; what was not marked stays unmarked.
        """
        with self._lock:
            written, self._unmarked = self._unmarked, {}
        if not written:
            return
        self._file.sync()
        for record, digest in written.items():
            mark = self._mark(record, digest)
            os.pwrite(self._file.buffered, mark, self._mark_offset(record))
            self._complete[record] = digest

    def forget(self, record: Record) -> None:
        """Take back the mark of a record whose bytes are not what it says."""
        self._complete.pop(record, None)
        if self.may_write:
            os.pwrite(self._file.buffered, UNMARKED, self._mark_offset(record))

    def _mark_offset(self, record: Record) -> int:
        return PAGE_BYTES + self._origin.number_of(record) * _MARK.size

    def _record_offset(self, record: Record) -> int:
        return self._marks_end + self._origin.number_of(record) * self._origin.record_bytes

    def close(self) -> None:
        """Mark what is written and close.

        Raises:
            OSError: the disk is full or fails.
        """
        try:
            self.flush()
        finally:
            self._file.close()


def record_file_beside(checkpoint: Path, cache: Path | None = None) -> Path:
    """Path of a checkpoint's record file: its neighbour, or one of many in a cache folder."""
    if cache is None:
        return checkpoint.with_name(f"{checkpoint.name}.records")
    whose = hashlib.blake2b(str(checkpoint.resolve()).encode(), digest_size=4).hexdigest()
    return cache / f"{checkpoint.name}-{whose}.records"


def _header_text(origin: RecordOrigin) -> bytes:
    return json.dumps({"version": VERSION} | asdict(origin), sort_keys=True).encode()


def _read_header(page: bytes) -> Mapping[str, object]:
    if len(page) < PAGE_BYTES:
        raise CheckpointError(f"it is truncated: {len(page)} bytes, expected a header")
    magic, length, digest = _PREFIX.unpack_from(page)
    text = page[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or digest != hashlib.blake2b(text, digest_size=16).digest():
        raise CheckpointError("its header is damaged")
    header: dict[str, object] = json.loads(text)
    return header


def _file_bytes(origin: RecordOrigin) -> int:
    marks = _whole_pages(origin.num_records * _MARK.size)
    return PAGE_BYTES + marks + origin.num_records * origin.record_bytes


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make(path: Path, origin: RecordOrigin) -> None:
    """Let the file appear with its header whole. Of two makers at once, one's appears."""
    text = _header_text(origin)
    digest = hashlib.blake2b(text, digest_size=16).digest()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(_PREFIX.pack(MAGIC, len(text), digest) + text)
            file.truncate(_file_bytes(origin))
            file.flush()
            os.fsync(file.fileno())
        path.hardlink_to(unfinished)
    except FileExistsError:
        log.info("%s: another process has just made it", path)
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
