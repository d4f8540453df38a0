"""Proposals: plans that wait for an approval, each stored with the placement that it leads to.

    open --> approved     its migration was published, with exactly that placement as its target
      |----> rejected     by an operator
      '----> expired      its time is over, or another placement was committed than its base

A store writes the first two. A proposal has expired by the clock and by what is committed, so
nobody has to write that down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from eplb.core.placement import Placement
from eplb.declared import Meaning
from eplb.errors import EplbError, StaleGeneration
from eplb.migration.serialisation import placement_from_bytes, placement_to_bytes
from telemetry.state.backend import Change, Reader, Table, packed
from telemetry.state.codec import from_record, pack, unpack
from telemetry.state.events import note
from telemetry.state.lease import check_fence
from telemetry.state.part import Part, Records, committed_in

ProposalState = Literal["open", "approved", "rejected", "expired"]

KEPT_PROPOSALS = 50  # the oldest are removed, those that ended first
LASTS_S = 900.0  # default time to approve: the load behind the plan grows old

CONTENTS = Table("proposal_contents")  # id of the proposal -> its target and explanation


class ProposalEnded(EplbError):
    """A proposal that cannot be approved or rejected any more."""


@dataclass(frozen=True)
class Proposal:
    """A plan that waits for an approval, without its target."""

    time: Annotated[float, Meaning("seconds since the epoch")]
    expires: Annotated[float, Meaning("when it can be approved no longer")]
    base_generation: Annotated[int, Meaning("it is carried out on this generation or not at all")]
    base_hash: Annotated[str, Meaning("hash of that placement")]
    target_generation: int
    by: Annotated[str, Meaning("who asked for it; controller: its own, in the stage propose")]
    trigger: Annotated[str, Meaning("what made the plan due")]
    reason: Annotated[str, Meaning("why it was asked for")]
    decision: Annotated[str, Meaning("MOVE or RESPLIT")]
    plan_reason: Annotated[str, Meaning("why the plan changes the placement")]
    policy: str
    imbalance_before: Annotated[float | None, Meaning("null: no tokens")]
    imbalance_after: float
    expected_gain: float
    moves: int
    bytes: int
    cost_s: Annotated[float, Meaning("serving time that its moves and swaps take")]
    id: Annotated[int, Meaning("from the counter of the plan ids; the store gives it")] = 0
    state: ProposalState = "open"
    ended: Annotated[float | None, Meaning("when it ended; null: it is open")] = None
    ended_by: str = ""
    end_reason: str = ""
    plan_id: Annotated[
        int | None, Meaning("the migration that carried it out; null: there is none")
    ] = None


@dataclass(frozen=True, eq=False)
class Content:
    """The rest of a proposal: its target, and details that are read one proposal at a time."""

    target: Placement
    detail: Mapping[str, Any] = field(default_factory=dict)  # JSON-ready values


@dataclass(frozen=True)
class Approval:
    """That a migration carries out a proposal."""

    proposal: int
    by: str
    reason: str


PROPOSALS = Records(Proposal, Table("proposals"), "proposal")  # by id


class ProposalPart(Part):
    """Plans that wait for an approval."""

    def propose(
        self, proposal: Proposal, content: Content, *, fence: int | None = None
    ) -> Proposal:
        """Store a proposal and return it with its id; the oldest are forgotten.

        Raises:
            StaleGeneration: its base is not the committed placement.
            FencedOut: the token ``fence`` is not the newest.
        """
        record = pack({"detail": dict(content.detail)}, placement_to_bytes(content.target))

        def decision(change: Change) -> Proposal:
            check_fence(change, fence)
            if moved := base_moved(proposal, committed_in(change)):
                raise StaleGeneration(f"a new proposal cannot be stored: {moved}")
            kept = sorted(_all(change, change.time), key=lambda p: (p.state == "open", p.id))
            for old in kept[: max(0, len(kept) + 1 - KEPT_PROPOSALS)]:
                change.delete(PROPOSALS.table, old.id)
                change.delete(CONTENTS, old.id)
            proposal_id = change.next("plan_id")
            added = replace(proposal, id=proposal_id)
            change.put(CONTENTS, proposal_id, record)
            _put(change, added, added.by, added.reason)
            return added

        return self.backend.decide("a new proposal", decision)

    def reject(self, proposal_id: int, *, by: str, reason: str) -> Proposal:
        """End an open proposal without carrying it out.

        Raises:
            ProposalEnded: it is not open any more, or there is none.
        """

        def decision(change: Change) -> Proposal:
            return _end(change, proposal_id, by, reason, state="rejected")

        return self.backend.decide(f"end of proposal {proposal_id}", decision)

    def proposals(self) -> list[Proposal]:
        """Return all that are kept, oldest first, each in the state that it has now."""
        return _all(self.backend, self.backend.now())

    def proposal_content(self, proposal_id: int) -> Content | None:
        """Return the rest of a proposal; None: there is no such proposal."""
        record = self.backend.get(CONTENTS, proposal_id)
        if record is None:
            return None
        what = f"the content of proposal {proposal_id}"
        meta, content = unpack(packed(record, what), what)
        return from_record(Content, meta | {"target": placement_from_bytes(content)}, what)


def approve(change: Change, approval: Approval, plan_id: int) -> None:
    """Note that a migration carries out a proposal.

    Raises:
        ProposalEnded: it is not open any more, or there is none.
    """
    _end(change, approval.proposal, approval.by, approval.reason, state="approved", plan_id=plan_id)


def standing(proposal: Proposal, now: float, committed: tuple[int, str] | None) -> Proposal:
    """Return a proposal in the state that it has now.

    Args:
        proposal: as it is stored.
        now: seconds since the epoch.
        committed: generation and hash of the placement that serves.
    """
    if proposal.state != "open":
        return proposal
    moved = base_moved(proposal, committed)
    if moved:
        return replace(proposal, state="expired", end_reason=moved)
    if now >= proposal.expires:
        reason = "nobody decided on it in its time"
        return replace(proposal, state="expired", ended=proposal.expires, end_reason=reason)
    return proposal


def check_open(proposal: Proposal) -> None:
    """Refuse a proposal that has ended, as ``standing`` gave it.

    Raises:
        ProposalEnded: it has.
    """
    if proposal.state != "open":
        reason = f" ({proposal.end_reason})" if proposal.end_reason else ""
        raise ProposalEnded(f"proposal {proposal.id} is {proposal.state}{reason}, expected it open")


def base_moved(proposal: Proposal, committed: tuple[int, str] | None) -> str:
    """Why the base of a proposal serves no longer; "" if it does."""
    if committed == (proposal.base_generation, proposal.base_hash):
        return ""
    serving = "no placement" if committed is None else f"generation {committed[0]}"
    return (
        f"base moved on: found {serving} committed, expected generation {proposal.base_generation}"
    )


def _all(reader: Reader, now: float) -> list[Proposal]:
    stored = PROPOSALS.scan(reader)
    committed = committed_in(reader)  # after them: a base never serves again
    return [standing(proposal, now, committed) for proposal in stored]


def _end(change: Change, proposal_id: int, by: str, reason: str, **changes: Any) -> Proposal:
    stored = PROPOSALS.get(change, proposal_id)
    if stored is None:
        raise ProposalEnded(f"there is no proposal {proposal_id}")
    check_open(standing(stored, change.time, committed_in(change)))
    ended = replace(stored, ended=change.time, ended_by=by, end_reason=reason, **changes)
    _put(change, ended, by, reason)
    return ended


def _put(change: Change, proposal: Proposal, actor: str, reason: str) -> None:
    PROPOSALS.put(change, proposal.id, proposal)
    detail = {
        "proposal": proposal.id,
        "state": proposal.state,
        "actor": actor,
        "reason": reason,
        "generation": proposal.base_generation,
    }
    note(change, "proposal", detail)
