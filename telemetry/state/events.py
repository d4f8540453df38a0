"""Events: what happened, for people and for the audit. Some are read back by programs, as types.

``FACTS`` has the class of each such kind: it writes the detail, and reads it. A detail that lacks a
field, or has one of another type, is refused: a plan id or generation that is filled in would pass
for what was stored. ``Event.fact`` passes over fields that only a newer version knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, TypeVar

from eplb.decision.pace import PaceChange
from eplb.declared import Meaning
from eplb.errors import StoreError
from eplb.migration.build import Migration
from eplb.migration.recovery import Recovery
from telemetry.state.backend import Change, JournalLine, Range, Table, Value, number_in, text_of
from telemetry.state.codec import from_json, from_record, known_fields, to_json
from telemetry.state.part import Part, Records
from telemetry.state.runs import RUN_BEGAN, Details, RunBegan

PlanOutcome = Literal["committed", "aborted", "rejected"]
EVENT_OF_OUTCOME: dict[PlanOutcome, str] = {
    "committed": "commit",
    "aborted": "abort",
    "rejected": "reject",
}
OUTCOME_OF_EVENT = {kind: outcome for outcome, kind in EVENT_OF_OUTCOME.items()}
DECIDED = "plan"  # kind: the controller has decided on a plan
OFFERED = "publish"  # kind: a migration was published
JUDGED = "promise"  # kind: a plan was held to the gain that it promised
FAILED = "error"  # kind: something failed
EXCLUDED = "samples"  # kind: samples came that the controller does not count as load
SWITCHED = "control"  # kind: movement or observe was switched
RECOVERED = "recovery"  # kind: survivors agreed on what they serve after a death
RESTORED = "restore"  # kind: a rank restored a store that had lost its contents
JUDGED_PACE = "pace"  # kind: the pace of the next migration follows from the one before
OUTAGE = "outage"  # kind: tokens came again after a time without any
COMPILE = "compile"  # kind: a controller begins to compile its kernels, or has compiled them
WAITING = "waiting"  # kind: ranks cannot start yet
STOPPED = "stopped"  # kind: the ranks of a host ended as they were asked to
MEMBERSHIP = "membership"  # kind: the survivors of a death serve on
RESTART = "restart"  # kind: survivors cannot serve on, and all ranks start again
ENGINE_PLANS = "engine_plans"  # kind: an engine's own balancer plans, or its plug-in does again
REGROUPED = "regrouped"  # kind: ranks joined or left as planned
OF_RANKS = "ranks"  # where a failure was: a rank has ended
# Stages of MEMBERSHIP and REGROUPED, until the end of the first pass; the detail has their seconds.
SERVE_ON_STAGES = ("agree", "group", "map", "refill", "commit", "serve", "first pass")

KEPT_OUTAGES_S = 7 * 86_400.0  # longer than samples that an outage is found in
# "rank 3", "ranks: 0-7, 12", "ranks [3, 4]"
RANKS_IN_WORDS = re.compile(r"\branks?:? \[?(\d[\d,\- and]*)")
AUDIT_LINES = Table("audit_lines", is_ordered=True)  # number -> line

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """An event, for operators and the audit."""

    id: Annotated[int, Meaning("number of the event; it only grows")]
    time: Annotated[float, Meaning("time of the event", unit="s since the epoch")]
    kind: Annotated[str, Meaning("what happened", example="commit")]
    detail: Annotated[Details, Meaning("facts, by the kind of the event")]

    @cached_property
    def fact(self) -> object | None:
        """The detail as the class of its kind in FACTS; None: it has none, or cannot be read."""
        try:
            return read_fact(self)
        except StoreError:
            return None

    def is_about(self, rank: int) -> bool:
        """Whether it names a rank, as a fact or in its words."""
        detail = self.detail
        lists = (detail.get(name) for name in ("survivors", "lost", "ranks", "joined", "left"))
        if rank == detail.get("rank"):
            return True
        if any(rank in ranks for ranks in lists if isinstance(ranks, list | tuple)):
            return True
        words = " ".join(one for one in detail.values() if isinstance(one, str))
        named = " ".join(RANKS_IN_WORDS.findall(words))
        spans = re.findall(r"(\d+)(?:-(\d+))?", named)
        return any(int(first) <= rank <= int(last or first) for first, last in spans)


@dataclass(frozen=True)
class PhaseFigures:
    """Imbalance of a plan in the windows of one phase."""

    phase: str
    windows: int
    before: float | None
    after: float | None


@dataclass(frozen=True, kw_only=True)
class PlanDecision:
    """What was decided on a plan, by the controller or in an engine, and on what."""

    decision: str  # MOVE, RESPLIT or KEEP
    reason: str
    policy: str
    objective: str
    imbalance_before: float | None  # None: no tokens
    imbalance_after: float
    expected_gain: float
    moves: int
    bytes: int
    cost_s: float  # serving time that its moves and swaps take
    generation: int  # that was planned on
    target_generation: int
    phases: tuple[PhaseFigures, ...] | None = None  # where a plan weighs several
    window: int | None = None  # the newest that was planned on
    trigger: str | None = None  # what made it due
    actor: str | None = None  # the controller, or the task of an operator
    stage: str | None = None  # of the rollout
    plan_seconds: float | None = None  # that it took to plan
    windows: int | None = None  # that were planned on
    asked: Details | None = None  # request, budget and cost
    expert_curve: str | None = None  # source of the time of experts
    pace: Details | None = None  # of its migration, as ``pace_reason``; None: none was published
    pace_reason: str | None = None

    @property
    def moves_experts(self) -> bool:
        """Whether a migration follows."""
        return self.decision in ("MOVE", "RESPLIT")

    @property
    def num_uncovered(self) -> int:
        """Experts of all layers in fewer failure domains than ``min_domains``."""
        return int((self.asked or {}).get("num_uncovered", 0))


@dataclass(frozen=True)
class Judgement:
    """What a plan promised and gave, and the sums with it."""

    generation: int
    promised: float
    given: float
    record: list[float]  # promised, given


@dataclass(frozen=True)
class Failure:
    """Something failed, and what went on without it."""

    where: str  # a process, or a part of one
    message: str
    samples: Mapping[str, int] | None = None  # of this run so far, by what became of them
    others_serve: bool | None = None  # ranks of other hosts do


@dataclass(frozen=True)
class SampleCounts:
    """What became of the samples of this run so far."""

    samples: Mapping[str, int]


@dataclass(frozen=True)
class Switched:
    """Both switches after a change of either."""

    movement: bool
    observe: bool
    reason: str
    actor: str | None = None
    until: float | None = None  # when movement is switched on again by itself


@dataclass(frozen=True)
class Restart:
    """Why the survivors of a death cannot serve on."""

    run: str
    lost: tuple[int, ...]  # ranks
    reason: str


@dataclass(frozen=True)
class Restored:
    """What a rank wrote to a store that had lost its contents."""

    run: str
    generation: int
    last_plan_id: int
    movement: bool
    reason: str


@dataclass(frozen=True)
class ServedOn:
    """The survivors of a death serve."""

    seconds: Mapping[str, float]  # by SERVE_ON_STAGES


@dataclass(frozen=True)
class OfHost:
    """What happens to the ranks of a host, by its launcher or its host cache."""

    host: int
    message: str
    part: str | None = None  # None: the launcher


@dataclass(frozen=True)
class Compiling:
    """A controller compiles its kernels, or has compiled them."""

    holder: str
    state: Literal["begun", "done"]
    functions: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class EnginePlans:
    """Why an engine's own balancer plans; "": its plug-in does again."""

    reason: str


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


@dataclass(frozen=True)
class Outage:
    """A time without tokens, from the last one before it to the first one after it."""

    start: float  # seconds since the epoch, by the store's clock, as its end
    end: float
    unserved_s: float
    reason: str

    def overlaps(self, other: Outage) -> bool:
        """Whether both are of one time."""
        return self.start < other.end and other.start < self.end


# By the kind of an event, what its detail is written and read by.
FACTS: dict[str, type[object]] = {
    RUN_BEGAN: RunBegan,
    DECIDED: PlanDecision,
    OFFERED: PlanOffer,
    **dict.fromkeys(OUTCOME_OF_EVENT, PlanEnd),
    JUDGED: Judgement,
    JUDGED_PACE: PaceChange,
    OUTAGE: Outage,
    FAILED: Failure,
    EXCLUDED: SampleCounts,
    SWITCHED: Switched,
    RECOVERED: Recovery,
    RESTORED: Restored,
    RESTART: Restart,
    MEMBERSHIP: ServedOn,
    WAITING: OfHost,
    STOPPED: OfHost,
    COMPILE: Compiling,
    ENGINE_PLANS: EnginePlans,
}

# By the time of their start, in the order of their ends.
OUTAGES = Records(Outage, Table("outages", is_ordered=True), "the outage at")


class EventPart(Part):
    """The journal of a deployment."""

    def add_event(self, kind: str, detail: object) -> int:
        """Append an event and return its id; detail: a mapping, or what FACTS has for its kind."""
        text = to_json(detail)
        (event_id,) = self.backend.make(f"event {kind!r}", lambda c: c.append(kind, text))
        return event_id

    def add_outage(self, outage: Outage) -> None:
        """Record an outage, unless it is on record: several services may find it at once."""

        def decision(change: Change) -> None:
            later = OUTAGES.scan(change, Range(after=outage.start))
            if not any(known.overlaps(outage) for known in later):
                OUTAGES.put(change, repr(outage.start), outage, order=outage.end)
                note(change, OUTAGE, outage)

        self.backend.decide("an outage that ended", decision)
        self.backend.prune(OUTAGES.table, outage.end - KEPT_OUTAGES_S)

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return events past the id ``after``, oldest first; none only where no more follow."""
        while lines := self.backend.journal(after=after, limit=limit):
            if events := self._readable(lines):
                return events
            after = lines[-1].id
        return []

    def latest_events(self, *, before: int | None = None, limit: int = 1000) -> list[Event]:
        """Return events below the id ``before``, newest first; None: from the newest on."""
        while lines := self.backend.journal(before=before, limit=limit, newest_first=True):
            if events := self._readable(lines):
                return events
            before = lines[-1].id
        return []

    def events_onwards(self, after: int = 0) -> Iterator[Event]:
        """Give events past an id, oldest first, a page at a time as long as more are asked."""
        while page := self.events(after=after):
            yield from page
            after = page[-1].id

    def events_backwards(self, kinds: Container[str] | None = None) -> Iterator[Event]:
        """Give events of some kinds or all, newest first, as ``events_onwards``."""
        before = None
        while page := self.latest_events(before=before):
            yield from (event for event in page if kinds is None or event.kind in kinds)
            before = page[-1].id

    def _readable(self, lines: list[JournalLine]) -> list[Event]:
        named = [(line.id, line) for line in lines]
        return [event for _, event in self.backend.unreadable.readable(named, _event_of, "event")]

    def prune_events(self, keep: int) -> int:
        """Forget all but the latest ``keep`` events, and return how many; ids are not reused."""
        return self.backend.prune_journal(max(0, keep))

    def keep_audit_line(self, line: str) -> None:
        """Keep a line of the audit for as long as its file cannot be written."""

        def decision(change: Change) -> None:
            change.put(AUDIT_LINES, change.next("audit_line"), line)

        self.backend.decide("a line of the audit", decision)

    def audit_lines(self) -> list[tuple[int, str]]:
        """Return the lines of the audit that are not in its file, by number."""
        lines = [(number, (number, text)) for number, text in self.backend.scan(AUDIT_LINES)]
        readable = self.backend.unreadable.readable(lines, _audit_line_of, "audit line")
        return [line for _, line in readable]

    def forget_audit_lines(self, last: int) -> None:
        """Forget the lines up to a number, which are in the file."""
        self.backend.prune(AUDIT_LINES, last + 1)


def note(change: Change, kind: str, detail: object) -> None:
    """Append an event to a change, as ``add_event``."""
    change.append(kind, to_json(detail))


def read_event(event: Event, cls: type[T]) -> T:
    """Read the detail of an event as a type.

    Raises:
        StoreError: fields are missing, unknown or of another type.
    """
    return from_record(cls, event.detail, f"event {event.id} of kind {event.kind!r}")


def read_fact(event: Event) -> object | None:
    """Read the detail of an event as the class of its kind in FACTS; None: it has none.

    Raises:
        StoreError: fields are missing or of another type.
    """
    cls = FACTS.get(event.kind)
    if cls is None:
        return None
    detail = known_fields(cls, event.detail)
    return from_record(cls, detail, f"event {event.id} of kind {event.kind!r}")


def plan_end(event: Event) -> PlanEnd | None:
    """Return how a plan has ended; None for another event, and for what is not from a plan.

    Raises:
        StoreError: as ``read_event``.
    """
    if event.kind not in OUTCOME_OF_EVENT:
        return None
    end = read_event(event, PlanEnd)
    return end if end.plan_id > 0 else None


def _reader_of(kind: str, cls: type[T]) -> Callable[[Event], T | None]:
    """Return what reads the events of a kind as ``read_event``, and gives None for any other."""
    return lambda event: read_event(event, cls) if event.kind == kind else None


plan_offer = _reader_of(OFFERED, PlanOffer)
outage_of = _reader_of(OUTAGE, Outage)
pace_change = _reader_of(JUDGED_PACE, PaceChange)


def _audit_line_of(record: tuple[str, Value]) -> tuple[int, str]:
    number, text = record
    return number_in(number, "the number of an audit line"), text_of(text)


def _event_of(line: JournalLine) -> Event:
    return Event(line.id, line.time, line.kind, from_json(line.detail, f"event {line.id}"))
