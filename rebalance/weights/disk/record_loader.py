"""Bring one expert's record from disk into memory: from the record file, else repacked.

What is repacked is added to the record file. A record's digest is known from when it first came,
and what comes later must digest to the same; bytes of the record file that do not are repacked
again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from rebalance.types import Digest, Record
from rebalance.weights.disk.record_file import RecordFile, RecordOrigin
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import digest

CLOSE_DEADLINE_S = 30.0  # to write one record to a busy disk, and the marks

_Waiting = tuple[Record, torch.Tensor, Digest, Callable[[], None]]

log = logging.getLogger(__name__)


LoadedFrom = Literal["checkpoint", "record_file", "offered"]


@dataclass(frozen=True)
class Loaded:
    """A record that is in memory now, and what it came from."""

    digest: Digest
    source: LoadedFrom


class RecordLoader:
    """Reads records of one checkpoint. Any thread may call ``load``."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ModelShape,
        schema: ExpertSchema,
        record_file: Path | None = None,
    ) -> None:
        self._checkpoint, self._schema = checkpoint, schema
        self._layer_ids = model.layer_ids  # a record's layer counts MoE layers, a checkpoint's all
        self.origin = RecordOrigin.of(checkpoint, model, schema)
        self._digests: dict[Record, Digest] = {}
        self.file = self._open(record_file)
        self._num_damaged = 0

    def _open(self, path: Path | None) -> RecordFile | None:
        if path is None:
            return None
        try:
            file = RecordFile.open_or_make(path, self.origin)
        except CheckpointError as exc:
            log.error("preload continues without a record file: %s", exc)
            return None
        log.info(
            "record file %s: %d of %d records, %s",
            path,
            file.num_complete,
            self.origin.num_records,
            "repacked records are appended"
            if file.may_write
            else "read-only: another process writes it",
        )
        return file

    def load(self, record: Record, into: torch.Tensor) -> Loaded:
        """Fill ``into`` [record_bytes], page-aligned.

        Raises:
            CheckpointError: a weight file is damaged or truncated, or other bytes are on the disk
                than before.
        """
        expected = self._digests.get(record)
        in_file = self.file.digest_of(record) if self.file is not None else None
        if in_file is not None and expected in (None, in_file):
            expected = in_file
            if self.file is not None and self.file.is_read(record, into):
                self._digests[record] = expected
                return Loaded(expected, "record_file")
            log.warning("layer %d expert %d is repacked from the checkpoint", *record)
        found = self._repack(record, into)
        if expected is not None and found != expected and in_file is None:
            self._num_damaged += 1
            found = self._repack(record, into)  # memory or disk may have erred once
        if expected is not None and found != expected:
            raise CheckpointError(
                f"layer {record[0]} expert {record[1]}: the checkpoint's bytes have digest {found},"
                f" expected {expected} as in the first read"
            )
        self._digests[record] = found
        return Loaded(found, "checkpoint")

    @property
    def num_damaged(self) -> int:
        """Records of the file, or repacked ones, that had another digest."""
        return self._num_damaged + (self.file.num_damaged if self.file is not None else 0)

    def digest_of(self, record: Record) -> Digest | None:
        """Return the digest that a record must have; None of one that was never seen."""
        return self._digests.get(record, self.file.digest_of(record) if self.file else None)

    def _repack(self, record: Record, into: torch.Tensor) -> Digest:
        layer, expert = record
        self._checkpoint.repack(self._layer_ids[layer], expert, self._schema, into)
        return digest(into)

    def close(self) -> None:
        """Mark completed records and close the files. No thread may be loading."""
        if self.file is not None:
            self.file.close()


class WriteBehind:
    """Adds expert records to the file while ranks already use them.

    Ranks never wait for it: with ``room`` records waiting, a further one is left out.
    """

    def __init__(self, file: RecordFile, room: int) -> None:
        self._file = file
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(room)
        self._is_stopping = False
        self.num_skipped = 0
        self.is_failed = False
        self._thread = threading.Thread(target=self._run, name="preload-write", daemon=True)
        self._thread.start()

    def offer(
        self, record: Record, data: torch.Tensor, digest: Digest, done: Callable[[], None]
    ) -> None:
        """Queue a record, or leave it out; ``done`` releases its memory, on any thread."""
        try:
            if not self.is_failed:
                self._queue.put_nowait((record, data, digest, done))
                return
        except queue.Full:
            self.num_skipped += 1
        done()

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            record, data, digest, done = waiting
            try:
                if not (self.is_failed or self._is_stopping):
                    self._file.write(record, data, digest)
                    if self._queue.empty():
                        self._file.flush()
            except OSError as exc:
                self.is_failed = True
                log.error(
                    "record file %s: write failed, no more records are appended: %s",
                    self._file.path,
                    exc,
                )
            finally:
                done()

    def close(self) -> None:
        """Finish the record that is being written; those behind it are left out."""
        self._is_stopping = True
        try:
            self._queue.put(None, timeout=CLOSE_DEADLINE_S)
        except queue.Full:
            log.error("record file %s: the disk does not respond", self._file.path)
            return
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            log.error("record file %s: the disk does not respond", self._file.path)
