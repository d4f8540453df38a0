"""File of expert records, from which the host cache loads at the disk's full speed.

A checkpoint stores an expert in several tensors; repacking assembles them through the page cache on
one core. A record file stores the repacked records, in kernel layout:

     page 0      header: magic, length and digest of a JSON text that names the origin
     pages       marks: 32 bytes for each record, zeros until it is complete
     pages       records, each at its place; what was never written is a hole

A record is marked after its bytes are on the disk, so a crash at any byte leaves it unmarked or
whole. A mark depends on the header, the index and the digest, so a torn mark is detected.

The origin of records is a checkpoint as it was on disk, and a kernel layout. Two files of records
are interchangeable exactly if their origins are equal.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from rebalance.types import Digest, Record
from rebalance.weights.disk.direct_io import DirectFile, ParallelReader
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import PAGE_BYTES, whole_pages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordOrigin:
    """All that decides the bytes of records; JSON-ready."""

    schema: str  # hex digest of names, shapes, types and parts
    checkpoint: str  # hex digest of the index and of every shard's name, size and time; or ""
    num_layers: int
    num_experts: int
    record_bytes: int

    @staticmethod
    def of(checkpoint: Checkpoint | None, model: ModelShape, schema: ExpertSchema) -> RecordOrigin:
        """Describe the records that ``checkpoint.repack`` gives; those of any where there is none.

        Raises:
            CheckpointError: a weight file is missing.
        """
        return RecordOrigin(
            schema=_schema_digest(schema),
            checkpoint="" if checkpoint is None else checkpoint.identity().digest,
            num_layers=model.num_layers,
            num_experts=model.num_experts,
            record_bytes=schema.record_bytes,
        )

    @property
    def num_records(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts

    def number_of(self, record: Record) -> int:
        """Place of a record among all, layer by layer.

        Raises:
            CheckpointError: the model has no such expert.
        """
        layer, expert = record
        if not (0 <= layer < self.num_layers and 0 <= expert < self.num_experts):
            raise CheckpointError(
                f"layer {layer} expert {expert} is not of this model, expected "
                f"layer 0..{self.num_layers - 1}, expert 0..{self.num_experts - 1}"
            )
        return layer * self.num_experts + expert

    def difference(self, found: Mapping[str, object]) -> str:
        """Return in what ``found`` differs, or nothing."""
        return ", ".join(
            f"{name} {found.get(name)!r}, expected {expected!r}"
            for name, expected in asdict(self).items()
            if found.get(name) != expected
        )


def _schema_digest(schema: ExpertSchema) -> str:
    rows = [(s.name, s.shape, str(s.dtype), s.parts) for s in schema.tensors]
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()


MAGIC = b"EPLBREC1"
VERSION = 2  # 1: digests that weighted a lane by its position, alike for some permutations
_PREFIX = struct.Struct("<8sI16s")  # magic, bytes of JSON, their digest
_MARK = struct.Struct("<qq16s")  # the two sums of a record, and what binds them
MARK_BYTES = _MARK.size
UNMARKED = bytes(MARK_BYTES)
FLUSH_RECORDS = 64  # unmarked written records; a crash costs repacking them again


class RecordFileLayout:
    """The layout of the file of one origin."""

    def __init__(self, origin: RecordOrigin) -> None:
        self.origin = origin
        self._text = json.dumps({"version": VERSION} | asdict(origin), sort_keys=True).encode()
        self._marks_end = PAGE_BYTES + whole_pages(origin.num_records * MARK_BYTES)

    @property
    def header(self) -> bytes:
        """The header of the file."""
        digest = hashlib.blake2b(self._text, digest_size=16).digest()
        return _PREFIX.pack(MAGIC, len(self._text), digest) + self._text

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._marks_end + self.origin.num_records * self.origin.record_bytes

    def check_header(self, page: bytes) -> None:
        """Refuse a file by its first page.

        Raises:
            CheckpointError: it is damaged or truncated, or has another origin.
        """
        found = _read_header(page)
        if found == json.loads(self._text):
            return
        version = found.get("version")
        different = f"version {version}, expected {VERSION}"
        if version == VERSION:
            different = self.origin.difference(found)
        raise CheckpointError(f"record origin differs: {different}")

    def mark(self, record: Record, digest: Digest) -> bytes:
        """The mark of a complete record."""
        binding = hashlib.blake2b(self._text, digest_size=16)
        binding.update(repr((record, digest)).encode())
        return _MARK.pack(*digest, binding.digest())

    def digest_in(self, mark: bytes, record: Record) -> Digest | None:
        """The digest that a mark names; None where it is no mark of this record."""
        plain, weighted, _ = _MARK.unpack(mark)
        return (plain, weighted) if mark == self.mark(record, (plain, weighted)) else None

    def mark_offset(self, record: Record) -> int:
        """Where a record's mark is."""
        return PAGE_BYTES + self.origin.number_of(record) * MARK_BYTES

    def record_offset(self, record: Record) -> int:
        """Where a record begins, on a page's boundary."""
        return self._marks_end + self.origin.number_of(record) * self.origin.record_bytes


def _read_header(page: bytes) -> Mapping[str, object]:
    if len(page) < PAGE_BYTES:
        raise CheckpointError(f"truncated: {len(page)} bytes, expected a header")
    magic, length, digest = _PREFIX.unpack_from(page)
    text = page[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or digest != hashlib.blake2b(text, digest_size=16).digest():
        raise CheckpointError("corrupted header")
    try:
        header: dict[str, object] = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError("corrupted header") from exc
    if not isinstance(header, dict):
        raise CheckpointError("corrupted header")
    return header


class RecordFile:
    """One open record file. Any number of processes read it; the first to come also writes.

    Args:
        path: of the file.
        origin: of its records.
        only_reads: leave it to others to write; else nobody could while this process lives.

    Raises:
        CheckpointError: the file is damaged or truncated, or has another origin.
    """

    def __init__(self, path: Path, origin: RecordOrigin, *, only_reads: bool = False) -> None:
        self.path, self._layout = path, RecordFileLayout(origin)
        self._lock = threading.Lock()
        self._unmarked: dict[Record, Digest] = {}  # written, not known to be on the disk
        self._complete: dict[Record, Digest] = {}
        self.num_damaged = 0  # records that were read with another digest, or not at all
        try:
            self._file = DirectFile(path, os.O_RDONLY if only_reads else os.O_RDWR)
        except OSError as exc:
            raise CheckpointError(f"record file {path} cannot be opened: {exc}") from exc
        self._reader = ParallelReader(self._file, str(path))
        try:
            self.may_write = not only_reads and _try_lock(self._file.buffered)
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

    def is_read(self, record: Record, into: torch.Tensor) -> bool:
        """Read a complete record; False, and logged, where the file has other bytes, or none."""
        expected = self.digest_of(record)
        try:
            found = self.read(record, into)
            if found == expected:
                return True
            what = f"digest {found}, expected {expected}"
        except OSError as exc:
            what = str(exc)
        self.num_damaged += 1
        log.error("%s: layer %d expert %d: %s", self.path, *record, what)
        return False

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
        """Mark what is written and close; an error is logged."""
        try:
            self.flush()
        except OSError as exc:
            log.error("record file %s: the last records were not saved: %s", self.path, exc)
        finally:
            self._reader.close()
            self._file.close()


def record_file_beside(checkpoint: Path) -> Path:
    """Path of a checkpoint's record file, its neighbour."""
    return checkpoint.with_name(f"{checkpoint.name}.records")


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
