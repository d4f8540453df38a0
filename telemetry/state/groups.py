"""The next group of ranks: who offers to join it, and how its lowest member proposes it.

proposed ---> formed by all of its ranks ---> Recovery record and commit, in one change
    +-------> replaced by a newer proposal: a rank did not come
    +-------> void: a death was first, and the base is of an older membership
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from telemetry.state.backend import Change, Table
from telemetry.state.part import Part, Records, Single, epoch_in

OFFER_AGE_S = 8.0  # a rank that waits repeats its offer earlier; an older one is of a dead process


@dataclass(frozen=True)
class Joiner:
    """A rank that is no member, is ready to serve, and waits to be admitted."""

    rank: int
    host: str  # address
    process: str  # tells two processes with one rank number apart
    time: float = 0.0  # when the offer was made, by the store's clock


@dataclass(frozen=True)
class GroupProposal:
    """Ranks that are to form the group after one that serves."""

    base: int  # membership number of the group that serves
    run: str  # run of the group that serves
    members: tuple[int, ...]
    joiners: dict[str, str]  # number of each rank that joins -> its process
    reason: str
    tries: int = 1  # to form a group of these members, in a row, this one included
    id: int = 0  # greater than any before; the store gives it
    time: float = 0.0  # when it was proposed, by the store's clock

    @property
    def membership(self) -> int:
        """Number of the proposed group."""
        return self.base + 1

    def has(self, rank: int, process: str) -> bool:
        """Whether it names this process of a rank that joins."""
        return self.joiners.get(str(rank)) == process


JOINERS = Records(Joiner, Table("joiners"), "the offer to join of rank")  # by rank
PROPOSED = Single(GroupProposal, "proposed_group", "the proposal of a group")


class GroupPart(Part):
    """Offers to join, and the proposal of the next group."""

    def offer_to_join(self, joiner: Joiner) -> None:
        """Record that a rank is ready to be admitted, in place of its last offer."""

        def decision(change: Change) -> None:
            known = JOINERS.get(change, joiner.rank)
            JOINERS.put(change, joiner.rank, replace(joiner, time=change.time))
            if known is None or known.process != joiner.process:
                change.wake()  # members wait for it; a repeated offer wakes nobody

        self.backend.decide(f"offer of rank {joiner.rank}", decision)

    def joiners(self) -> list[Joiner]:
        """Return the offers that stand, by rank."""
        now, offers = self.backend.now(), JOINERS.scan(self.backend)
        return [joiner for joiner in offers if now - joiner.time <= OFFER_AGE_S]

    def withdraw_offer(self, joiner: Joiner) -> None:
        """Remove the offer of a process, unless another process has replaced it."""

        def decision(change: Change) -> None:
            known = JOINERS.get(change, joiner.rank)
            if known is not None and known.process == joiner.process:
                change.delete(JOINERS.table, joiner.rank)

        self.backend.decide(f"end of the offer of rank {joiner.rank}", decision)

    def propose_group(self, proposal: GroupProposal) -> GroupProposal | None:
        """Record a proposal under a new number; None: its base serves no longer."""

        def decision(change: Change) -> GroupProposal | None:
            if epoch_in(change) > proposal.base:
                return None
            number = change.next("proposed_group")
            made = replace(proposal, id=number, time=change.time)
            PROPOSED.put(change, made)
            change.wake()
            return made

        return self.backend.decide("proposal of a group", decision)

    def proposed_group(self) -> GroupProposal | None:
        """Return the latest proposal, or None: the latest one serves, or there was none."""
        return PROPOSED.get(self.backend)
