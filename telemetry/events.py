"""Events that programs read back, as types; every other detail is for people.

    publish                  PlanOffer
    commit, abort, reject    PlanEnd
    pace                     eplb.decision.pace.PaceChange

A detail without "version" is of version 1. One that lacks a field, or has one of another type, is
refused: a plan id or generation that is filled in would pass for what was stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from eplb.decision.pace import PaceChange
from eplb.migration.build import Migration
from telemetry.records.typed_json import from_record, version_of
from telemetry.store import Event, Outcome

EVENT_OF_OUTCOME: dict[Outcome, str] = {
    "committed": "commit",
    "aborted": "abort",
    "rejected": "reject",
}
JUDGED_PACE = "pace"  # kind: the pace of the next migration follows from the one before
STARTING = "starting"  # kind: a controller compiles its kernels, and cannot lead yet
OUTCOME_OF_EVENT = {kind: outcome for outcome, kind in EVENT_OF_OUTCOME.items()}
_VERSIONS = (1,)

T = TypeVar("T")


@dataclass(frozen=True)
class PlanOffer:
    """A migration was published."""

    plan_id: int
    base_generation: int
    generation: int  # that it leads to
    moves: int
    transactions: int

    @classmethod
    def of(cls, migration: Migration) -> PlanOffer:
        """Describe a migration."""
        return cls(
            plan_id=migration.plan_id,
            base_generation=migration.base.generation,
            generation=migration.target.generation,
            moves=len(migration.moves),
            transactions=len(migration.transactions),
        )


@dataclass(frozen=True)
class PlanEnd:
    """A placement was committed, or a migration dropped."""

    generation: int | None  # that serves now; None before the first
    plan_id: int  # 0: a placement that is not from a plan
    reason: str


def read_event(event: Event, cls: type[T]) -> T:
    """Read the detail of an event as a type.

    Raises:
        StoreError: an unknown version, or fields that are missing, unknown or of another type.
    """
    what, record = f"event {event.id} of kind {event.kind!r}", dict(event.detail)
    version_of(record, what, _VERSIONS)
    return from_record(cls, record, what)


def plan_offer(event: Event) -> PlanOffer | None:
    """Return which migration an event published; None for another event.

    Raises:
        StoreError: as ``read_event``.
    """
    return read_event(event, PlanOffer) if event.kind == "publish" else None


def plan_end(event: Event) -> PlanEnd | None:
    """Return how a plan has ended; None for another event, and for what is not from a plan.

    Raises:
        StoreError: as ``read_event``.
    """
    if event.kind not in OUTCOME_OF_EVENT:
        return None
    end = read_event(event, PlanEnd)
    return end if end.plan_id > 0 else None


def pace_change(event: Event) -> PaceChange | None:
    """Return how a migration's pace was judged; None for another event.

    Raises:
        StoreError: as ``read_event``.
    """
    return read_event(event, PaceChange) if event.kind == JUDGED_PACE else None
