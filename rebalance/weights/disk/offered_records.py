"""Records that an engine's ranks have offered, on disk: files in a folder that hosts may share.

The host cache of each host writes a file of its own, the first that no other process writes, and
reads the files of all. The origin names the bytes of every expert, so all files agree.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import asdict
from pathlib import Path

import torch

from eplb.errors import CheckpointError
from rebalance.types import Digest, Record
from rebalance.weights.disk.record_file import RecordFile, RecordOrigin
from rebalance.weights.disk.record_loader import Loaded

MAX_FILES = 256  # as many as a deployment may have hosts

log = logging.getLogger(__name__)


def short_name(origin: RecordOrigin) -> str:
    """A name of an origin, for files and addresses: two origins have two names."""
    return hashlib.blake2b(repr(asdict(origin)).encode(), digest_size=8).hexdigest()


class OfferedRecords:
    """The files of one origin, as one host sees them. Thread-safe.

    Args:
        origin: of the records.
        folder: of the files; None: no disk.

    Raises:
        CheckpointError: the folder or the file cannot be written.
    """

    def __init__(self, origin: RecordOrigin, folder: Path | None) -> None:
        self.origin, self._folder, self._lock = origin, folder, threading.Lock()
        self._files: list[RecordFile] = []  # by number
        self._own: RecordFile | None = None
        while folder is not None and self._own is None:
            if len(self._files) == MAX_FILES:
                raise CheckpointError(
                    f"{self._path(0)} and all others to number {MAX_FILES - 1} are written by "
                    "other processes"
                )
            file = RecordFile.open_or_make(self._path(len(self._files)), origin)
            self._files.append(file)
            self._own = file if file.may_write else None

    @property
    def num_damaged(self) -> int:
        """Records of a file that had another digest."""
        return sum(file.num_damaged for file in self._files)

    def _path(self, number: int) -> Path:
        assert self._folder is not None, "there is a disk"
        return self._folder / f"offered-{short_name(self.origin)}-{number:03d}.records"

    def _all(self) -> list[RecordFile]:
        """The files, with those that other hosts have made meanwhile."""
        with self._lock:
            while self._folder is not None and self._path(len(self._files)).exists():
                path = self._path(len(self._files))
                self._files.append(RecordFile(path, self.origin, only_reads=True))
            return list(self._files)

    def digest_of(self, record: Record) -> Digest | None:
        """Return the digest of a record that is in a file; None of one that is in none."""
        found = (file.digest_of(record) for file in self._all())
        return next((digest for digest in found if digest is not None), None)

    def load(self, record: Record, into: torch.Tensor) -> Loaded:
        """Fill ``into`` [record_bytes], page-aligned, from the first file that has right bytes.

        Raises:
            CheckpointError: no file has them.
        """
        for file in self._all():
            found = file.digest_of(record)
            if found is not None and file.is_read(record, into):
                return Loaded(found, "record_file")
        layer, expert = record
        raise CheckpointError(f"layer {layer} expert {expert} is in no record file of this host")

    def keep(self, record: Record, data: torch.Tensor, digest: Digest) -> bool:
        """Write an offered record, unless a file has it; return whether one will have it.

        Args:
            record: which.
            data: [record_bytes], page-aligned.
            digest: of the data.
        """
        if self.digest_of(record) is not None:
            return True
        if self._own is None:
            return False
        try:
            self._own.write(record, data, digest)
        except OSError as exc:
            self._give_up(exc)
            return False
        return True

    def flush(self) -> None:
        """Complete what was written."""
        try:
            if self._own is not None:
                self._own.flush()
        except OSError as exc:
            self._give_up(exc)

    def _give_up(self, exc: OSError) -> None:
        assert self._own is not None, "it was written"
        log.error("record file %s: no more records are written: %s", self._own.path, exc)
        self._own = None

    def close(self) -> None:
        """Close the files. No thread may be loading."""
        for file in self._files:
            file.close()
