"""Phase one, preload, measured: disk -> host memory against plain reads of the same file.

    python -m benchmarks.migration.preload FOLDER [--records 24] [--runs 5] [--readers 4]

Writes a checkpoint of DeepSeek-V3's experts (7168 x 2048, FP8: 44 MB) and its record file under
FOLDER, 2.2 GB with 24 records, and removes both. Every run reads cold: past the page cache, which
is dropped before. The plain reads and the preload take turns, so that a drifting disk meets all.
Prints one table. Seeded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from eplb.core.model import ModelShape
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import NUM_READERS, HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from runtime.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from runtime.checkpoints.model_config import CONFIG_FILE
from runtime.checkpoints.own_model import expert_name, own_config
from runtime.experts import ExpertSchema
from runtime.memory import SharedArena, digest
from tests.support.record_files import make_all

HIDDEN, INTERMEDIATE = 7168, 2048
DEADLINE_S = 600.0
DD_BLOCK = "16M"

NUM_FILLS = (
    2  # of a host cache that is to be measured in use: the first finds memory, and is not timed
)

Row = tuple[str, str, str]


def write_experts(folder: Path, model: ModelShape, schema: ExpertSchema) -> None:
    """One layer of random experts, one shard: nothing else of a model is needed here."""
    generator = torch.Generator().manual_seed(7)
    shard = {}
    for expert in range(model.num_experts):
        for spec in schema.tensors:
            shape = schema.part_shape(spec)
            for part in spec.parts:
                size = spec.num_bytes // len(spec.parts)
                raw = torch.randint(0, 100, (size,), generator=generator, dtype=torch.uint8)
                shard[f"{expert_name(0, expert)}.{part}"] = raw.view(spec.dtype).view(shape)
    folder.mkdir(parents=True)
    save_file(shard, folder / "experts.safetensors")
    names = ", ".join(f'"{name}": "experts.safetensors"' for name in shard)
    (folder / INDEX_FILE).write_text('{"weight_map": {' + names + "}}")
    (folder / CONFIG_FILE).write_text(json.dumps(own_config(model)))


def drop_cache(path: Path) -> None:
    """Have the kernel forget a file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def seconds(run: Callable[[], object]) -> float:
    """Wall time of a call."""
    started = time.monotonic()
    run()
    return time.monotonic() - started


def read_with_dd(path: Path) -> float:
    command = ["dd", f"if={path}", "of=/dev/null", f"bs={DD_BLOCK}", "iflag=direct"]
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True))


@dataclass(frozen=True)
class Cache:
    """What is preloaded, and into how many entries: fewer than records means used ones."""

    weights: Path
    model: ModelShape
    schema: ExpertSchema
    record_file: Path | None
    num_entries: int
    num_readers: int

    def rate(self) -> float:
        """GB/s that a rank sees that asks for a host cache's fill at a time.

        With fewer entries than records the first fill is not timed: it is the system that finds
        memory then. The rest goes into entries that held other records.
        """
        address = HostCacheAddress(f"bench-{os.getpid()}", os.urandom(16))
        settings = HostCacheSettings(
            self.num_entries, record_file=self.record_file, num_readers=self.num_readers
        )
        size, num_experts = self.schema.record_bytes, self.model.num_experts
        checkpoint = Checkpoint(self.weights)  # anew: mapped pages cannot be dropped
        taken_s, num_timed = 0.0, 0
        with (
            closing(
                HostCacheServer.of_checkpoint(
                    address, checkpoint, self.model, self.schema, settings
                )
            ),
            closing(HostCacheClient(address, num_experts, size, deadline_s=DEADLINE_S)) as reader,
        ):
            for first in range(0, num_experts, self.num_entries):
                fill = [(0, e) for e in range(first, min(first + self.num_entries, num_experts))]
                fill_s = seconds(partial(reader.load, fill, deadline_s=DEADLINE_S))
                if first or self.num_entries == num_experts:
                    taken_s, num_timed = taken_s + fill_s, num_timed + len(fill)
                reader.release(fill)
        return num_timed * size / taken_s / 1e9


def measure(
    folder: Path, *, num_records: int = 24, num_runs: int = 5, num_readers: int = NUM_READERS
) -> list[Row]:
    """Rows (what, GB/s, share of dd) of a scratch folder's disk; leaves nothing behind."""
    scratch = Path(tempfile.mkdtemp(prefix="preload-", dir=folder))
    try:
        return _measure(scratch, num_records, num_runs, num_readers)
    finally:
        shutil.rmtree(scratch)


def _measure(scratch: Path, num_records: int, num_runs: int, num_readers: int) -> list[Row]:
    schema = ExpertSchema.swiglu_fp8(HIDDEN, INTERMEDIATE)
    model = ModelShape((0,), num_records, 8, hidden=HIDDEN, intermediate=INTERMEDIATE)
    weights, records = scratch / "weights", scratch / "records"
    shard = weights / "experts.safetensors"
    write_experts(weights, model, schema)
    total_gb = num_records * schema.record_bytes / 1e9
    making_s = seconds(lambda: make_all(Checkpoint(weights), model, schema, records))
    host_cache = partial(Cache, weights, model, schema, num_readers=num_readers)
    ways: dict[str, Callable[[], float]] = {
        f"dd iflag=direct bs={DD_BLOCK}": lambda: total_gb / read_with_dd(records),
        "preload from the record file": host_cache(
            record_file=records, num_entries=num_records // NUM_FILLS
        ).rate,
        "  the same into memory never used before": host_cache(
            record_file=records, num_entries=num_records
        ).rate,
        "preload by repacking": host_cache(
            record_file=None, num_entries=num_records // NUM_FILLS
        ).rate,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_runs):
        for name, way in ways.items():
            gc.collect()  # pages that a closed host cache still maps cannot be dropped
            drop_cache(records)
            drop_cache(shard)
            rates[name].append(way())
    plain = median(next(iter(rates.values())))
    return [
        *((name, _spread(found), f"{median(found) / plain:.0%}") for name, found in rates.items()),
        ("make_all: repack and write", f"{total_gb / making_s:.2f}", ""),
        ("digest of a record, one core", f"{_digest_rate(schema):.2f}", ""),
    ]


def _spread(rates: list[float]) -> str:
    return f"{median(rates):.2f} ({min(rates):.2f}..{max(rates):.2f})"


def _digest_rate(schema: ExpertSchema) -> float:
    record = SharedArena("bench", schema.record_bytes).bytes.fill_(3)
    return schema.record_bytes / median(seconds(lambda: digest(record)) for _ in range(5)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(tempfile.gettempdir()))
    parser.add_argument("--records", type=int, default=24)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--readers", type=int, default=NUM_READERS)
    given = parser.parse_args()
    print(f"{'disk -> host, 44 MB records, cold cache':44} {'GB/s (range)':>20} {'of dd':>6}")
    wanted = {"num_records": given.records, "num_runs": given.runs, "num_readers": given.readers}
    for what, rate, share in measure(given.folder, **wanted):
        print(f"{what:44} {rate:>20} {share:>6}")


if __name__ == "__main__":
    main()
