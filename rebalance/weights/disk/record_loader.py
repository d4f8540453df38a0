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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from rebalance.types import Digest, Record
from rebalance.weights.disk.record_file import RecordFile
from rebalance.weights.disk.record_origin import RecordOrigin
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory.shared import PAGE_BYTES, SharedArena, digest

CLOSE_DEADLINE_S = 30.0  # to write one record to a busy disk, and the marks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A record that is in memory now."""

    digest: Digest
    is_repacked: bool = False  # else it came from the record file, or from another host
    is_from_host: bool = False


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
        self.num_damaged = 0  # records of the file, or repacked ones, that had another digest

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
            if self._is_read(record, into, expected):
                self._digests[record] = expected
                return Loaded(expected, is_repacked=False)
        found = self._repack(record, into)
        if expected is not None and found != expected and in_file is None:
            self.num_damaged += 1
            found = self._repack(record, into)  # memory or disk may have erred once
        if expected is not None and found != expected:
            raise CheckpointError(
                f"layer {record[0]} expert {record[1]}: the checkpoint's bytes have digest {found},"
                f" expected {expected} as in the first read"
            )
        self._digests[record] = found
        return Loaded(found, is_repacked=True)

    def digest_of(self, record: Record) -> Digest | None:
        """Return the digest that a record must have; None of one that was never seen."""
        return self._digests.get(record, self.file.digest_of(record) if self.file else None)

    def learn(self, record: Record, digest: Digest) -> None:
        """Set the digest of a record that came from another source."""
        self._digests[record] = digest

    def _is_read(self, record: Record, into: torch.Tensor, expected: Digest) -> bool:
        """Read from the record file; False when its bytes are not those that were written."""
        assert self.file is not None, "only called for a record in the file"
        layer, expert = record
        try:
            found = self.file.read(record, into)
            if found == expected:
                return True
            what = f"digest {found}, expected {expected}"
        except OSError as exc:
            what = str(exc)
        self.num_damaged += 1
        log.error(
            "%s: layer %d expert %d: %s; repacking from the checkpoint",
            self.file.path,
            layer,
            expert,
            what,
        )
        return False

    def _repack(self, record: Record, into: torch.Tensor) -> Digest:
        layer, expert = record
        self._checkpoint.repack(self._layer_ids[layer], expert, self._schema, into)
        return digest(into)

    def close(self) -> None:
        """Mark completed records and close the files. No thread may be loading."""
        if self.file is not None:
            try:
                self.file.close()
            except OSError as exc:
                log.error(
                    "record file %s: the last records were not saved: %s", self.file.path, exc
                )


@dataclass(frozen=True)
class Written:
    """An expert record that waits to be written; ``done`` releases its memory."""

    record: Record
    data: torch.Tensor
    digest: Digest
    done: Callable[[], None]


class WriteBehind:
    """Adds expert records to the file while ranks already use them.

    Ranks never wait for it: with ``room`` records waiting, a further one is left out.
    """

    def __init__(self, file: RecordFile, room: int) -> None:
        self._file = file
        self._queue: queue.Queue[Written | None] = queue.Queue(room)
        self._is_stopping = False
        self.num_skipped = 0
        self.is_failed = False
        self._thread = threading.Thread(target=self._run, name="preload-write", daemon=True)
        self._thread.start()

    def offer(self, written: Written) -> bool:
        """Queue a record; False when it is left out."""
        try:
            if self.is_failed:
                return False
            self._queue.put_nowait(written)
        except queue.Full:
            self.num_skipped += 1
            return False
        return True

    def _run(self) -> None:
        while (written := self._queue.get()) is not None:
            try:
                if not (self.is_failed or self._is_stopping):
                    self._file.write(written.record, written.data, written.digest)
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
                written.done()

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


def make_all(
    checkpoint: Checkpoint,
    model: ModelShape,
    schema: ExpertSchema,
    path: Path,
    *,
    num_threads: int = 2,
) -> int:
    """Repack every record that the file lacks; return how many.

    Raises:
        CheckpointError: a record cannot be repacked or written, or another process writes the file.
            What was complete stays.
    """
    loader = RecordLoader(checkpoint, model, schema)
    file = RecordFile.open_or_make(path, loader.origin)
    try:
        if not file.may_write:
            raise CheckpointError(f"record file {path} is being written by another process")
        everything = [
            (layer, expert)
            for layer in range(model.num_layers)
            for expert in range(model.num_experts)
        ]
        missing = [record for record in everything if file.digest_of(record) is None]
        shares = [missing[first::num_threads] for first in range(num_threads)]
        with ThreadPoolExecutor(num_threads) as pool:
            for made in [pool.submit(_make_some, loader, file, share) for share in shares]:
                made.result()
    except OSError as exc:
        raise CheckpointError(f"record file {path}: {exc}") from exc
    finally:
        loader.close()
        file.close()
    return len(missing)


def _make_some(loader: RecordLoader, file: RecordFile, records: list[Record]) -> None:
    scratch = SharedArena("eplb-repack", max(PAGE_BYTES, loader.origin.record_bytes)).bytes
    for record in records:
        file.write(record, scratch, loader.load(record, scratch).digest)
