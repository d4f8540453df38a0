"""Events: what happened, for people and for the audit. Some are read back by programs, as types.

    publish                  PlanOffer
    commit, abort, reject    PlanEnd
    pace                     eplb.decision.pace.PaceChange

A detail that lacks a field, or has one of another type, is refused: a plan id or generation that is
filled in would pass for what was stored.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from eplb.decision.pace import PaceChange
from eplb.declared import Meaning
from eplb.migration.build import Migration
from telemetry.state.backend import Change, JournalLine
from telemetry.state.codec import from_json, from_record, to_json
from telemetry.state.part import Part
from telemetry.state.runs import Details

Outcome = Literal["committed", "aborted", "rejected"]
EVENT_OF_OUTCOME: dict[Outcome, str] = {
    "committed": "commit",
    "aborted": "abort",
    "rejected": "reject",
}
OUTCOME_OF_EVENT = {kind: outcome for outcome, kind in EVENT_OF_OUTCOME.items()}
JUDGED_PACE = "pace"  # kind: the pace of the next migration follows from the one before
STARTING = "starting"  # kind: a controller compiles its kernels, and cannot lead yet
WAITING = "waiting"  # kind: ranks cannot start yet

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """An event, for operators and the audit."""

    id: Annotated[int, Meaning("number of the event; it only grows")]
    time: Annotated[float, Meaning("time of the event", unit="s since the epoch")]
    kind: Annotated[str, Meaning("what happened", example="commit")]
    detail: Annotated[Details, Meaning("facts, by the kind of the event")]


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


class EventPart(Part):
    """The journal of a deployment."""

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event and return its id."""
        text = to_json(dict(detail))
        (event_id,) = self.backend.make(f"event {kind!r}", lambda c: c.append(kind, text))
        return event_id

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return events past the id ``after``, oldest first."""
        return list(map(_event_of, self.backend.journal(after=after, limit=limit)))

    def latest_events(self, *, before: int | None = None, limit: int = 1000) -> list[Event]:
        """Return events below the id ``before``, newest first; None: from the newest on."""
        lines = self.backend.journal(before=before, limit=limit, newest_first=True)
        return list(map(_event_of, lines))

    def events_backwards(self, kinds: Container[str]) -> Iterator[Event]:
        """Give events of some kinds, newest first, a page at a time as long as more are asked."""
        before = None
        while page := self.latest_events(before=before):
            yield from (event for event in page if event.kind in kinds)
            before = page[-1].id

    def prune_events(self, keep: int) -> int:
        """Forget all but the latest ``keep`` events, and return how many; ids are not reused."""
        return self.backend.prune_journal(max(0, keep))


def note(change: Change, kind: str, detail: object) -> None:
    """Append an event to a change; detail: a mapping, or a dataclass of plain values."""
    fields = detail if isinstance(detail, dict) else vars(detail)
    change.append(kind, to_json(fields))


def read_event(event: Event, cls: type[T]) -> T:
    """Read the detail of an event as a type.

    Raises:
        StoreError: fields are missing, unknown or of another type.
    """
    return from_record(cls, event.detail, f"event {event.id} of kind {event.kind!r}")


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


def _event_of(line: JournalLine) -> Event:
    return Event(line.id, line.time, line.kind, from_json(line.detail, f"event {line.id}"))
