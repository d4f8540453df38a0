"""A rank's votes: cast, read when due, and end the wait as soon as a rank is dead."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from eplb.clock import Clock, Deadline
from eplb.errors import BrokenGroup
from rebalance.protocol.ballot import Ballot, Verdict
from rebalance.types import Outcome, PendingVote, VoteGroup
from runtime.group import first_sentence
from runtime.streams import Completion

DEVICE_POLL_S = 50e-6
VOTE_POLL_S = 0.02  # poll interval for dead ranks during a late vote


class Voter:
    """One vote at a time, in the order in which they are cast.

    Args:
        rank: which casts them.
        votes: the group.
        deadline_s: for a vote, and for the device.
        clock: of the deadline.
    """

    def __init__(
        self, rank: int, votes: VoteGroup, deadline_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._rank, self._votes, self._deadline_s = rank, votes, deadline_s
        self._clock = clock
        self.pending: tuple[Ballot, PendingVote] | None = None

    def cast(self, ballot: Ballot) -> None:
        """Start a vote."""
        assert self.pending is None, "the vote before was read"
        self.pending = (ballot, self._votes.cast(ballot.encode()))

    def read(self, step: int, *, swapped: int, must_finish: bool) -> tuple[Ballot, Verdict] | None:
        """Read the vote under way, if there is one; None if it may be read later.

        A rank that had prepared nothing may skip a late vote: the verdict's ``prepared`` is the
        minimum, so no rank can have swapped by it. A rank that had prepared transactions must wait.
        If the vote never ends, this rank must not serve: others may have swapped.

        Args:
            step: the step that is about to begin.
            swapped: transactions of its plan that this rank has swapped.
            must_finish: another vote is to be cast now.

        Raises:
            BrokenGroup: a rank is dead, or too late.
        """
        if self.pending is None:
            return None
        cast, vote = self.pending
        may_skip = cast.prepared <= swapped and not must_finish
        outcome, reduced = vote.poll(0.0) if may_skip else self._wait_for(vote)
        if outcome is Outcome.LATE and may_skip:
            return None
        if outcome is not Outcome.VALUE:
            raise BrokenGroup(
                f"rank {self._rank}: the vote of step {cast.step} is {outcome.value} at step "
                f"{step}; a peer is dead or more than {self._deadline_s:.0f} s late"
            )
        self.pending = None
        return cast, Verdict.decode(reduced)

    def _wait_for(self, vote: PendingVote) -> tuple[Outcome, list[int]]:
        deadline = Deadline.after(self._deadline_s, self._clock)
        while True:
            left_s = deadline.left_s
            outcome, reduced = vote.poll(min(left_s, VOTE_POLL_S))
            if outcome is not Outcome.LATE or left_s <= VOTE_POLL_S:
                return outcome, reduced
            # A reduction around a ring breaks at the dead rank's neighbours alone.
            self.raise_if_peer_dead("before it had voted")

    def raise_if_peer_dead(self, when: str) -> None:
        """Run no further step without a rank: its tokens would be lost.

        Raises:
            BrokenGroup: a rank is dead.
        """
        dead = self._votes.dead()
        if dead:
            raise BrokenGroup(f"rank {self._rank}: rank {min(dead)} died {when}")

    def wait_for_exchange(self, exchange: dist.Work, step: int) -> None:
        """Wait for an exchange of tokens on the host, but not for one that lacks a dead peer.

        The transport may report a death before the liveness connection does, or in its place: its
        error is translated here, for any dispatcher.

        Raises:
            BrokenGroup: a rank is dead, or the exchange failed or missed its group's deadline.
        """
        while not exchange.is_completed():
            self.raise_if_peer_dead(f"in the exchange of tokens of step {step}")
            try:
                exchange.wait(timedelta(seconds=VOTE_POLL_S))
            except RuntimeError:
                continue  # timeout or failure, alike by type: only is_completed counts
        try:
            exchange.wait()  # raises if it failed
        except RuntimeError as exc:
            raise BrokenGroup(
                f"rank {self._rank}: the exchange of tokens of step {step} failed, "
                f"a peer is dead or late: {first_sentence(exc)}"
            ) from exc

    def wait_for_device(
        self, completion: Completion, step: int, *, is_halting: bool = False
    ) -> None:
        """Wait for the device; raise as soon as a peer is known to be dead.

        Args:
            completion: what to wait for.
            step: in which the device is.
            is_halting: whether all ranks stop here; then peers may have left regularly.

        Raises:
            BrokenGroup: a rank is dead, or the device is not done before the votes' deadline.
        """

        def watch_peers() -> None:
            if not is_halting:
                self.raise_if_peer_dead(f"while the device was in step {step} or the last")

        deadline = self._clock() + self._deadline_s
        if not completion.wait_until(
            deadline, poll_s=DEVICE_POLL_S, between=watch_peers, clock=self._clock
        ):
            raise BrokenGroup(
                f"rank {self._rank}: the device is not done with step {step} after "
                f"{self._deadline_s:.0f} s; a peer is dead or late"
            )
