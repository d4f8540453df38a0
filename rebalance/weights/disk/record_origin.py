"""Origin of expert records: a checkpoint as it was on disk, and a kernel layout.

Two files of records are interchangeable exactly if their origins are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from rebalance.types import Record
from runtime.checkpoints.checkpoint import Checkpoint
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
