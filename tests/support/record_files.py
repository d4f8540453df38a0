"""Record files that are complete before anything serves of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from rebalance.types import Record
from rebalance.weights.disk.record_file import RecordFile
from rebalance.weights.disk.record_loader import RecordLoader
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import PAGE_BYTES, SharedArena


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
        file.flush()
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
