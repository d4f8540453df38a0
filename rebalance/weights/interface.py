"""Interface between the agent and the transports: pull bytes.

Pulls are one-sided: the receiver reads, or requests within a deadline, and the serving side takes
no part, so a busy or dying source can never block a receiver (two-sided transfers cause hangs
elsewhere: pytorch issue 174288, sglang issue 7956).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eplb.migration.build import Source
from rebalance.threads.cancellation import IsWanted, always
from rebalance.types import Record
from runtime.streams import Completion

NO_RANK = -1


@dataclass(frozen=True, order=True)
class Place:
    """Where a record's bytes lie: a slot of a rank, or the host cache of the receiver's host."""

    source: Source  # SAME_RANK, PEER or HOST
    rank: int = NO_RANK
    slot: int = -1  # of that rank, from 0 on
    is_far: bool = False  # of a PEER that is asked over the network: its memory is not mapped here

    def __str__(self) -> str:
        if self == HOST:
            return "the host"
        way = " over the network" if self.is_far else ""
        return f"slot {self.slot} of rank {self.rank}{way}"

    @property
    def name(self) -> str:
        """Label of this source in metrics."""
        return "other_rank" if self.is_far else self.source.name.lower()


HOST = Place(Source.HOST)


class WeightTransport(Protocol):
    """Moves one rank's bytes. Called from the agent's mover thread only."""

    @property
    def readable(self) -> frozenset[int]:
        """Ranks whose live slots can be read from here, including this one."""

    @property
    def reachable(self) -> frozenset[int]:
        """Ranks that give bytes of their live slots over the network; asked last of all."""

    def begin(self) -> None:
        """Make the calling thread the mover's: its device, its stream."""

    def preload(
        self, records: Sequence[Record], deadline_s: float, is_wanted: IsWanted = always
    ) -> Mapping[str, int]:
        """Have the host load and keep these records until ``release``.

        It may block, as may ``reload``: up to ``deadline_s``, and while it ``is_wanted``. With
        simulated time it returns at once.

        Returns:
            Bytes that were loaded into the host cache for it: "disk", "other_host".

        Raises:
            CalledOff: it is not wanted any more; the request was cancelled.
            MigrationError: the host failed, timed out, or has no records of these weights.
        """

    @property
    def host_room(self) -> int:
        """Records that the host has room for at a time, for this rank, whatever others hold."""

    def hint(self, records: Sequence[Record]) -> None:
        """Name records to preload next; the host may read ahead when idle and not full.

        Raises:
            MigrationError: the host cache disconnected.
        """

    def reload(self, record: Record, deadline_s: float, is_wanted: IsWanted = always) -> None:
        """Have the host verify a leased record, and reload it from disk if it is corrupted.

        Raises:
            CalledOff: it is not wanted any more; the lease has ended.
            MigrationError: it cannot be repaired, or not in time.
        """

    def release(self, records: Sequence[Record]) -> None:
        """Release these records.

        Raises:
            MigrationError: the host cache disconnected.
        """

    def serve_weights(self, version: int, deadline_s: float) -> None:
        """Switch to other weights: the host must serve no record of older ones any more.

        Called while nothing moves.

        Raises:
            MigrationError: the host cache disconnected or timed out.
        """

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Order the copy of a record's bytes ``offset`` .. ``offset + len(into)`` into ``into``.

        For a place on another host it blocks while the bytes arrive, up to a deadline.

        Returns:
            Completion of the copy; on a CPU it is complete on return.

        Raises:
            MigrationError: the place cannot be read.
        """

    def close(self) -> None:
        """Hang up on other ranks; nothing is pulled any more."""
