"""What was wrong, since when and until when: findings of the verdict over time, and events.

    findings of each reading --> opened, renewed, ended
    events of the store      --> ended at once; they are read again after a restart

Findings are kept in the memory of the service, so those that ended before it began are not known.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from api.monitor.snapshot import Snapshot
from api.monitor.tally import anomaly_of
from api.monitor.verdict import Finding, FindingKind, Grade
from telemetry.state.events import Event

KEPT = 1000
REOPENED_S = 60.0  # a finding that comes back within this is the same one
AROUND_S, MOST_EVENTS = 30.0, 8  # events before and after its beginning that tell why
TELLING = frozenset({"recovery", "restore", "error", "abort", "reject", "lease", "control", "run"})

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
# By what the metric of anomalies counts them as.
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

    id: int  # grows with each one of this service
    kind: FindingKind | EventAnomaly
    severity: Severity
    subject: str  # the process; "": ranks, or the deployment
    ranks: tuple[int, ...]
    since: float  # seconds since the epoch; when it was first seen, if no earlier time is known
    until: float | None  # None: it is so now
    text: str  # what was found last
    events: tuple[int, ...]  # ids of events at its beginning


class AnomalyLog:
    """Anomalies of one deployment, the latest of them. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: deque[Anomaly] = deque(maxlen=KEPT)  # in the order of their ends
        self._open: dict[tuple[str, str], Anomaly] = {}
        self._last_id, self._last_event = 0, 0

    def note(self, seen: Snapshot, findings: Sequence[Finding]) -> None:
        """Take over what a reading of the store has found.

        Args:
            seen: what the store holds.
            findings: all of the verdict on it.
        """
        with self._lock:
            self._note_events(seen.events)
            found = {(one.kind, one.subject): one for one in reversed(findings)}  # the worst stays
            for key in [key for key in self._open if key not in found]:
                self._ended.append(replace(self._open.pop(key), until=seen.time))
            for key, finding in found.items():
                self._open[key] = self._renewed(self._open.get(key), key, finding, seen)

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

    def _renewed(
        self, known: Anomaly | None, key: tuple[str, str], finding: Finding, seen: Snapshot
    ) -> Anomaly:
        known = known or self._reopened(key, seen.time)
        severity, since = OF_GRADE[finding.grade], seen.time
        if finding.since is not None:
            since = min(finding.since, since)
        if known is not None:
            since = min(since, known.since)
            return replace(
                known,
                severity=severity,
                ranks=finding.ranks,
                text=finding.text,
                since=since,
                events=known.events or _telling(seen.events, since),
            )
        self._last_id += 1
        return Anomaly(
            self._last_id,
            finding.kind,
            severity,
            finding.subject,
            finding.ranks,
            since,
            None,
            finding.text,
            _telling(seen.events, since),
        )

    def _reopened(self, key: tuple[str, str], now: float) -> Anomaly | None:
        for known in reversed(self._ended):
            is_recent = known.until is not None and now - known.until <= REOPENED_S
            if (known.kind, known.subject) == key and is_recent:
                self._ended.remove(known)
                return replace(known, until=None)
        return None

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
    detail = event.detail
    if found := anomaly_of(event):
        why = detail.get("message") or detail.get("reason") or f"event {event.kind}"
        yield *OF_EVENT[found], str(why)
    elif event.kind == "promise" and float(detail.get("given", 0.0)) < 0:
        text = (
            f"generation {detail.get('generation')} gave {float(detail['given']):.3f} in its first "
            f"windows, expected the {float(detail.get('promised', 0.0)):.3f} that it promised"
        )
        yield "gain-missed", "notice", text


def _telling(events: Sequence[Event], since: float) -> tuple[int, ...]:
    near = (one.id for one in events if one.kind in TELLING and abs(one.time - since) <= AROUND_S)
    return tuple(near)[-MOST_EVENTS:]
