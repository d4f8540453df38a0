"""Ballots of this rank, and the effects of a verdict: swap, abort, halt."""

from __future__ import annotations

from rebalance.protocol import phases
from rebalance.protocol.ballot import Ballot, Verdict
from rebalance.protocol.phases import Phase
from rebalance.protocol.voter import Voter
from rebalance.rank.parts import RankParts
from rebalance.swap.swapper import Swapper


class Voting:
    """One rank's votes, on the step's thread.

    Args:
        parts: those of the rank's agent.
        voter: casts and reads.
        swapper: does what a verdict orders.
    """

    def __init__(self, parts: RankParts, voter: Voter, swapper: Swapper) -> None:
        self._voter, self._swapper = voter, swapper
        self._shared, self._recorder, self._settings = parts.shared, parts.recorder, parts.settings
        self.wants_halt = False
        self.halt_at: int | None = None  # the step before which all ranks stop

    def cast(self, step: int) -> None:
        """Vote by how this rank stands."""
        with self._shared.changed:
            state = self._shared.state
            if state.plan is not None and self._swapper.last_swap.is_complete():
                # Only now: peers that read this may write what the swap freed.
                state = phases.completed(state, state.plan.plan_id, state.swapped)
                self._shared.state = state
        membership, halt = self._settings.membership, self.wants_halt
        ballot = phases.ballot(state, step=step, membership=membership, halt=halt)
        self._recorder.note_ballot(ballot)
        self._voter.cast(ballot)

    def read(self, step: int, *, must_finish: bool) -> Verdict | None:
        """Read the vote under way and apply its verdict; None if it may be read later.

        Raises:
            RankError: a rank is dead or too late, or ranks are at different steps.
        """
        swapped = self._shared.state.swapped
        found = self._voter.read(step, swapped=swapped, must_finish=must_finish)
        if found is None:
            return None
        self.apply_verdict(*found, step)
        return found[1]

    def apply_verdict(self, cast: Ballot, verdict: Verdict, step: int) -> None:
        """Apply a verdict on this rank's ballot, before ``step``."""
        self._recorder.note_verdict(cast, verdict)
        if verdict.halt and self.halt_at is None:
            # The next vote boundary: by then every rank has read this verdict, a late one too.
            self.halt_at = cast.step + self._settings.config.vote_every
        with self._shared.changed:
            before = self._shared.state
            state, order = phases.read_verdict(before, cast, verdict)
            self._shared.state = state
            if order is not None:
                self._swapper.swap(order, step)
            elif state.phase is Phase.ABORTED and before.phase is not state.phase:
                self._swapper.drop(state)
            self._shared.changed.notify_all()
