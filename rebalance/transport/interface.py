"""The seam between the agent and the wires: pull bytes, and vote.

Pulling is one-sided: the receiver reads, or asks within a deadline, and nothing of serving takes
part at the source, so a busy or dying source can never make a receiver hang (two-sided transfers
are where peers' production hangs come from: pytorch issue 174288, sglang issue 7956). Voting is one
asynchronous all-reduce on a group of its own, so that a slow vote never holds up the tokens'
exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eplb.migration.build import Source
from rebalance.protocol.ballot import Outcome
from rebalance.threads.cancellation import IsWanted, always
from runtime.streams import Completion

Record = tuple[int, int]  # (layer, expert)


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
        """What bytes from here are counted as."""
        return "other_rank" if self.is_far else self.source.name.lower()


HOST = Place(Source.HOST)


class WeightTransport(Protocol):
    """Moves one rank's bytes. Called from the agent's mover thread only."""

    @property
    def readable(self) -> frozenset[int]:
        """Ranks whose live slots can be read without their help, this one included."""

    @property
    def reachable(self) -> frozenset[int]:
        """Ranks that give bytes of their live slots over the network; asked last of all."""

    def begin(self) -> None:
        """Make the calling thread the mover's: its device, its stream."""

    def preload(
        self, records: Sequence[Record], deadline_s: float, is_wanted: IsWanted = always
    ) -> Mapping[str, int]:
        """Have the host hold these records until ``release``.

        It may block, as may ``reload``: up to ``deadline_s``, and while it ``is_wanted``. Where
        time is simulated it answers at once.

        Returns:
            Bytes that were brought into the host's memory for it: "disk", "other_host".

        Raises:
            CalledOff: it is not wanted any more; the host was told so.
            MigrationError: the host cannot, or not in time, or it has no records of these weights.
        """

    @property
    def host_room(self) -> int:
        """Records that the host has room for at a time, for this rank, whatever others hold."""

    def hint(self, records: Sequence[Record]) -> None:
        """Name records to preload next; the host may read ahead when idle and not full.

        Raises:
            MigrationError: the host is gone.
        """

    def reload(self, record: Record, deadline_s: float, is_wanted: IsWanted = always) -> None:
        """Have the host look at a record that it holds, and read it again if it is damaged.

        Raises:
            CalledOff: it is not wanted any more; the host does not hold it for this rank then.
            MigrationError: it cannot be repaired, or not in time.
        """

    def release(self, records: Sequence[Record]) -> None:
        """Let the host forget these records if it needs the room.

        Raises:
            MigrationError: the host is gone.
        """

    def serve_weights(self, version: int, deadline_s: float) -> None:
        """Note that other weights serve: no record of older ones may come from the host any more.

        Called while nothing moves.

        Raises:
            MigrationError: the host is gone or late.
        """

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Order the copy of a record's bytes ``offset`` .. ``offset + len(into)`` into ``into``.

        From a place that is far it blocks while the bytes come, for as long as a rank may be late.

        Returns:
            What tells when the bytes have landed; on a CPU they have on return.

        Raises:
            MigrationError: the place cannot be read.
        """

    def close(self) -> None:
        """Hang up on other ranks; nothing is pulled any more."""


class PendingVote(Protocol):
    """A vote under way."""

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        """Wait up to ``timeout_s`` and return how it stands, and the reduced vector if VALUE."""


class VoteGroup(Protocol):
    """Every rank of the expert-parallel group, for votes alone."""

    def cast(self, ballot: Sequence[int]) -> PendingVote:
        """Start a vote, whose value is the smallest of every figure.

        Every rank casts the same number of votes, of the same sizes, in the same order.
        """

    def dead(self) -> frozenset[int]:
        """Ranks that are known to be gone: no vote of theirs will come."""

    def close(self) -> None:
        """Leave the group, so that no other rank takes this one for dead."""
