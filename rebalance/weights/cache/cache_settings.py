"""Settings of a host cache: its size, and its record file on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from eplb.errors import ConfigError
from rebalance.weights.link.host_link_settings import HostLinkSettings

Mode = Literal["full", "hot", "ring"]
# Disks need several requests in flight, and each reader also digests: on a host of 64 cores four
# readers reached 72 % of the disk's bandwidth.
NUM_READERS = max(4, min(8, (os.cpu_count() or 1) // 2))
RING_RECORDS = 64


@dataclass(frozen=True)
class HostCacheSettings:
    """Settings of a host cache.

    ``full`` has room for every expert, and takes memory as they are asked for; ``hot`` keeps those
    used last within ``budget_bytes``; ``ring`` has ``ring_records`` buffers and no more.
    """

    mode: Mode = "full"
    budget_bytes: int | None = None  # of hot
    ring_records: int | None = None  # of ring; None for RING_RECORDS
    record_file: Path | None = None  # None: every record is repacked from the checkpoint
    memory_folder: Path | None = None  # of a tmpfs with a size limit; None: only memory limits
    num_readers: int = NUM_READERS
    links: HostLinkSettings | None = None  # None: this host and its disk, and no other host

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"host cache mode {self.mode!r}, expected one of {', '.join(get_args(Mode))}"
            )
        if (self.mode == "hot") != (self.budget_bytes is not None):
            raise ConfigError(
                f"host cache mode {self.mode} with budget_bytes {self.budget_bytes}, "
                "expected a budget with hot and none else"
            )
        if self.mode != "ring" and self.ring_records is not None:
            raise ConfigError(f"host cache mode {self.mode} has no ring_records, only ring has")
        if self.num_readers < 1 or (self.ring_records is not None and self.ring_records < 1):
            raise ConfigError(
                f"{self.num_readers} readers and {self.ring_records} ring_records, "
                "expected at least 1 of each"
            )

    def num_entries(self, num_records: int, record_bytes: int) -> int:
        """Records that the host cache has room for.

        Raises:
            ConfigError: not even one.
        """
        if self.mode == "full":
            return num_records
        if self.mode == "ring":
            return min(num_records, self.ring_records or RING_RECORDS)
        assert self.budget_bytes is not None, "hot has a budget"
        if self.budget_bytes < record_bytes:
            raise ConfigError(
                f"a host cache of {self.budget_bytes} bytes, expected room for one record at "
                "least, "
                f"{record_bytes} bytes"
            )
        return min(num_records, self.budget_bytes // record_bytes)
