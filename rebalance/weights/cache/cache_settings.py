"""Settings of a host cache: its size, and its record file on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from eplb.declared import Setting, check_fields

# Disks need several requests in flight, and each reader also digests: on a host of 64 cores four
# readers reached 72 % of the disk's bandwidth.
NUM_READERS = max(4, min(8, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class HostCacheSettings:
    """Settings of a host cache; memory is taken as records are asked for."""

    records: Annotated[
        int,
        Setting(
            "records in host memory, those used last; 0: all",
            unit="records",
            short="host_cache_records",
        ),
    ] = 0
    record_folder: Annotated[
        Path | None,
        Setting(
            "folder of the records that an engine's ranks offer, which hosts may share; none: in "
            "memory alone"
        ),
    ] = None
    record_file: Path | None = None  # None: every record is repacked from the checkpoint
    memory_folder: Path | None = None  # of a tmpfs with a size limit; None: only memory limits
    num_readers: int = NUM_READERS

    def __post_init__(self) -> None:
        check_fields(self)

    def num_entries(self, num_records: int) -> int:
        """Records of a model that the host cache has room for."""
        return min(num_records, self.records) if self.records else num_records
