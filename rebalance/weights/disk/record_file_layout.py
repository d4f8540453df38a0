"""Layout of a file of expert records.

     page 0      header: magic, length and digest of a JSON text that names the origin
     pages       marks: 32 bytes for each record, zeros until it is complete
     pages       records, each at its place; what was never written is a hole

A mark depends on the header, the index and the digest, so a torn mark is detected.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict

from eplb.errors import CheckpointError
from rebalance.types import Digest, Record
from rebalance.weights.disk.record_origin import RecordOrigin
from runtime.memory.shared import PAGE_BYTES, whole_pages

MAGIC = b"EPLBREC1"
VERSION = 1
_PREFIX = struct.Struct("<8sI16s")  # magic, bytes of JSON, their digest
_MARK = struct.Struct("<qq16s")  # the two sums of a record, and what binds them
MARK_BYTES = _MARK.size
UNMARKED = bytes(MARK_BYTES)


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
