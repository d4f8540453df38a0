"""Proposals: plans that wait for an approval, each stored with the placement that it leads to.

    open --> approved     its migration was published, with exactly that placement as its target
      |----> rejected     by an operator
      '----> expired      its time is over, or another placement was committed than its base

A store writes the first two. A proposal has expired by the clock and by what is committed, so
nobody has to write that down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from eplb.core.placement import Placement
from eplb.errors import EplbError, StaleGeneration
from eplb.migration.serialisation import (
    pack_record,
    placement_from_bytes,
    placement_to_bytes,
    unpack_record,
)
from telemetry.records.typed_json import from_json, from_record, to_json, version_of

ProposalState = Literal["open", "approved", "rejected", "expired"]

KEPT_PROPOSALS = 50  # the oldest are forgotten, of those that ended first
LASTS_S = 900.0  # unless it is asked for otherwise: the load that it was made on grows old
PROPOSAL_VERSION = 1
_KIND = "proposal"


class ProposalEnded(EplbError):
    """A proposal that cannot be approved or rejected any more."""


@dataclass(frozen=True)
class Proposal:
    """A proposal without its target."""

    time: float  # seconds since the epoch
    expires: float
    base_generation: int
    base_hash: str
    by: str  # who asked for it; "controller": it is its own
    trigger: str  # as of a decision
    reason: str  # why it was asked for
    summary: Mapping[str, Any]  # figures of the plan, as its event has them
    id: int = 0  # the store gives it, from the counter of the plan ids
    state: str = "open"  # a ProposalState
    ended: float = 0.0
    ended_by: str = ""
    end_reason: str = ""
    plan_id: int = 0  # of the migration that was published for it


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


def base_moved(proposal: Proposal, committed: tuple[int, str] | None) -> str:
    """Why the base of a proposal serves no longer; "" if it does."""
    if committed == (proposal.base_generation, proposal.base_hash):
        return ""
    found = "no placement" if committed is None else f"generation {committed[0]}"
    return f"base moved on: found {found} committed, expected generation {proposal.base_generation}"


def check_open(proposal: Proposal) -> None:
    """Refuse a proposal that has ended, as ``standing`` gave it.

    Raises:
        ProposalEnded: it has.
    """
    if proposal.state != "open":
        reason = f" ({proposal.end_reason})" if proposal.end_reason else ""
        raise ProposalEnded(f"proposal {proposal.id} is {proposal.state}{reason}, expected it open")


def check_proposed(proposal: Proposal, committed: tuple[int, str] | None) -> None:
    """Refuse a proposal on another placement than the one that serves.

    Raises:
        StaleGeneration: another one serves.
    """
    if moved := base_moved(proposal, committed):
        raise StaleGeneration(f"a new proposal cannot be stored: {moved}")


def to_forget(proposals: Iterable[Proposal]) -> list[int]:
    """Return the ids that make room for one more: those that ended, then the oldest."""
    found = sorted(proposals, key=lambda one: (one.state == "open", one.id))
    return [one.id for one in found[: max(0, len(found) + 1 - KEPT_PROPOSALS)]]


def proposal_to_text(proposal: Proposal) -> str:
    """Return a proposal as JSON text."""
    fields = vars(proposal) | {"summary": dict(proposal.summary)}
    return to_json({"version": PROPOSAL_VERSION} | fields)


def proposal_from_text(text: str | bytes) -> Proposal:
    """Make a proposal from what ``proposal_to_text`` gave.

    Raises:
        StoreError: an unknown version, or fields that are missing, unknown or of another type.
    """
    record = from_json(text, "a proposal")
    version_of(record, "a proposal", (PROPOSAL_VERSION,))
    return from_record(Proposal, record, "a proposal")


def content_to_bytes(content: Content) -> bytes:
    """Pack the content of a proposal."""
    target = np.frombuffer(placement_to_bytes(content.target), np.uint8)
    return pack_record(_KIND, {"detail": dict(content.detail)}, {"target": target})


def content_from_bytes(record: bytes) -> Content:
    """Unpack the content of a proposal.

    Raises:
        StoreError: damaged bytes, another kind of record, or an unknown version.
    """
    meta, arrays = unpack_record(_KIND, record)
    return Content(placement_from_bytes(arrays["target"].tobytes()), meta["detail"])
