"""Origin of expert records: a checkpoint as it was on disk, and a kernel layout.

Two files of records are interchangeable exactly if their origins are equal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from rebalance.transport.interface import Record
from runtime.checkpoint import INDEX_FILE, Checkpoint
from runtime.experts import ExpertSchema


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
            checkpoint="" if checkpoint is None else _checkpoint_digest(checkpoint.path),
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


class ShardGuard:
    """Sees a weight file that was cut short under a reader.

    Readers map the shards, and the system answers a read past the end of a mapped file with a
    signal that kills the process.
    """

    def __init__(self, folder: Path) -> None:
        self._sizes: dict[Path, tuple[int, int]] = {}  # descriptor and size
        for path in _shards(folder):
            descriptor = os.open(path, os.O_RDONLY)
            self._sizes[path] = descriptor, os.fstat(descriptor).st_size

    def check(self) -> None:
        """Refuse a checkpoint of which a file has shrunk.

        Raises:
            CheckpointError: it has.
        """
        for path, (descriptor, size) in self._sizes.items():
            found = os.fstat(descriptor).st_size
            if found < size:
                raise CheckpointError(
                    f"weight file {path} is truncated: {found} bytes, expected {size}"
                )

    def close(self) -> None:
        """Close the files."""
        for descriptor, _ in self._sizes.values():
            os.close(descriptor)


def _shards(folder: Path) -> list[Path]:
    shard_of = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return [folder / name for name in sorted(set(shard_of.values()))]


def _schema_digest(schema: ExpertSchema) -> str:
    rows = [(s.name, s.shape, str(s.dtype), s.parts) for s in schema.tensors]
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()


def _checkpoint_digest(folder: Path) -> str:
    digest = hashlib.blake2b((folder / INDEX_FILE).read_bytes(), digest_size=16)
    for path in _shards(folder):
        try:
            found = path.stat()
        except OSError as exc:
            raise CheckpointError(f"weight file {path} cannot be read: {exc}") from exc
        digest.update(repr((path.name, found.st_size, found.st_mtime_ns)).encode())
    return digest.hexdigest()
