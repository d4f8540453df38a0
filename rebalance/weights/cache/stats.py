"""Statistics of a host cache. Counters only grow; the last three are current values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostCacheStats:
    """Counted in records unless the name says bytes."""

    hits: int  # asked for, and here or on the way
    misses: int
    waits: int  # requests that found no room at once
    refusals: int  # requests that were refused, late or withdrawn
    evictions: int
    hints_dropped: int
    bytes_from_checkpoint: int
    bytes_from_record_file: int
    bytes_from_other_hosts: int
    bytes_to_other_hosts: int
    host_failures: int  # other hosts that were late, dead or wrong
    damaged: int  # read with another digest than before
    not_written: int  # repacked, but not added to the record file: its disk was too slow
    resident_bytes: int
    leased_bytes: int
    room_bytes: int
