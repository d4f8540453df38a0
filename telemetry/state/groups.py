"""The next group of ranks, as its lowest member proposes it while the group before it serves.

proposed ---> formed by all of its ranks ---> Recovery record and commit, in one change
    +-------> replaced by a newer proposal: a rank did not come
    +-------> void: a death was first, and the base is of an older membership
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from eplb.migration.recovery import Recovery
from telemetry.state.backend import HEAD, Change
from telemetry.state.codec import encode
from telemetry.state.part import RECOVERY, Part, head

PROPOSED = "proposed_group"


@dataclass(frozen=True)
class GroupProposal:
    """Ranks that are to form the group after one that serves."""

    base: int  # membership number of the group that serves
    run: str  # in which that one serves
    members: tuple[int, ...]
    joiners: dict[str, str]  # those that are no members yet, by number -> process
    reason: str
    id: int = 0  # greater than any before; the store gives it
    time: float = 0.0  # by the store's clock

    @property
    def membership(self) -> int:
        """Number of the proposed group."""
        return self.base + 1

    def has(self, rank: int, process: str) -> bool:
        """Whether it names this process of a rank that joins."""
        return self.joiners.get(str(rank)) == process


class GroupPart(Part):
    """The proposal of the next group."""

    def propose_group(self, proposal: GroupProposal) -> GroupProposal | None:
        """Record a proposal under a new number; None: its base serves no longer."""

        def decision(change: Change) -> GroupProposal | None:
            latest = head(change, Recovery, RECOVERY, "the record of a recovery")
            if latest is not None and latest.membership > proposal.base:
                return None
            number = change.next("proposed_group")
            made = replace(proposal, id=number, time=change.time)
            change.put(HEAD, PROPOSED, encode(made))
            change.wake()
            return made

        return self.backend.decide("proposal of a group", decision)

    def proposed_group(self) -> GroupProposal | None:
        """Return the latest proposal, or None before the first."""
        return head(self.backend, GroupProposal, PROPOSED, "the proposal of a group")
