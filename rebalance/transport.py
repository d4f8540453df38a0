"""The seam between the agent and the wires: pull bytes, and vote.

Pulling is one-sided: the receiver reads, or asks within a deadline, and nothing of serving takes
part at the source, so a busy or dying source can never make a receiver hang (two-sided transfers
are where peers' production hangs come from: pytorch issue 174288, sglang issue 7956). Voting is one
asynchronous all-reduce on a group of its own, so that a slow vote never holds up the tokens'
exchange.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from eplb.errors import RankError
from eplb.migration import Source
from rebalance.lifelines import LOOPBACK, Address, Lifelines, address_towards
from rebalance.vote import Outcome
from rebalance.wanted import IsWanted, always
from runtime.streams import Completion

Record = tuple[int, int]  # (layer, expert)


NO_RANK = -1


@dataclass(frozen=True, order=True)
class Place:
    """Where a record's bytes lie: a slot of a rank, or the slab of the receiver's host."""

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
        """Say what will be preloaded next; the host may read ahead when it has time and room.

        Raises:
            MigrationError: the host is gone.
        """

    def reload(self, record: Record, deadline_s: float, is_wanted: IsWanted = always) -> None:
        """Have the host look at a record that it holds, and read it again if it is damaged.

        Raises:
            CalledOff: it is not wanted any more; the host does not hold it for this rank then.
            MigrationError: it cannot be mended, or not in time.
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


class GlooVotes:
    """Votes over a private gloo group of torch.distributed, and lifelines between the votes.

    Args:
        group: every rank, for votes alone.
        host: address of this machine by which the other ranks reach it. None: the one from which
            the rendezvous of the group is reached; one in a file is taken to be of one machine.
        deadline_s: for all ranks to be connected with each other.

    Raises:
        RankError: a rank cannot be reached.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, host: str | None = None, deadline_s: float = 60.0
    ) -> None:
        self._group = group
        own = host or _host_towards_rendezvous(group)
        self._lifelines = Lifelines(group.rank(), self._exchange, host=own, deadline_s=deadline_s)

    def _exchange(self, mine: Address) -> list[Address]:
        addresses = [mine] * self._group.size()
        try:
            dist.all_gather_object(addresses, mine, group=self._group)
        except RuntimeError as exc:
            raise RankError(f"a rank died or was late while ranks got to know: {exc}") from exc
        return addresses

    def cast(self, ballot: Sequence[int]) -> PendingVote:
        """Start an asynchronous all-reduce with MIN."""
        return _GlooVote(torch.tensor(ballot, dtype=torch.int64), self._group)

    def dead(self) -> frozenset[int]:
        """Ranks whose lifeline broke."""
        return self._lifelines.dead()

    def close(self) -> None:
        """Take leave of the other ranks."""
        self._lifelines.close()


def _host_towards_rendezvous(group: dist.ProcessGroup) -> str:
    store = group.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return address_towards(store.host, store.port) if isinstance(store, TCPStore) else LOOPBACK


class _GlooVote:
    def __init__(self, vector: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._vector = vector
        self._failed = False
        try:
            self._work = dist.all_reduce(vector, dist.ReduceOp.MIN, group=group, async_op=True)
        except RuntimeError:  # the group is broken already
            self._failed = True

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        if self._failed or self._is_late(timeout_s):
            return (Outcome.BROKEN if self._failed else Outcome.LATE), []
        try:
            self._work.wait()  # it has ended, well or badly: this only says which
        except RuntimeError:
            self._failed = True
            return Outcome.BROKEN, []
        return Outcome.VALUE, self._vector.tolist()

    def _is_late(self, timeout_s: float) -> bool:
        try:
            if timeout_s > 0:  # zero would mean "for ever" to torch
                self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError:
            # A time-out or a failure, the type does not tell; and a vote that ends right after the
            # time-out has not failed. Only whether it has ended counts.
            pass
        return not self._work.is_completed()


class LocalVotes:
    """The shipped fake: ranks are threads of one process, or turns of a scheduler.

    ``kill`` makes a rank dead: votes that it has not cast can only end BROKEN.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._ballots: list[dict[int, list[int]]] = []  # per vote, by rank
        self._dead: set[int] = set()

    def member(self, rank: int) -> VoteGroup:
        """Return the group as one rank sees it."""
        return _LocalMember(self, rank)

    def kill(self, rank: int) -> None:
        """Let a rank die."""
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()

    def dead(self) -> frozenset[int]:
        """Ranks that were killed."""
        with self._changed:
            return frozenset(self._dead)

    def add(self, rank: int, number: int, ballot: list[int]) -> None:
        """Take one rank's ballot of one vote."""
        with self._changed:
            while len(self._ballots) <= number:
                self._ballots.append({})
            self._ballots[number][rank] = ballot
            self._changed.notify_all()

    def result(self, number: int, timeout_s: float) -> tuple[Outcome, list[int]]:
        """Wait for one vote."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._ballots[number]) < self._num_ranks:
                if self._dead - self._ballots[number].keys():
                    return Outcome.BROKEN, []
                left = deadline - time.monotonic()
                if left <= 0:
                    return Outcome.LATE, []
                self._changed.wait(left)
            columns = zip(*self._ballots[number].values(), strict=True)
            return Outcome.VALUE, [min(column) for column in columns]


class _LocalMember:
    def __init__(self, votes: LocalVotes, rank: int) -> None:
        self._votes, self._rank, self._number = votes, rank, -1

    def cast(self, ballot: Sequence[int]) -> PendingVote:
        self._number += 1
        self._votes.add(self._rank, self._number, list(ballot))
        return _LocalVote(self._votes, self._number)

    def dead(self) -> frozenset[int]:
        return self._votes.dead()

    def close(self) -> None:
        """Nothing to do: only ``kill`` makes a rank dead here."""


class _LocalVote:
    def __init__(self, votes: LocalVotes, number: int) -> None:
        self._votes, self._number = votes, number

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        return self._votes.result(self._number, timeout_s)
