"""Types that several folders of ``rebalance`` share. It imports none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

Record = tuple[int, int]  # (layer, expert)
Digest = tuple[int, int]  # the two sums of a record's bytes (runtime.memory.digest)
IsWanted = Callable[[], bool]  # asked between slices of a wait for another process
# The reason of an end that an operator ordered: it is compared, because it is no failure.
SWITCHED_OFF = "movement is switched off"


class CalledOff(Exception):
    """The wait was cancelled. Not a failure of the source: no other source is tried."""


def always() -> bool:
    """Wait for the answer up to the deadline, whatever happens meanwhile."""
    return True


class StepCounter(Protocol):
    """Counts forward passes, as ``runtime.counters.PassCounter`` does."""

    @property
    def steps(self) -> int:
        """Forward passes that were begun so far: the number of the next one, from 0 on."""


class Outcome(Enum):
    """How a vote can end; decided by what happened, never by a timer alone."""

    VALUE = "value"  # every rank voted
    LATE = "late"  # some rank has not voted yet
    BROKEN = "broken"  # a peer is dead or the group is: no rank may run another step


class PendingVote(Protocol):
    """A vote under way."""

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        """Wait up to ``timeout_s`` and return how it stands, and the reduced vector if VALUE."""


class VoteGroup(Protocol):
    """Every rank of the expert-parallel group, for votes alone.

    A vote is one asynchronous all-reduce on a group of its own, so that a slow vote never holds up
    the exchange of tokens.
    """

    def cast(self, ballot: Sequence[int]) -> PendingVote:
        """Start a vote, whose value is the smallest of every figure.

        Every rank casts the same number of votes, of the same sizes, in the same order.
        """

    def dead(self) -> frozenset[int]:
        """Ranks that are known to be gone: no vote of theirs will come."""

    def begin_beats(self) -> None:
        """Be known as a rank that serves: silence is a death from now on. Idempotent."""

    def close(self, *, is_failure: bool = False) -> None:
        """Leave the group, so that no other rank takes this one for dead; after a failure, so that
        every other one does.
        """
