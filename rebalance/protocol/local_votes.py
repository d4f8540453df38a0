"""Votes within one process: the shipped fake of ``rebalance/protocol/gloo_votes.py``."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rebalance.types import Outcome, PendingVote, VoteGroup


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
        """Mark a rank as dead."""
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()

    def revive(self, rank: int) -> None:
        """Mark a rank as alive again."""
        with self._changed:
            self._dead.discard(rank)

    def dead(self) -> frozenset[int]:
        """Ranks that were killed."""
        with self._changed:
            return frozenset(self._dead)

    @property
    def num_votes(self) -> int:
        """Votes that at least one rank has cast."""
        with self._changed:
            return len(self._ballots)

    def add(self, rank: int, number: int, ballot: list[int]) -> None:
        """Add one rank's ballot to a vote."""
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

    def close(self, *, is_failure: bool = False) -> None:
        """Leave; after a failure as a dead rank."""
        if is_failure:
            self._votes.kill(self._rank)


class _LocalVote:
    def __init__(self, votes: LocalVotes, number: int) -> None:
        self._votes, self._number = votes, number

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        return self._votes.result(self._number, timeout_s)
