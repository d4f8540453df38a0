"""Settings of a host cache: its size, and its record file on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from eplb.declared import Setting, check_fields
from eplb.errors import UnfitSetting
from rebalance.weights.link.link_settings import HostLinkSettings

Mode = Literal["full", "hot", "ring"]
# Disks need several requests in flight, and each reader also digests: on a host of 64 cores four
# readers reached 72 % of the disk's bandwidth.
NUM_READERS = max(4, min(8, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class HostCacheSettings:
    """Settings of a host cache.

    ``full`` has room for every expert, and takes memory as they are asked for; ``hot`` keeps those
    used last, ``records`` of them; ``ring`` has ``records`` buffers and no more.

    Raises:
        ConfigError: a number of records with full, or none with hot or ring.
    """

    mode: Annotated[
        Mode,
        Setting(
            "records in host memory: all, those used last, or a small ring", short="host_cache_mode"
        ),
    ] = "full"
    records: Annotated[
        int,
        Setting(
            "capacity with hot or ring; 0 with full", unit="records", short="host_cache_records"
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
    links: HostLinkSettings | None = None  # None: this host and its disk, and no other host

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.mode == "full") != (self.records == 0):
            expected = "a number of records with hot or ring, and none with full"
            raise UnfitSetting("records", self.records, expected)

    def num_entries(self, num_records: int) -> int:
        """Records of a model that the host cache has room for."""
        return min(num_records, self.records) if self.records else num_records
