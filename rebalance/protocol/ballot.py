"""Ballots of the ranks, and the verdict that all ranks decode from the same bytes.

Every rank casts a ballot; an all-reduce with MIN makes one vector of them, alike everywhere. A
field that must agree is cast with its negation: MIN then yields both the smallest and the largest
value, so a disagreement is detected alike on every rank. No rank acts on its own flag alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from eplb.migration.recovery import NO_PLAN as NO_PLAN


@dataclass(frozen=True)
class Ballot:
    """One rank's vote at a step boundary."""

    step: int
    generation: int
    membership: int  # number of the set of live ranks
    weights_version: int  # number of the model weights being served
    plan_id: int  # NO_PLAN: works on none
    plan_hash: int  # Migration.vote_hash; 0 without a plan
    prepared: int  # transactions of the plan that are staged and verified here
    applied: int  # transactions of the plan that serve here, completely
    abort: bool  # this rank requests an abort of the plan
    halt: bool  # this rank requests the end of serving
    next_group: int = 0  # proposal of a next group that this rank is ready for; 0: none

    def encode(self) -> list[int]:
        """The vector that is reduced with MIN."""
        mirrored = (
            self.step,
            self.generation,
            self.membership,
            self.weights_version,
            self.plan_id,
            self.plan_hash,
            self.next_group,
        )
        pairs = [value for field in mirrored for value in (field, -field)]
        unwanted = self.plan_id if self.abort else NO_PLAN
        return [*pairs, self.prepared, self.applied, -unwanted, -self.halt]


BALLOT_SIZE = 18


@dataclass(frozen=True)
class Verdict:
    """The combined ballots; the same on every rank."""

    step: int | None  # None where ranks disagree, here and in the next three fields
    generation: int | None
    membership: int | None
    weights_version: int | None
    plan_hash: int | None  # of the plan that every rank works on; 0: of none
    newest_plan_id: int  # the highest id that any rank works on
    prepared: int  # transactions that every rank has prepared
    applied: int  # transactions that serve on every rank
    # Plans up to this id are aborted: the highest that any rank wants aborted; NO_PLAN: none.
    # Others may work on a newer plan, to which no rank objects.
    unwanted_up_to: int
    halt: bool  # at least one rank requests the end of serving
    next_group: int | None  # the proposal that every rank is ready for; 0: none is

    @staticmethod
    def decode(reduced: list[int]) -> Verdict:
        """Read the reduced vector."""
        assert len(reduced) == BALLOT_SIZE, "every rank encodes the same fields"
        low, high = reduced[0:14:2], [-value for value in reduced[1:14:2]]
        agreed = [a if a == b else None for a, b in zip(low, high, strict=True)]
        step, generation, membership, weights_version, _, plan_hash, next_group = agreed
        prepared, applied, unwanted, halt = reduced[14:]
        return Verdict(
            step,
            generation,
            membership,
            weights_version,
            plan_hash,
            newest_plan_id=high[4],
            prepared=prepared,
            applied=applied,
            unwanted_up_to=-unwanted,
            halt=halt < 0,
            next_group=next_group,
        )
