"""When a rank waits for a late vote, and when it may go on without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from eplb.errors import BrokenGroup
from rebalance.protocol import phases
from rebalance.protocol.ballot import Ballot
from rebalance.protocol.phases import RankPhase
from rebalance.protocol.voter import VOTE_POLL_S, Voter
from rebalance.types import Outcome, PendingVote
from runtime.streams import Completion
from tests.support.simulated_time import Clock

DEADLINE_S = 30.0
NOTHING_PREPARED = phases.ballot(RankPhase(generation=0), step=0, membership=0, halt=False)


class NeverThere:
    """Votes that some rank never casts, and no rank is known to be dead. A poll takes its time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def cast(self, ballot: Sequence[int]) -> PendingVote:
        return self

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        self._clock.now += timeout_s
        return Outcome.LATE, []

    def dead(self) -> frozenset[int]:
        return frozenset()

    def close(self) -> None:
        """Nothing to leave."""


def is_skipped(cast: Ballot, *, swapped: int, must_finish: bool = False) -> bool:
    """Say whether a rank goes on without the verdict; else it waits and then refuses to."""
    clock = Clock()
    voter = Voter(0, NeverThere(clock), DEADLINE_S, clock)
    voter.cast(cast)
    try:
        is_skipped = voter.read(1, swapped=swapped, must_finish=must_finish) is None
    except BrokenGroup:
        assert clock.now == pytest.approx(DEADLINE_S, abs=VOTE_POLL_S)
        return False
    assert clock.now == 0.0
    return is_skipped


@pytest.mark.parametrize(("prepared", "swapped"), [(0, 0), (2, 2)])
def test_late_vote_is_skipped_by_a_rank_that_had_prepared_nothing_more(
    prepared: int, swapped: int
) -> None:
    assert is_skipped(replace(NOTHING_PREPARED, prepared=prepared), swapped=swapped)


def test_late_vote_is_skipped_while_a_partly_swapped_plan_drains() -> None:
    # It is voted on as none, with nothing prepared: by no such verdict can anybody swap.
    assert is_skipped(NOTHING_PREPARED, swapped=1)


def test_late_vote_is_waited_for_by_a_rank_that_had_prepared_more() -> None:
    assert not is_skipped(replace(NOTHING_PREPARED, prepared=2), swapped=1)


def test_late_vote_is_waited_for_before_the_next_is_cast() -> None:
    assert not is_skipped(NOTHING_PREPARED, swapped=0, must_finish=True)


class NeverDone(Completion):
    """A device that hangs; asking it takes a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(is_cuda=False)
        self._clock = clock

    def is_complete(self) -> bool:
        self._clock.now += 1.0
        return False


def test_device_that_hangs_is_an_error_at_the_deadline() -> None:
    clock = Clock()
    voter = Voter(0, NeverThere(clock), DEADLINE_S, clock)

    with pytest.raises(BrokenGroup, match="the device is not done with step 4 after 30 s"):
        voter.wait_for_device(NeverDone(clock), 4)

    assert clock.now == DEADLINE_S
