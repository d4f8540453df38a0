"""What was wrong, since when and until when: findings of the verdict over time, and events.

    findings of each reading --> opened, renewed, ended
    events of the store      --> ended at once; they are read again after a restart

A finding that comes back is another anomaly. Findings are kept in the memory of the service, so
those that ended before it began are not known; outages are, because they are events.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from api.monitor.counts import anomaly_of
from api.monitor.state import EPOCH, FindingKind, Grade, Reading, Symptom
from eplb.declared import Meaning
from eplb.migration.recovery import Recovery
from telemetry.state.events import (
    FAILED,
    MEMBERSHIP,
    RECOVERED,
    RESTART,
    RESTORED,
    SWITCHED,
    Event,
    Failure,
    Judgement,
    Outage,
    Restored,
)
from telemetry.state.runs import RUN_BEGAN

KEPT = 1000
AROUND_S, MOST_EVENTS = 30.0, 8  # events before and after its beginning that tell why
TELLING = frozenset(
    {RECOVERED, MEMBERSHIP, RESTART, RESTORED, FAILED, "abort", "reject", "lease", SWITCHED}
    | {RUN_BEGAN}
)

Severity = Literal["critical", "warning", "notice"]
EventAnomaly = Literal[
    "rank-death", "store-lost", "sample-refused", "plan-failed", "error", "gain-missed"
]
OF_GRADE: dict[Grade, Severity] = {
    Grade.STOPPED: "critical",
    Grade.BLIND: "critical",
    Grade.DEGRADED: "warning",
    Grade.SERVING: "notice",
}
# Kind and severity, by the label of the metric of anomalies.
OF_EVENT: dict[str, tuple[EventAnomaly, Severity]] = {
    "rank_death": ("rank-death", "critical"),
    "store_lost": ("store-lost", "critical"),
    "load": ("sample-refused", "warning"),
    "plan": ("plan-failed", "warning"),
    "other": ("error", "warning"),
}


@dataclass(frozen=True)
class Anomaly:
    """Something that is or was wrong."""

    id: Annotated[int, Meaning("number of the anomaly; grows with each one of this service")]
    kind: FindingKind | EventAnomaly
    severity: Annotated[
        Severity,
        Meaning(
            "critical: stopped or blind, a death; warning: degraded; notice: serving is not worse"
        ),
    ]
    subject: Annotated[str, Meaning("the process; empty: ranks, or the deployment")]
    ranks: Annotated[
        tuple[int, ...], Meaning("ranks that it is about; empty: the process or the deployment")
    ]
    since: Annotated[float, Meaning("when it began, or else was first seen", unit=EPOCH)]
    until: Annotated[float | None, Meaning("when it ended; null: it is so now", unit=EPOCH)]
    text: Annotated[str, Meaning("what was found last, and what was expected")]
    events: Annotated[tuple[int, ...], Meaning("ids of events within 30 s of its beginning")]


class AnomalyLog:
    """Anomalies of one deployment, the latest of them. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: deque[Anomaly] = deque(maxlen=KEPT)  # ordered by end
        self._open: dict[tuple[str, str], Anomaly] = {}
        self._last_id = self._last_event = self._last_outage = 0

    def note(self, seen: Reading) -> None:
        """Take over what a reading of the store has found, and the verdict on it."""
        with self._lock:
            self._note_events(seen.events)
            worst_last = reversed(seen.findings)
            found = {(one.kind, one.subject): one for one in worst_last}
            for key, one in list(self._open.items()):
                if key not in found or _is_of_others(one, found[key]):
                    self._ended.append(replace(self._open.pop(key), until=seen.state.time))
            for key, finding in found.items():
                self._open[key] = self._renewed(key, finding, seen)
            self._note_outages(seen.events)

    def page(
        self, before: int | None, limit: int, is_open: bool | None = None
    ) -> tuple[list[Anomaly], int | None]:
        """Return anomalies from the newest id down, and the id to continue before; None: no more.

        Args:
            before: those with a lower id; None: from the newest.
            limit: of how many.
            is_open: those that are so now, or those that have ended; None: both.
        """
        with self._lock:
            every = [*self._ended, *self._open.values()]
        wanted = (one for one in every if is_open is None or (one.until is None) == is_open)
        found = sorted(
            (one for one in wanted if before is None or one.id < before), key=lambda one: -one.id
        )
        return found[:limit], found[limit - 1].id if len(found) > limit else None

    def _renewed(self, key: tuple[str, str], finding: Symptom, seen: Reading) -> Anomaly:
        """Give the anomaly of a finding: the open one, or a new one."""
        now = seen.state.time
        known = self._open.get(key)
        if known is None:
            self._last_id += 1
            none = (), now, None, finding.text, ()
            known = Anomaly(self._last_id, finding.kind, "notice", finding.subject, *none)
        since = known.since if finding.since is None else finding.since
        return replace(
            known,
            severity=OF_GRADE[finding.grade],
            ranks=finding.ranks,
            since=since,
            until=None,
            text=finding.text,
            events=known.events or _telling(seen.events, since),
        )

    def _note_outages(self, events: Sequence[Event]) -> None:
        """Give an outage that is on record its own dates, in place of those when it was seen."""
        for event in events:
            outage = event.fact
            if event.id <= self._last_outage or not isinstance(outage, Outage):
                continue
            self._last_outage = event.id
            dates = outage.start, outage.end
            seen = [
                one
                for one in self._ended
                if one.kind == "no-tokens"
                and one.since < outage.end
                and outage.start < (one.until or one.since)
            ]
            for one in seen:
                self._ended.remove(one)
            text = f"no token for {outage.unserved_s:.1f} s: {outage.reason}"
            self._last_id += 1
            number = seen[0].id if seen else self._last_id
            one = Anomaly(number, "no-tokens", "critical", "", (), *dates, text, (event.id,))
            self._ended.append(one)

    def _note_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.id <= self._last_event:
                continue
            self._last_event = event.id
            for kind, severity, text in _of_event(event):
                self._last_id += 1
                at = (event.time, event.time)
                one = Anomaly(self._last_id, kind, severity, "", (), *at, text, (event.id,))
                self._ended.append(one)


def _of_event(event: Event) -> Iterator[tuple[EventAnomaly, Severity, str]]:
    fact = event.fact
    if found := anomaly_of(event):
        why = ""
        if isinstance(fact, Failure):
            why = fact.message
        elif isinstance(fact, Recovery | Restored):
            why = fact.reason
        yield *OF_EVENT[found], why or f"event {event.kind}"
    elif isinstance(fact, Judgement) and fact.given < 0:
        text = (
            f"generation {fact.generation} gave {fact.given:.3f} in its first windows, "
            f"expected the {fact.promised:.3f} that it promised"
        )
        yield "gain-missed", "notice", text


def _is_of_others(one: Anomaly, finding: Symptom) -> bool:
    """Whether a finding is about other ranks than an open anomaly."""
    return bool(one.ranks and finding.ranks) and not set(one.ranks) & set(finding.ranks)


def _telling(events: Sequence[Event], since: float) -> tuple[int, ...]:
    near = (one.id for one in events if one.kind in TELLING and abs(one.time - since) <= AROUND_S)
    return tuple(near)[-MOST_EVENTS:]
