"""Limits of staging: bandwidth and deadlines; equal on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from eplb.declared import Setting, check_fields

MIB = 1 << 20
# A byte that moves passes device memory three times: read at its source, written here, and read for
# its digest. Decode is bound by that memory. On 4 x H200 the slowest 1 % of steps were 0.2 to 0.4 %
# longer at this budget, and 1.05 % at 20 GB/s (benchmarks/reports/2026-11-20-migrate.md).
SERVING_BYTES_PER_SECOND = 6e9
BURST_CHUNKS = 2  # the host wakes late: so much may be made up for at once


@dataclass(frozen=True)
class LinkBudget:
    """One kind of link of one rank."""

    chunk_bytes: int
    bytes_per_second: float = math.inf


@dataclass(frozen=True)
class StageSettings:
    """Limits of staging.

    Without a budget chunks are large, because the host needs about 25 us to order one, as long as a
    fast link needs for 8 MB. While serving they are small, because serving waits behind one that is
    under way: on 4 x H200, 8 MB from a peer in every layer's time made the slowest of them 0.3 %
    slower, 8 MB from the host 7.4 %.
    """

    peer: LinkBudget = LinkBudget(64 * MIB)
    host: LinkBudget = LinkBudget(8 * MIB)
    in_flight: int = 8  # chunks of a kind of link that are ordered and have not landed
    preload_records: int = 8  # asked of the host at a time
    preload_deadline_s: float = 120.0
    pull_deadline_s: float = 30.0  # for one chunk, or for the copies of a swap
    pause_deadline_s: float = 5.0  # for an engine's hold that is not taken back

    @staticmethod
    def while_serving(bytes_per_second: float = SERVING_BYTES_PER_SECOND) -> StageSettings:
        """For GPUs: as fast as serving was measured not to notice."""
        return StageSettings(
            peer=LinkBudget(8 * MIB, bytes_per_second),
            host=LinkBudget(2 * MIB, bytes_per_second),
        )


@dataclass(frozen=True)
class StageBudgets:
    """What staging may take of links; None: what the device allows.

    Chunks, numbers in flight and deadlines are constants of ``StageSettings``: they follow from the
    time that ordering a chunk takes, which was measured.
    """

    local_bytes_per_second: Annotated[
        float | None,
        Setting(
            "budget of each link within the host; 0: 6e9 on GPUs, no limit on CPUs",
            unit="bytes/s",
            at_most=10**15,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)

    def on(self, device_type: str) -> StageSettings:
        """The limits of staging on "cuda" or "cpu"."""
        made = StageSettings.while_serving() if device_type == "cuda" else StageSettings()
        if (local := self.local_bytes_per_second) is not None:
            peer = replace(made.peer, bytes_per_second=local)
            made = replace(made, peer=peer, host=replace(made.host, bytes_per_second=local))
        return made
