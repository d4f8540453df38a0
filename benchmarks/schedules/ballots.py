"""Votes that arrive late at some ranks, or break when a rank dies."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rebalance.types import Outcome


class Violation(AssertionError):
    """Something that must never happen, happened."""


class NotYet(Exception):
    """A wait that only others can end."""


class Votes:
    """All votes of a group, each rank's in order."""

    def __init__(self, num_ranks: int, rng: random.Random) -> None:
        self.num_ranks, self._rng = num_ranks, rng
        self.dead: set[int] = set()
        self._ballots: list[dict[int, list[int]]] = []  # per vote, by rank

    def add(self, rank: int, number: int, ballot: list[int]) -> None:
        """Take a ballot."""
        if number == len(self._ballots):
            self._ballots.append({})
        self._ballots[number][rank] = ballot

    def can_end(self, number: int) -> bool:
        """Say whether every rank has voted, or one never will."""
        return len(self._ballots[number]) == self.num_ranks or bool(self.dead)

    def end(self, number: int) -> tuple[Outcome, list[int]]:
        """How a vote that can end ends for one rank; after a death that differs among ranks."""
        ballots = self._ballots[number]
        if len(ballots) < self.num_ranks or (self.dead and self._rng.random() < 0.5):
            return Outcome.BROKEN, []
        columns = zip(*ballots.values(), strict=True)
        return Outcome.VALUE, [min(column) for column in columns]


class Member:
    """One rank's votes."""

    def __init__(self, votes: Votes, rank: int) -> None:
        self.votes, self.rank, self.number = votes, rank, -1
        self.known_dead: frozenset[int] = frozenset()  # by its liveness connections
        self.result: tuple[Outcome, list[int]] | None = None  # of the latest vote, once it arrived

    def cast(self, ballot: Sequence[int]) -> Pending:
        """Start a vote."""
        self.number, self.result = self.number + 1, None
        self.votes.add(self.rank, self.number, list(ballot))
        return Pending(self, self.number)

    @property
    def can_arrive(self) -> bool:
        """Say whether the latest vote's result is on its way."""
        is_cast = self.number >= 0 and self.rank not in self.votes.dead
        return is_cast and self.result is None and self.votes.can_end(self.number)

    def arrive(self) -> None:
        """Let the latest vote's result be there."""
        self.result = self.votes.end(self.number)

    def dead(self) -> frozenset[int]:
        """Ranks whose liveness connections broke, as far as this rank has been told."""
        return self.known_dead

    def close(self, *, is_failure: bool = False) -> None:
        """Leave; only a death makes a rank dead here."""


class Pending:
    """A vote under way."""

    def __init__(self, member: Member, number: int) -> None:
        self._member, self._number = member, number

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        """Look, or wait where the scheduler knows that a wait ends."""
        member = self._member
        if self._number != member.number:
            raise Violation(f"rank {member.rank} reads vote {self._number} after {member.number}")
        if member.result is None and timeout_s > 0:
            if not member.can_arrive:
                raise Violation(f"rank {member.rank} waits for a vote that others have yet to cast")
            member.arrive()
        return member.result or (Outcome.LATE, [])
