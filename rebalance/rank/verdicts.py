"""Ballots of this rank, and the effects of a verdict: swap, abort, halt."""

from __future__ import annotations

from dataclasses import replace

from rebalance.protocol import phases
from rebalance.protocol.ballot import Ballot, Verdict
from rebalance.protocol.phases import Phase
from rebalance.rank.core import RankCore
from rebalance.swap.swapper import Swapper


class Voting:
    """One rank's votes, on the step's thread."""

    def __init__(self, core: RankCore, swapper: Swapper) -> None:
        self._core, self._swapper = core, swapper
        self.wants_halt = False
        self.halt_at: int | None = None  # the step before which all ranks stop

    def cast(self, step: int) -> None:
        """Vote by how this rank stands."""
        core = self._core
        with core.shared.changed:
            state = core.shared.state
            if state.plan is not None and self._swapper.last_swap.is_complete():
                # Only now: peers that read this may write what the swap freed.
                state = phases.completed(state, state.plan.plan_id, state.swapped)
                core.shared.state = state
        membership = core.settings.membership
        ballot = phases.ballot(state, step=step, membership=membership, halt=self.wants_halt)
        ballot = replace(ballot, weights_version=core.fence.ballot)
        core.recorder.note_ballot(ballot)
        core.voter.cast(ballot)

    def read(self, step: int, *, must_finish: bool) -> Verdict | None:
        """Read the vote under way and apply its verdict; None if it may be read later.

        Raises:
            RankError: a rank is dead or too late, or ranks are at different steps.
        """
        swapped = self._core.shared.state.swapped
        found = self._core.voter.read(step, swapped=swapped, must_finish=must_finish)
        if found is None:
            return None
        self.apply_verdict(*found, step)
        return found[1]

    def apply_verdict(self, cast: Ballot, verdict: Verdict, step: int) -> None:
        """Apply a verdict on this rank's ballot, before ``step``."""
        core = self._core
        core.recorder.note_verdict(cast, verdict)
        if verdict.halt and self.halt_at is None:
            # The next vote boundary: by then every rank has read this verdict, a late one too.
            self.halt_at = cast.step + core.settings.vote_every
        with core.shared.changed:
            before = core.shared.state
            state, order = phases.read_verdict(before, cast, verdict)
            core.shared.state = state
            if order is not None:
                self._swapper.swap(order, step)
            elif state.phase is Phase.ABORTED and before.phase is not state.phase:
                self._swapper.drop(state)
            core.shared.changed.notify_all()
